// The dtypes that gradpack knows, by the names that NumPy and torch print.
#pragma once

#include <cstdint>
#include <string_view>

namespace gradpack {

// A complex number is two scalars of `scalar(dtype)`; every other dtype is one scalar of itself.
enum class DType : uint8_t {
  kBool,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt8,
  kUInt16,
  kUInt32,
  kUInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kComplex32,
  kComplex64,
  kComplex128,
};

inline constexpr int kNumDTypes = 16;

struct DTypeTraits {
  std::string_view name;
  int64_t itemsize;
  DType scalar;
  bool floating;  // has inf and NaN (complex too)
};

inline constexpr DTypeTraits kDTypeTraits[kNumDTypes] = {
    {"bool", 1, DType::kBool, false},          {"int8", 1, DType::kInt8, false},        {"int16", 2, DType::kInt16, false},
    {"int32", 4, DType::kInt32, false},        {"int64", 8, DType::kInt64, false},      {"uint8", 1, DType::kUInt8, false},
    {"uint16", 2, DType::kUInt16, false},      {"uint32", 4, DType::kUInt32, false},    {"uint64", 8, DType::kUInt64, false},
    {"float16", 2, DType::kFloat16, true},     {"bfloat16", 2, DType::kBFloat16, true}, {"float32", 4, DType::kFloat32, true},
    {"float64", 8, DType::kFloat64, true},     {"complex32", 4, DType::kFloat16, true}, {"complex64", 8, DType::kFloat32, true},
    {"complex128", 16, DType::kFloat64, true},
};

constexpr const DTypeTraits& traits(DType dtype) { return kDTypeTraits[static_cast<int>(dtype)]; }
constexpr std::string_view name(DType dtype) { return traits(dtype).name; }
constexpr int64_t itemsize(DType dtype) { return traits(dtype).itemsize; }
constexpr DType scalar(DType dtype) { return traits(dtype).scalar; }
constexpr bool is_floating(DType dtype) { return traits(dtype).floating; }
constexpr bool is_complex(DType dtype) { return dtype >= DType::kComplex32; }
// Scalars in one element: 2 for complex dtypes, else 1.
constexpr int64_t components(DType dtype) { return itemsize(dtype) / itemsize(scalar(dtype)); }

}  // namespace gradpack
