// The operations of ops.h on runs in CPU memory: one table of functions for each instruction set, the same bits from each.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "kernels/ops.h"

namespace gradpack {

// `count` elements of `from` to `to`, which do not overlap. Says whether any element that it wrote is inf or NaN (false from
// the functions that do not look). After kPastCaches the caller fences.
using ConvertRun = bool (*)(const void* from, void* to, int64_t count, double operand, Walk walk);
// to[i] = rows[0][at + i] + rows[1][at + i] + ..., summed in that order, divided and rounded as `convert` does. `to` may be where
// a row is read from. The return value is as above, and kManyPlaces is kUsual.
using SumRun = bool (*)(const void* const* rows, int num_rows, int64_t at, void* to, int64_t count, double operand, Walk walk);
using CheckRun = bool (*)(const void* from, int64_t count);

// Dtypes as the kernels tell them apart.
enum class Element : uint8_t { kU8, kU16, kU32, kU64, kF16, kBF16, kF32, kF64 };
inline constexpr int kNumElements = 8;

constexpr Element element_of(DType scalar_dtype) {
  switch (scalar_dtype) {
    case DType::kFloat16:
      return Element::kF16;
    case DType::kBFloat16:
      return Element::kBF16;
    case DType::kFloat32:
      return Element::kF32;
    case DType::kFloat64:
      return Element::kF64;
    default:
      break;
  }
  switch (itemsize(scalar_dtype)) {
    case 1:
      return Element::kU8;
    case 2:
      return Element::kU16;
    case 4:
      return Element::kU32;
    default:
      return Element::kU64;
  }
}

constexpr int64_t itemsize(Element element) {
  constexpr int64_t kSizes[kNumElements] = {1, 2, 4, 8, 2, 2, 4, 8};
  return kSizes[static_cast<int>(element)];
}

// Null where gradpack has no such operation.
struct CpuRuns {
  const char* name = nullptr;
  ConvertRun converts[kNumElements][kNumElements][kNumDivisions][2] = {};  // [from][to][Division][look for non-finite]
  SumRun sums[kNumElements][kNumElements][kNumDivisions][2] = {};          // likewise
  CheckRun checks[kNumElements] = {};

  ConvertRun convert(Element from, Element to, Division how, bool look) const {
    return converts[static_cast<int>(from)][static_cast<int>(to)][static_cast<int>(how)][look];
  }
  SumRun sum(Element from, Element to, Division how, bool look) const {
    return sums[static_cast<int>(from)][static_cast<int>(to)][static_cast<int>(how)][look];
  }
  CheckRun check(Element element) const { return checks[static_cast<int>(element)]; }
};

// Data, not functions: nothing of a table's file runs before the processor is known to have its instructions. Null where
// the file was compiled for another processor family.
extern const CpuRuns* const kCpuRunsScalar;
extern const CpuRuns* const kCpuRunsAvx2;
extern const CpuRuns* const kCpuRunsAvx512;

}  // namespace gradpack
