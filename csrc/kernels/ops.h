// The operations on a run of elements (elements that lie side by side). There are two: `convert` moves a run from one dtype
// to another, dividing and looking for non-finite values on the way; `sum` does the same with the sum of several runs, one
// `accumulate` for each. pack, unpack and the reductions of backend.h are walks that call them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/element.h"

namespace gradpack {

// How a run goes through memory.
enum class Walk : uint8_t {
  kUsual,
  kPastCaches,  // writes with streaming stores, what nobody reads soon
  kManyPlaces,  // reads in several places in turn, what lies in memory and not in the caches
};

// How a run is divided. x * (1 / n) has the bits of x / n where n is a power of two, and only there.
enum class Division : uint8_t { kNone, kMultiply, kDivide };
inline constexpr int kNumDivisions = 3;

// A divisor made ready for the kernels: x * operand or x / operand, in the accumulator's dtype.
struct Divisor {
  Division how;
  double operand;
};

inline Divisor make_divisor(int64_t divisor) {
  if (divisor == 0 || divisor == 1) return {Division::kNone, 1.0};
  if ((divisor & (divisor - 1)) == 0) return {Division::kMultiply, 1.0 / static_cast<double>(divisor)};
  return {Division::kDivide, static_cast<double>(divisor)};
}

// One element of `convert`: divided in From's accumulator, rounded once to To. Without division a dtype converts to itself
// bit for bit, signalling NaNs too.
template <typename From, typename To, Division how>
GP_HOST_DEVICE To convert(From x, AccumulatorOf<From> operand) {
  (void)operand;
  if constexpr (how == Division::kNone && std::is_same_v<From, To>) {
    return x;
  } else if constexpr (how == Division::kNone) {
    return from_accumulator<To>(to_accumulator(x));
  } else if constexpr (how == Division::kMultiply) {
    return from_accumulator<To>(to_accumulator(x) * operand);
  } else {
    return from_accumulator<To>(to_accumulator(x) / operand);
  }
}

// One addition of `sum`.
template <typename T>
GP_HOST_DEVICE AccumulatorOf<T> accumulate(AccumulatorOf<T> sum, T x) {
  return add(sum, to_accumulator(x));
}

}  // namespace gradpack
