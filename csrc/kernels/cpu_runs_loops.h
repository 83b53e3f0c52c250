// The loops of the run kernels, over a `Simd` that each cpu_runs_*.cc supplies. A Simd has
//
//   kLanes, kBytes         elements of one step, bytes of one raw register
//   load(p), load_raw(p)   kLanes elements in their accumulator; kBytes bytes as they are
//   multiply, divide, add  in the accumulator (add as in element.h)
//   store<stream>(p, accumulator), store_raw<stream>(p, raw)      round, write; both return what they wrote
//   Seen                   note<T>(what store returned), any<T>(): whether an inf or a NaN was among it
//
// Everything here has internal linkage, and no function of the standard library is called: each including file is compiled
// for other instructions, and a shared out-of-line copy could run on a processor that lacks them.
#pragma once

#include "kernels/cpu_runs.h"

namespace gradpack {
namespace {

#define GP_INLINE inline __attribute__((always_inline))

// Arrays need not be aligned to their elements.
template <typename T>
GP_INLINE T read(const T* from) {
  T value;
  memcpy(&value, from, sizeof(T));
  return value;
}
template <typename T>
GP_INLINE void write(T* to, T value) {
  memcpy(to, &value, sizeof(T));
}

template <typename From, typename To, Division how, bool look>
GP_INLINE bool convert_singles(const From* from, To* to, int64_t count, AccumulatorOf<From> operand) {
  bool seen = false;
#pragma GCC unroll 1
  for (int64_t i = 0; i < count; ++i) {
    const To value = convert<From, To, how>(read(from + i), operand);
    if constexpr (look) seen |= is_nonfinite(value);
    write(to + i, value);
  }
  return seen;
}

// How far ahead of the loads a convert fetches. Measured: a page (so into the next one, where hardware prefetch starts anew)
// is 5 to 8 % faster than none, and than 1 KiB.
constexpr uint64_t kPrefetchBytes = 4096;

// One step of a convert: Simd's lanes at index i.
template <typename Simd, typename From, typename To, Division how, bool look>
struct ConvertStep {
  // A dtype to itself, undivided: bits, not numbers.
  static constexpr bool kRaw = std::is_same_v<From, To> && how == Division::kNone;
  static constexpr int64_t kLanes = kRaw ? Simd::kBytes / static_cast<int64_t>(sizeof(To)) : Simd::kLanes;

  const From* from;
  To* to;
  AccumulatorOf<From> operand;
  typename Simd::Seen seen{};

  template <bool stream>
  GP_INLINE void at(int64_t i) {
    if constexpr (Simd::kBytes >= 32) {
      // May point past the run: into the next gradient, as often as not, and nowhere does a prefetch fault.
      __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uint64_t>(from + i) + kPrefetchBytes));
    }
    if constexpr (kRaw) {
      const auto written = Simd::template store_raw<stream>(to + i, Simd::load_raw(from + i));
      if constexpr (look) seen.template note<To>(written);
    } else {
      auto values = Simd::load(from + i);
      if constexpr (how == Division::kMultiply) values = Simd::multiply(values, operand);
      if constexpr (how == Division::kDivide) values = Simd::divide(values, operand);
      const auto written = Simd::template store<stream>(to + i, values);
      if constexpr (look) seen.template note<To>(written);
    }
  }
};

template <typename Simd, typename From, typename To, Division how, bool look>
bool convert_run(const void* from_address, void* to_address, int64_t count, double divisor, bool stream) {
  using Step = ConvertStep<Simd, From, To, how, look>;
  const From* from = static_cast<const From*>(from_address);
  To* to = static_cast<To*>(to_address);
  const auto operand = static_cast<AccumulatorOf<From>>(divisor);
  if (count < Step::kLanes) return convert_singles<From, To, how, look>(from, to, count, operand);

  Step step{from, to, operand};
  const int64_t last = count - Step::kLanes;
  int64_t i = 0;
  // Stores that cross cache lines cost more than loads that do, and streaming stores may not: the elements before the first
  // whole register of `to` are converted by themselves, with some that come after, which are converted twice.
  constexpr uint64_t kStepBytes = Step::kLanes * sizeof(To);
  const uint64_t past = reinterpret_cast<uint64_t>(to) % kStepBytes;
  const bool can_align = past % sizeof(To) == 0;
  if (past != 0 && can_align) {
    step.template at<false>(0);
    i = static_cast<int64_t>((kStepBytes - past) / sizeof(To));
  }
  if (stream && can_align) {
    for (; i <= last; i += Step::kLanes) step.template at<true>(i);
  }
  for (; i <= last; i += Step::kLanes) step.template at<false>(i);
  // The rest ends where the run ends and overlaps what is done already: cheaper than a loop over single elements.
  if (i < count) step.template at<false>(last);
  return look && step.seen.template any<To>();
}

