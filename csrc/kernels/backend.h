// The operations on a range of a stream, the same for every backend. None allocates in proportion to the data, none needs the
// GIL, and none checks its arguments: bind_kernels.cc does, once.
#pragma once

#include <cstdint>

#include "common/array_view.h"
#include "kernels/launch_table.h"
#include "kernels/ops.h"

namespace gradpack {

// What is done to a sum on its way out: x / divisor, correctly rounded in the dtype of the sum. `counts`, if given, holds
// one divisor for each of the call's arrays and takes the place of `divisor`. A divisor of 1 (and of 0) does nothing.
struct Divide {
  int64_t divisor = 1;
  const int32_t* counts = nullptr;

  int64_t of(int64_t gradient) const { return counts ? counts[gradient] : divisor; }
};

// How an operation goes about its work, which changes no bit of it.
struct Manner {
  Walk walk;
  bool pool;  // shares the work with the threads of the pool where that pays
};

// What suits an operation that walks through all of a stream: packs and gradients that push themselves out of the caches are
// written past them.
Manner usual_manner(const Stream& stream);

// A range [begin, end) of `stream`, in scalars, of the gradients seen through `arrays` (indexed as stream.gradients says).
struct Range {
  const Stream* stream;
  const ArrayView* arrays;
  int64_t begin;
  int64_t end;
  Manner manner;
};

// `nonfinite`, if not null, has one byte for each of the call's arrays; a byte is set to 1 where an inf or a NaN was seen
// and is otherwise left as it was.
namespace cpu {

// gradients -> wire: cast to stream.wire. Absent gradients become zeros. Looks for non-finite values in the gradients, and
// for finite ones that overflow the wire dtype.
void pack(const Range& range, void* wire, uint8_t* nonfinite);

// wire -> gradients: divide in the wire's accumulator (see reduce_unpack), cast once to stream.dtype, write. Looks for
// non-finite values in what it writes.
void unpack(const Range& range, const void* wire, const Divide& divide, uint8_t* nonfinite);

// rows -> gradients: sums num_rows wire buffers of the range in row order (accumulator: float32 for 16-bit floats and
// float32, float64 for float64, the dtype itself, wrapping, for integers), divides in the accumulator's dtype, casts once to
// stream.dtype, writes. Looks for non-finite values in what it writes.
void reduce_unpack(const Range& range, const void* const* rows, int num_rows, const Divide& divide, uint8_t* nonfinite);

// rows -> wire: the same sum and division, rounded once to stream.wire, written to `wire` (which may be one of the rows).
// `range.arrays` is not read.
void reduce(const Range& range, const void* const* rows, int num_rows, const Divide& divide, void* wire);

// Looks for non-finite values in the gradients; moves nothing.
void check_finite(const Range& range, uint8_t* nonfinite);

// "avx512", "avx2" or "scalar": what the kernels use, the best that this processor has unless GRADPACK_SIMD names another.
const char* simd_name();

// Threads that an operation may use, the calling one included. Starts none before they are needed.
void set_num_threads(int num_threads);
int num_threads();

}  // namespace cpu
}  // namespace gradpack
