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

// A run that is read from several places in turn. Measured: a core that reads memory in one place gets 10 GB/s where it gets 14
// in four, with hardware prefetch at work in each; in eight, or in places less than 16 KiB apart, it gets less again, and so it
// does where what it writes goes past the caches.
constexpr int64_t kPlaces = 4;
constexpr int64_t kPlaceBytes = 16 << 10;
constexpr int64_t kLineBytes = 64;

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

  // From index i on, as far as that goes; returns where it ended.
  GP_INLINE int64_t many_places(int64_t i, int64_t count) {
    constexpr int64_t kPerLine = kLineBytes / static_cast<int64_t>(sizeof(From));
    constexpr int64_t kTurn = kPerLine > kLanes ? kPerLine : kLanes;
    constexpr int64_t kMost = kPlaceBytes / static_cast<int64_t>(sizeof(From)), kLeast = kMost / 4;
    while (count - i >= kPlaces * kLeast) {
      const int64_t fair = (count - i) / kPlaces / kTurn * kTurn, place = fair < kMost ? fair : kMost;
      for (const int64_t end = i + place; i < end; i += kTurn) {
        for (int64_t begin = i; begin < i + kPlaces * place; begin += place) {
#pragma GCC unroll 4
          for (int64_t part = 0; part < kTurn; part += kLanes) at<false>(begin + part);
        }
      }
      i += (kPlaces - 1) * place;
    }
    return i;
  }
};

template <typename Simd, typename From, typename To, Division how, bool look>
bool convert_run(const void* from_address, void* to_address, int64_t count, double divisor, Walk walk) {
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
  if (walk == Walk::kPastCaches && can_align) {
    for (; i <= last; i += Step::kLanes) step.template at<true>(i);
  }
  if (walk == Walk::kManyPlaces) i = step.many_places(i, count);
  for (; i <= last; i += Step::kLanes) step.template at<false>(i);
  // The rest ends where the run ends and overlaps what is done already: cheaper than a loop over single elements.
  if (i < count) step.template at<false>(last);
  return look && step.seen.template any<To>();
}

// One step of a sum: Simd's lanes at index i of every row.
template <typename Simd, typename From, typename To, Division how, bool look>
struct SumStep {
  const void* const* rows;
  int num_rows;
  int64_t at;
  To* to;
  AccumulatorOf<From> operand;
  typename Simd::Seen seen{};

  GP_INLINE const From* row(int index) const { return static_cast<const From*>(rows[index]) + at; }

  // Where the sum takes the place of a row, no element may be summed twice.
  GP_INLINE bool in_place() const {
    bool found = false;
    for (int index = 0; index < num_rows; ++index) found |= static_cast<const void*>(row(index)) == to;
    return found;
  }

  // kSteps registers at a time: the additions of one element wait for one another, those of several do not.
  template <bool stream, int kSteps, int kRows>
  GP_INLINE void at_index(int64_t i) {
    decltype(Simd::load(row(0))) sums[kSteps];
    const From* first = row(0) + i;
#pragma GCC unroll 8
    for (int step = 0; step < kSteps; ++step) sums[step] = Simd::load(first + step * Simd::kLanes);
    const int count = kRows > 0 ? kRows : num_rows;
#pragma GCC unroll 1
    for (int index = 1; index < count; ++index) {
      const From* next = row(index) + i;
#pragma GCC unroll 8
      for (int step = 0; step < kSteps; ++step) sums[step] = Simd::add(sums[step], Simd::load(next + step * Simd::kLanes));
    }
#pragma GCC unroll 8
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (how == Division::kMultiply) sums[step] = Simd::multiply(sums[step], operand);
      if constexpr (how == Division::kDivide) sums[step] = Simd::divide(sums[step], operand);
      const auto written = Simd::template store<stream>(to + i + step * Simd::kLanes, sums[step]);
      if constexpr (look) seen.template note<To>(written);
    }
  }

  GP_INLINE bool single(int64_t i) const {
    AccumulatorOf<From> sum = to_accumulator(read(row(0) + i));
    for (int index = 1; index < num_rows; ++index) sum = accumulate(sum, read(row(index) + i));
    const To value = convert<AccumulatorOf<From>, To, how>(sum, operand);
    write(to + i, value);
    return look && is_nonfinite(value);
  }

  template <bool stream, int kRows>
  GP_INLINE int64_t whole_registers(int64_t i, int64_t count) {
    constexpr int kSteps = 4;
    for (; i + kSteps * Simd::kLanes <= count; i += kSteps * Simd::kLanes) at_index<stream, kSteps, kRows>(i);
    for (; i + Simd::kLanes <= count; i += Simd::kLanes) at_index<stream, 1, kRows>(i);
    return i;
  }
};

