// The arithmetic on one element. Every backend's kernels must give the bits that these functions give: they are the
// definition, and the fast versions are tested against them.
//
// Integers stand for themselves as unsigned numbers of their size: their sums wrap, and wrap alike for both signs.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/half.h"
#include "common/host_device.h"

namespace gradpack {

// The bits of a value as an unsigned number, and back.
template <typename To, typename From>
GP_HOST_DEVICE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// Sums of T are kept in AccumulatorOf<T>.
template <typename T>
struct Accumulator {
  using type = T;
};
template <>
struct Accumulator<Float16> {
  using type = float;
};
template <>
struct Accumulator<BFloat16> {
  using type = float;
};
template <typename T>
using AccumulatorOf = typename Accumulator<T>::type;

template <typename T>
inline constexpr bool kIsFloating = false;
template <>
inline constexpr bool kIsFloating<Float16> = true;
template <>
inline constexpr bool kIsFloating<BFloat16> = true;
template <>
inline constexpr bool kIsFloating<float> = true;
template <>
inline constexpr bool kIsFloating<double> = true;

// ---- widening: exact ---------------------------------------------------------------------------------------------------

GP_HOST_DEVICE float to_float(Float16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16;
  const uint32_t exponent = (x.bits >> 10) & 0x1fu;
  const uint32_t fraction = x.bits & 0x3ffu;
  uint32_t magnitude;
  if (exponent == 0x1f) {
    // NaN becomes quiet and keeps its payload, as F16C hardware does it.
    magnitude = 0x7f800000u | (fraction << 13) | (fraction ? 0x400000u : 0u);
  } else if (exponent == 0) {
    magnitude = bit_cast<uint32_t>(static_cast<float>(fraction) * 0x1p-24f);
  } else {
    magnitude = ((exponent + 112) << 23) | (fraction << 13);
  }
  return bit_cast<float>(sign | magnitude);
}

GP_HOST_DEVICE float to_float(BFloat16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

// ---- narrowing: to nearest, ties to even, subnormals kept, NaN stays NaN -------------------------------------------------

GP_HOST_DEVICE Float16 to_float16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t result;
  if (magnitude > 0x7f800000u) {
    result = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520, half way from the largest finite number to the next
    result = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // 2^-14, the smallest normal number
    result = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  } else if (magnitude < 0x33000000u) {  // 2^-25, half of the smallest number
    result = 0;
  } else {
    const uint32_t shift = 126 - (magnitude >> 23);
    const uint32_t significand = 0x800000u | (magnitude & 0x7fffffu);
    const uint32_t half = 1u << (shift - 1);
    const uint32_t rest = significand & ((half << 1) - 1);
    result = significand >> shift;
    result += rest > half || (rest == half && (result & 1u));
  }
  return Float16{static_cast<uint16_t>(sign | result)};
}

GP_HOST_DEVICE BFloat16 to_bfloat16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return BFloat16{static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return BFloat16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// Rounds toward zero and sets the last bit if that lost anything ("round to odd"), so that rounding the result once more, to
// a format at least two bits shorter, gives what rounding `value` to that format directly would give.
GP_HOST_DEVICE float to_odd_float(double value) {
  const uint64_t bits = bit_cast<uint64_t>(value);
  const uint32_t sign = static_cast<uint32_t>(bits >> 32) & 0x80000000u;
  const uint64_t magnitude = bits & 0x7fffffffffffffffu;
  uint32_t result;
  if (magnitude > 0x7ff0000000000000u) {
    result = 0x7fc00000u | (static_cast<uint32_t>(magnitude >> 29) & 0x3fffffu);
  } else if (magnitude == 0x7ff0000000000000u) {
    result = 0x7f800000u;
  } else if (magnitude >= 0x47f0000000000000u) {  // 2^128: finite, so the largest finite number, which is odd
    result = 0x7f7fffffu;
  } else if (magnitude >= 0x3810000000000000u) {  // 2^-126, the smallest normal number
    result = static_cast<uint32_t>((magnitude - 0x3800000000000000u) >> 29) | ((magnitude & 0x1fffffffu) != 0);
  } else {
    const uint64_t shift = 926 - (magnitude >> 52);
    const uint64_t significand = 0x10000000000000u | (magnitude & 0xfffffffffffffu);
    if (shift > 53) {
      result = magnitude != 0;
    } else {
      result = static_cast<uint32_t>(significand >> shift) | ((significand & ((uint64_t{1} << shift) - 1)) != 0);
    }
  }
  return bit_cast<float>(sign | result);
}

// ---- into the accumulator and out of it ----------------------------------------------------------------------------------

template <typename T>
GP_HOST_DEVICE AccumulatorOf<T> to_accumulator(T x) {
  if constexpr (kIsFloating<T> && sizeof(T) == 2) {
    return to_float(x);
  } else {
    return x;
  }
}

// Rounds once.
template <typename To, typename From>
GP_HOST_DEVICE To from_accumulator(From x) {
  if constexpr (sizeof(To) == 2 && kIsFloating<To>) {
    float narrow;
    if constexpr (sizeof(From) == 8) {
      narrow = to_odd_float(x);
    } else {
      narrow = x;
    }
    if constexpr (std::is_same_v<To, Float16>) {
      return to_float16(narrow);
    } else {
      return to_bfloat16(narrow);
    }
  } else {
    return static_cast<To>(x);
  }
}

// ---- arithmetic in the accumulator -----------------------------------------------------------------------------------------

// Processors disagree on which NaN comes of two, and of inf - inf, and compilers swap the operands of a sum: so there is one.
template <typename A>
GP_HOST_DEVICE A add(A sum, A x) {
  if constexpr (std::is_same_v<A, float>) {
    const float result = sum + x;
    return result == result ? result : bit_cast<float>(0x7fc00000u);
  } else if constexpr (std::is_same_v<A, double>) {
    const double result = sum + x;
    return result == result ? result : bit_cast<double>(uint64_t{0x7ff8000000000000u});
  } else {
    return static_cast<A>(sum + x);
  }
}

// The exponent bits of T, all of them set in inf and NaN and in no other value.
template <typename T>
inline constexpr uint64_t kExponentBits = 0;
template <>
inline constexpr uint64_t kExponentBits<Float16> = 0x7c00;
template <>
inline constexpr uint64_t kExponentBits<BFloat16> = 0x7f80;
template <>
inline constexpr uint64_t kExponentBits<float> = 0x7f800000;
template <>
inline constexpr uint64_t kExponentBits<double> = 0x7ff0000000000000;

template <typename T>
GP_HOST_DEVICE bool is_nonfinite(T x) {
  if constexpr (!kIsFloating<T>) {
    (void)x;
    return false;
  } else if constexpr (sizeof(T) == 2) {
    return (x.bits & kExponentBits<T>) == kExponentBits<T>;
  } else if constexpr (sizeof(T) == 4) {
    return (bit_cast<uint32_t>(x) & kExponentBits<T>) == kExponentBits<T>;
  } else {
    return (bit_cast<uint64_t>(x) & kExponentBits<T>) == kExponentBits<T>;
  }
}

}  // namespace gradpack
