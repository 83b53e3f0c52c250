// The operations of backend.h on CPU memory: walks over the chunks of a range that call the run kernels of one instruction
// set, the range cut into blocks that threads take in turn.
#include <cfenv>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "kernels/backend.h"
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "common/check.h"
#include "kernels/cpu_runs.h"
#include "kernels/strided.h"
#include "kernels/thread_pool.h"

namespace gradpack {
namespace {

// Streams of this many bytes push themselves out of the caches, so they are written past them: no line is read just to be
// overwritten. For packs that is 30 % faster here and leaves it to the transport to read its slot from memory.
constexpr int64_t kStreamBytes = int64_t{32} << 20;

}  // namespace

Manner usual_manner(const Stream& stream) {
  return {stream.numel() * itemsize(scalar(stream.dtype)) >= kStreamBytes ? Walk::kPastCaches : Walk::kUsual, true};
}

namespace cpu {
namespace {

// Below this a second thread costs more than it saves.
constexpr int64_t kSerialBytes = 256 << 10;
// What a thread takes at a time: long enough that hardware prefetch pays, short enough that threads end together.
constexpr int64_t kBlockBytes = 512 << 10;
// Shorter runs are written the usual way.
constexpr int64_t kMinStreamRun = 4 << 10;
// Of the next gradient, fetched while one is visited.
constexpr int64_t kBytesAhead = 4 << 10;

// ---- instruction set -----------------------------------------------------------------------------------------------------

bool has_avx2() {
#if defined(__x86_64__)
  return kCpuRunsAvx2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

bool has_avx512() {
#if defined(__x86_64__)
  return kCpuRunsAvx512 && has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

const CpuRuns* choose_runs() {
  const CpuRuns* const best = has_avx512() ? kCpuRunsAvx512 : has_avx2() ? kCpuRunsAvx2 : kCpuRunsScalar;
  const char* setting = std::getenv("GRADPACK_SIMD");
  if (!setting || !*setting) return best;
  const std::string_view wanted = setting;
  if (wanted == "scalar") return kCpuRunsScalar;
  if (wanted == "avx2" && has_avx2()) return kCpuRunsAvx2;
  if (wanted == "avx512" && has_avx512()) return kCpuRunsAvx512;
  raise(ErrorKind::kValue, "environment: GRADPACK_SIMD: found '", setting, "', wanted one that this processor has: scalar",
        has_avx2() ? ", avx2" : "", has_avx512() ? ", avx512" : "");
}

const CpuRuns& runs() {
  static const CpuRuns* const chosen = choose_runs();
  return *chosen;
}

// ---- blocks and threads ----------------------------------------------------------------------------------------------------

// Rounding to nearest, subnormals kept, no traps, whatever the calling thread has set (torch.set_flush_denormal), until the
// end of the scope. The kernels are called through pointers, so the compiler moves none of their arithmetic out of it.
class DefaultArithmetic {
 public:
  DefaultArithmetic(const DefaultArithmetic&) = delete;
  DefaultArithmetic& operator=(const DefaultArithmetic&) = delete;
#if defined(__SSE__)
  DefaultArithmetic() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultArithmetic() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#else
  DefaultArithmetic() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultArithmetic() { std::fesetenv(&before_); }

 private:
  std::fenv_t before_;
#endif
};

// Streaming stores are not ordered with the release of a lock.
void finish_streaming() {
#if defined(__SSE__)
  _mm_sfence();
#endif
}

// Calls body(begin, end) for pieces that make up [range.begin, range.end), from as many threads as pay. A piece begins a multiple
// of 64 scalars from the range's begin, so never inside a complex number.
template <typename Body>
void for_each_block(const Range& range, Body&& body) {
  const int64_t count = range.end - range.begin;
  if (count <= 0) return;
  const auto run_piece = [&](int64_t begin, int64_t end) {
    const DefaultArithmetic arithmetic;
    body(begin, end);
    finish_streaming();
  };
  const int64_t bytes = std::max(itemsize(scalar(range.stream->dtype)), itemsize(range.stream->wire));
  if (!range.manner.pool || count * bytes < kSerialBytes) return run_piece(range.begin, range.end);

  static_assert(kBlockBytes % (64 * 8) == 0);
  const int64_t block = kBlockBytes / bytes;
  auto run_block = [&](int64_t index) {
    const int64_t begin = range.begin + index * block;
    run_piece(begin, std::min(range.end, begin + block));
  };
  using RunBlock = decltype(run_block);
  run_blocks((count + block - 1) / block, [](void* job, int64_t index) { (*static_cast<RunBlock*>(job))(index); }, &run_block);
}

// ---- runs ------------------------------------------------------------------------------------------------------------------

Walk walk_of(Walk walk, int64_t count) { return walk == Walk::kPastCaches && count < kMinStreamRun ? Walk::kUsual : walk; }

// A convert, and a sum, with each kind of division, looked up once for a range.
class Converts {
 public:
  Converts(Element from, Element to, bool look, Walk walk) : walk_(walk) {
    for (int how = 0; how < kNumDivisions; ++how) runs_[how] = runs().convert(from, to, static_cast<Division>(how), look);
  }
  bool operator()(const void* from, void* to, int64_t count, const Divisor& divisor) const {
    return runs_[static_cast<int>(divisor.how)](from, to, count, divisor.operand, walk_of(walk_, count));
  }

 private:
  ConvertRun runs_[kNumDivisions];
  Walk walk_;
};

class Sums {
 public:
  Sums(Element from, Element to, const void* const* rows, int num_rows, bool look, Walk walk)
      : rows_(rows), num_rows_(num_rows), walk_(walk) {
    for (int how = 0; how < kNumDivisions; ++how) runs_[how] = runs().sum(from, to, static_cast<Division>(how), look);
  }
  // Of the `count` scalars that begin `at` scalars after the begin of each row.
  bool operator()(int64_t at, void* to, int64_t count, const Divisor& divisor) const {
    const SumRun run = runs_[static_cast<int>(divisor.how)];
    return run(rows_, num_rows_, at, to, count, divisor.operand, walk_of(walk_, count));
  }

 private:
  const void* const* const rows_;
  const int num_rows_;
  SumRun runs_[kNumDivisions];
  Walk walk_;
};

class Divisors {
 public:
  explicit Divisors(const Divide& divide) : divide_(divide), common_(make_divisor(divide.divisor)) {}
  Divisor of(int64_t gradient) const { return divide_.counts ? make_divisor(divide_.counts[gradient]) : common_; }

 private:
  const Divide divide_;
  const Divisor common_;
};

void note(uint8_t* nonfinite, int64_t gradient, bool found) {
  if (found) __atomic_store_n(nonfinite + gradient, uint8_t{1}, __ATOMIC_RELAXED);  // threads may set the same one
}

char* offset(const void* address, int64_t bytes) { return static_cast<char*>(const_cast<void*>(address)) + bytes; }

// for_each_chunk over the gradients of a range, with the next gradient on its way into the cache while one is visited: hardware
// prefetch starts anew with every gradient, and many small ones spend their time waiting for it.
template <typename Visit>
void for_each_chunk_ahead(const Range& range, int64_t begin, int64_t end, Visit&& visit) {
  const int64_t size = itemsize(scalar(range.stream->dtype));
  Chunk chunk{0, 0, 0, 0};
  for_each_chunk(*range.stream, begin, end, [&](const Chunk& next) {
    const ArrayView& view = range.arrays[next.gradient];
    if (view.data && view.dense()) {
      const char* const data = offset(view.data, next.gradient_begin * size);
      const int64_t bytes = std::min(next.count * size, kBytesAhead);
      for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(data + byte);
    }
    if (chunk.count > 0) visit(chunk);
    chunk = next;
  });
  if (chunk.count > 0) visit(chunk);
}

// The elements of a stream: of its gradients, of its wire.
struct Elements {
  explicit Elements(const Stream& stream) : gradient(element_of(scalar(stream.dtype))), wire(element_of(stream.wire)) {}
  const Element gradient, wire;
};

}  // namespace

// ---- the operations ----------------------------------------------------------------------------------------------------------

void pack(const Range& range, void* wire, uint8_t* nonfinite) {
  const Elements elements(*range.stream);
  const Converts convert(elements.gradient, elements.wire, nonfinite != nullptr, range.manner.walk);
  const Divisor whole = make_divisor(1);
  const int64_t size = itemsize(elements.wire);
  for_each_block(range, [&](int64_t begin, int64_t end) {
    char* const block = offset(wire, (begin - range.begin) * size);
    for_each_chunk_ahead(range, begin, end, [&](const Chunk& chunk) {
      const ArrayView& view = range.arrays[chunk.gradient];
      char* const to = block + chunk.range_begin * size;
      if (!view.data) {
        memset(to, 0, static_cast<size_t>(chunk.count * size));
        return;
      }
      read_runs(view, chunk.gradient_begin, chunk.count, [&](const void* run, int64_t at, int64_t count) {
        note(nonfinite, chunk.gradient, convert(run, to + at * size, count, whole));
      });
    });
  });
}

void unpack(const Range& range, const void* wire, const Divide& divide, uint8_t* nonfinite) {
  const Elements elements(*range.stream);
  const Converts convert(elements.wire, elements.gradient, nonfinite != nullptr, range.manner.walk);
  const Divisors divisors(divide);
  const int64_t size = itemsize(elements.wire);
  for_each_block(range, [&](int64_t begin, int64_t end) {
    const char* const block = offset(wire, (begin - range.begin) * size);
    for_each_chunk_ahead(range, begin, end, [&](const Chunk& chunk) {
      const ArrayView& view = range.arrays[chunk.gradient];
      if (!view.data) return;
      const char* const from = block + chunk.range_begin * size;
      const Divisor divisor = divisors.of(chunk.gradient);
      write_runs(view, chunk.gradient_begin, chunk.count, [&](void* run, int64_t at, int64_t count) {
        note(nonfinite, chunk.gradient, convert(from + at * size, run, count, divisor));
      });
    });
  });
}

void reduce_unpack(const Range& range, const void* const* rows, int num_rows, const Divide& divide, uint8_t* nonfinite) {
  const Elements elements(*range.stream);
  const Sums sum(elements.wire, elements.gradient, rows, num_rows, nonfinite != nullptr, range.manner.walk);
  const Divisors divisors(divide);
  for_each_block(range, [&](int64_t begin, int64_t end) {
    for_each_chunk_ahead(range, begin, end, [&](const Chunk& chunk) {
      const ArrayView& view = range.arrays[chunk.gradient];
      if (!view.data) return;
      const int64_t in_rows = begin - range.begin + chunk.range_begin;
      const Divisor divisor = divisors.of(chunk.gradient);
      write_runs(view, chunk.gradient_begin, chunk.count, [&](void* run, int64_t at, int64_t count) {
        note(nonfinite, chunk.gradient, sum(in_rows + at, run, count, divisor));
      });
    });
  });
}

void reduce(const Range& range, const void* const* rows, int num_rows, const Divide& divide, void* wire) {
  const Elements elements(*range.stream);
  const Sums sum(elements.wire, elements.wire, rows, num_rows, false, Walk::kUsual);
  const Divisors divisors(divide);
  const int64_t size = itemsize(elements.wire);
  for_each_block(range, [&](int64_t begin, int64_t end) {
    for_each_chunk(*range.stream, begin, end, [&](const Chunk& chunk) {
      const int64_t in_rows = begin - range.begin + chunk.range_begin;
      sum(in_rows, offset(wire, in_rows * size), chunk.count, divisors.of(chunk.gradient));
    });
  });
}

void check_finite(const Range& range, uint8_t* nonfinite) {
  const CheckRun check = runs().check(Elements(*range.stream).gradient);
  if (!check) return;
  for_each_block(range, [&](int64_t begin, int64_t end) {
    for_each_chunk_ahead(range, begin, end, [&](const Chunk& chunk) {
      const ArrayView& view = range.arrays[chunk.gradient];
      if (!view.data) return;
      read_runs(view, chunk.gradient_begin, chunk.count,
                [&](const void* run, int64_t, int64_t count) { note(nonfinite, chunk.gradient, check(run, count)); });
    });
  });
}

const char* simd_name() { return runs().name; }
void set_num_threads(int num_threads) { set_pool_threads(num_threads); }
int num_threads() { return pool_threads(); }

}  // namespace cpu
}  // namespace gradpack