template <typename Simd, typename T>
void accumulate_run(void* sums_address, const void* row_address, int64_t count) {
  using Sum = AccumulatorOf<T>;
  Sum* sums = static_cast<Sum*>(sums_address);
  const T* row = static_cast<const T*>(row_address);
  int64_t i = 0;
  if constexpr (kIsFloating<T>) {
    for (; i + Simd::kLanes <= count; i += Simd::kLanes) {
      Simd::template store<false>(sums + i, Simd::add(Simd::load(sums + i), Simd::load(row + i)));
    }
  }
  // Integers take this loop alone: compilers vectorise it.
  for (; i < count; ++i) sums[i] = accumulate(sums[i], read(row + i));
}

template <typename Simd, typename T>
bool check_run(const void* from_address, int64_t count) {
  constexpr int64_t kLanes = Simd::kBytes / static_cast<int64_t>(sizeof(T));
  const T* from = static_cast<const T*>(from_address);
  typename Simd::Seen seen{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) seen.template note<T>(Simd::load_raw(from + i));
  bool found = seen.template any<T>();
  for (; i < count; ++i) found |= is_nonfinite(read(from + i));
  return found;
}

// ---- the table ---------------------------------------------------------------------------------------------------------

template <typename T>
constexpr Element kElementOf = Element::kU8;
template <>
constexpr Element kElementOf<uint16_t> = Element::kU16;
template <>
constexpr Element kElementOf<uint32_t> = Element::kU32;
template <>
constexpr Element kElementOf<uint64_t> = Element::kU64;
template <>
constexpr Element kElementOf<Float16> = Element::kF16;
template <>
constexpr Element kElementOf<BFloat16> = Element::kBF16;
template <>
constexpr Element kElementOf<float> = Element::kF32;
template <>
constexpr Element kElementOf<double> = Element::kF64;

template <typename Simd, typename From, typename To>
constexpr void add_converts(CpuRuns& runs) {
  auto& of_pair = runs.converts[static_cast<int>(kElementOf<From>)][static_cast<int>(kElementOf<To>)];
  of_pair[0][0] = convert_run<Simd, From, To, Division::kNone, false>;
  if constexpr (kIsFloating<From>) {
    of_pair[0][1] = convert_run<Simd, From, To, Division::kNone, true>;
    of_pair[1][0] = convert_run<Simd, From, To, Division::kMultiply, false>;
    of_pair[1][1] = convert_run<Simd, From, To, Division::kMultiply, true>;
    of_pair[2][0] = convert_run<Simd, From, To, Division::kDivide, false>;
    of_pair[2][1] = convert_run<Simd, From, To, Division::kDivide, true>;
  } else {
    of_pair[0][1] = of_pair[0][0];  // integers are always finite
  }
}

template <typename Simd, typename T>
constexpr void add_dtype(CpuRuns& runs) {
  add_converts<Simd, T, T>(runs);
  runs.accumulates[static_cast<int>(kElementOf<T>)] = accumulate_run<Simd, T>;
  if constexpr (kIsFloating<T>) runs.checks[static_cast<int>(kElementOf<T>)] = check_run<Simd, T>;
}

template <typename Simd>
constexpr CpuRuns make_runs(const char* name) {
  CpuRuns runs;
  runs.name = name;
  add_dtype<Simd, uint8_t>(runs);
  add_dtype<Simd, uint16_t>(runs);
  add_dtype<Simd, uint32_t>(runs);
  add_dtype<Simd, uint64_t>(runs);
  add_dtype<Simd, Float16>(runs);
  add_dtype<Simd, BFloat16>(runs);
  add_dtype<Simd, float>(runs);
  add_dtype<Simd, double>(runs);
  add_converts<Simd, float, Float16>(runs);
  add_converts<Simd, float, BFloat16>(runs);
  add_converts<Simd, double, Float16>(runs);
  add_converts<Simd, double, BFloat16>(runs);
  add_converts<Simd, Float16, float>(runs);
  add_converts<Simd, BFloat16, float>(runs);
  add_converts<Simd, Float16, double>(runs);
  add_converts<Simd, BFloat16, double>(runs);
  add_converts<Simd, float, double>(runs);
  return runs;
}

}  // namespace
}  // namespace gradpack
