// Runs without instructions of any particular processor: element.h in a loop.
#include "kernels/cpu_runs_loops.h"

namespace gradpack {
namespace {

struct Scalar {
  static constexpr int64_t kLanes = 1;
  static constexpr int64_t kBytes = 8;

  template <typename T>
  static GP_INLINE AccumulatorOf<T> load(const T* from) {
    return to_accumulator(read(from));
  }
  static GP_INLINE uint64_t load_raw(const void* from) { return read(static_cast<const uint64_t*>(from)); }

  template <typename A>
  static GP_INLINE A multiply(A x, A operand) {
    return x * operand;
  }
  template <typename A>
  static GP_INLINE A divide(A x, A operand) {
    return x / operand;
  }
  template <typename A>
  static GP_INLINE A add(A sum, A x) {
    return gradpack::add(sum, x);
  }

  template <bool stream, typename To, typename A>
  static GP_INLINE To store(To* to, A value) {
    const To rounded = from_accumulator<To>(value);
    write(to, rounded);
    return rounded;
  }
  template <bool stream>
  static GP_INLINE uint64_t store_raw(void* to, uint64_t bits) {
    write(static_cast<uint64_t*>(to), bits);
    return bits;
  }

  struct Seen {
    bool seen = false;

    template <typename T>
    GP_INLINE void note(T value) {
      seen |= is_nonfinite(value);
    }
    template <typename T>
    GP_INLINE void note(uint64_t bits) {
      for (size_t i = 0; i < sizeof(bits) / sizeof(T); ++i) note<T>(read(reinterpret_cast<const T*>(&bits) + i));
    }
    template <typename T>
    GP_INLINE bool any() const {
      return seen;
    }
  };
};

constexpr CpuRuns kRuns = make_runs<Scalar>("scalar");

}  // namespace

const CpuRuns* const kCpuRunsScalar = &kRuns;

}  // namespace gradpack
