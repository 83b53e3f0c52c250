// Gradients whose elements do not lie side by side, as runs that do: the kernels see dense memory only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/array_view.h"

namespace gradpack {

// Elements that pass through the stack at a time: small enough to stay in the first-level cache.
inline constexpr int64_t kGatherBytes = 16 << 10;
// A row at least this long is handed to the kernels where it lies; shorter ones are gathered first, many to a call.
inline constexpr int64_t kDirectBytes = 256;

// Walks an array in packing order, row by row of its innermost loop.
class StridedWalk {
 public:
  StridedWalk(const ArrayView& view, int64_t element) : view_(view), last_(view.ndim - 1) {
    for (int d = last_; d >= 0; --d) {
      index_[d] = element % view.dims[d].size;
      offset_ += index_[d] * view.dims[d].stride;
      element /= view.dims[d].size;
    }
  }

  // Offset in elements of the next element, and how many follow in the row it is in (itself included).
  int64_t offset() const { return offset_; }
  int64_t left_in_row() const { return view_.dims[last_].size - index_[last_]; }
  int64_t stride() const { return view_.dims[last_].stride; }

  // `count` is at most left_in_row().
  void advance(int64_t count) {
    index_[last_] += count;
    offset_ += count * stride();
    for (int d = last_; d > 0 && index_[d] == view_.dims[d].size; --d) {
      offset_ += view_.dims[d - 1].stride - index_[d] * view_.dims[d].stride;
      index_[d] = 0;
      ++index_[d - 1];
    }
  }

 private:
  const ArrayView& view_;
  const int last_;
  int64_t offset_ = 0;
  int64_t index_[kMaxDims];
};

// Copies `count` elements of kSize bytes between the walk's place and `dense`. A call with a constant size is one move.
template <int kSize, bool kGather>
void move_elements(StridedWalk& walk, char* array, char* dense, int64_t count) {
  while (count > 0) {
    const int64_t run = std::min(count, walk.left_in_row());
    const int64_t step = walk.stride() * kSize;
    char* at = array + walk.offset() * kSize;
    for (int64_t i = 0; i < run; ++i, at += step, dense += kSize) memcpy(kGather ? dense : at, kGather ? at : dense, kSize);
    walk.advance(run);
    count -= run;
  }
}

template <bool kGather>
void move_elements(StridedWalk& walk, char* array, char* dense, int64_t count, int64_t size) {
  switch (size) {
    case 1:
      return move_elements<1, kGather>(walk, array, dense, count);
    case 2:
      return move_elements<2, kGather>(walk, array, dense, count);
    case 4:
      return move_elements<4, kGather>(walk, array, dense, count);
    case 8:
      return move_elements<8, kGather>(walk, array, dense, count);
    default:
      return move_elements<16, kGather>(walk, array, dense, count);
  }
}

template <bool kRead, typename Visit>
__attribute__((noinline)) void visit_strided(const ArrayView& view, int64_t begin, int64_t count, Visit& visit) {
  // A complex number is moved whole.
  const int64_t parts = components(view.dtype);
  const int64_t size = itemsize(view.dtype);
  char* const array = static_cast<char*>(view.data);
  const Dim& row = view.dims[view.ndim - 1];
  const bool direct = row.stride == 1 && row.size * size >= kDirectBytes;
  const int64_t end = count / parts;
  alignas(64) char dense[kGatherBytes];
  StridedWalk walk(view, begin / parts);
  for (int64_t at = 0; at < end;) {
    int64_t run;
    if (direct) {
      run = std::min(end - at, walk.left_in_row());
      visit(array + walk.offset() * size, at * parts, run * parts);
      walk.advance(run);
    } else {
      run = std::min(end - at, kGatherBytes / size);
      if (kRead) move_elements<true>(walk, array, dense, run, size);
      visit(dense, at * parts, run * parts);
      if (!kRead) move_elements<false>(walk, array, dense, run, size);
    }
    at += run;
  }
}

// Calls visit(address, offset, n) for runs that make up scalars [begin, begin + count) of the gradient: n scalars lie side by
// side at `address` and are the ones `offset` after `begin`. For visits that read them.
template <typename Visit>
inline void read_runs(const ArrayView& view, int64_t begin, int64_t count, Visit&& visit) {
  if (!view.dense()) return visit_strided<true>(view, begin, count, visit);
  visit(static_cast<char*>(view.data) + begin * (itemsize(view.dtype) / components(view.dtype)), int64_t{0}, count);
}

// The same for visits that write all n scalars.
template <typename Visit>
inline void write_runs(const ArrayView& view, int64_t begin, int64_t count, Visit&& visit) {
  if (!view.dense()) return visit_strided<false>(view, begin, count, visit);
  visit(static_cast<char*>(view.data) + begin * (itemsize(view.dtype) / components(view.dtype)), int64_t{0}, count);
}

}  // namespace gradpack