template <typename Simd, typename From, typename To, Division how, bool look>
bool sum_run(const void* const* rows, int num_rows, int64_t at, void* to, int64_t count, double divisor, Walk walk) {
  SumStep<Simd, From, To, how, look> step{rows, num_rows, at, static_cast<To*>(to), static_cast<AccumulatorOf<From>>(divisor)};
  bool seen = false;
  int64_t i = 0;
  bool stream = walk == Walk::kPastCaches;
  if (stream) {
    // Streaming stores may not cross cache lines.
    const uint64_t past = reinterpret_cast<uint64_t>(to) % 64;
    if (past % sizeof(To) != 0) {
      stream = false;
    } else if (past != 0) {
      const int64_t head = static_cast<int64_t>((64 - past) / sizeof(To));
      for (const int64_t stop = head < count ? head : count; i < stop; ++i) seen |= step.single(i);
    }
  }
  if (stream) {
    i = num_rows == 2 ? step.template whole_registers<true, 2>(i, count) : step.template whole_registers<true, 0>(i, count);
  } else {
    i = num_rows == 2 ? step.template whole_registers<false, 2>(i, count) : step.template whole_registers<false, 0>(i, count);
  }
  if (i < count && count >= Simd::kLanes && !step.in_place()) {
    step.template at_index<false, 1, 0>(count - Simd::kLanes);  // overlaps what is done already, as in convert_run
  } else {
    for (; i < count; ++i) seen |= step.single(i);
  }
  return look && (seen || step.seen.template any<To>());
}

// Integers wrap and have no division, and compilers vectorise a loop over one row.
template <typename T>
bool sum_integers(const void* const* rows, int num_rows, int64_t at, void* to_address, int64_t count, double, Walk) {
  constexpr int64_t kBlock = 256;
  T sums[kBlock];
  T* to = static_cast<T*>(to_address);
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t length = count - begin < kBlock ? count - begin : kBlock;
    for (int64_t i = 0; i < length; ++i) sums[i] = read(static_cast<const T*>(rows[0]) + at + begin + i);
    for (int row = 1; row < num_rows; ++row) {
      const T* from = static_cast<const T*>(rows[row]) + at + begin;
      for (int64_t i = 0; i < length; ++i) sums[i] = accumulate(sums[i], read(from + i));
    }
    for (int64_t i = 0; i < length; ++i) write(to + begin + i, sums[i]);
  }
  return false;
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

template <typename Simd, typename From, typename To>
constexpr void add_sums(CpuRuns& runs) {
  auto& of_pair = runs.sums[static_cast<int>(kElementOf<From>)][static_cast<int>(kElementOf<To>)];
  if constexpr (kIsFloating<From>) {
    of_pair[0][0] = sum_run<Simd, From, To, Division::kNone, false>;
    of_pair[0][1] = sum_run<Simd, From, To, Division::kNone, true>;
    of_pair[1][0] = sum_run<Simd, From, To, Division::kMultiply, false>;
    of_pair[1][1] = sum_run<Simd, From, To, Division::kMultiply, true>;
    of_pair[2][0] = sum_run<Simd, From, To, Division::kDivide, false>;
    of_pair[2][1] = sum_run<Simd, From, To, Division::kDivide, true>;
  } else {
    of_pair[0][0] = of_pair[0][1] = sum_integers<From>;
  }
}

template <typename Simd, typename T>
constexpr void add_dtype(CpuRuns& runs) {
  add_converts<Simd, T, T>(runs);
  add_sums<Simd, T, T>(runs);
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
  add_sums<Simd, Float16, float>(runs);
  add_sums<Simd, Float16, double>(runs);
  add_sums<Simd, BFloat16, float>(runs);
  add_sums<Simd, BFloat16, double>(runs);
  return runs;
}

}  // namespace
}  // namespace gradpack
