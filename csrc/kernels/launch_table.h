// Where the elements of a dtype group lie: the gradients of the group, end to end, form one *stream* of scalars; packs and
// the slices that a transport sends are ranges of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/dtype.h"

namespace gradpack {

struct Stream {
  DType dtype;                     // of the gradients
  DType wire;                      // of the scalars in a pack
  std::vector<int64_t> gradients;  // indices into the call's arrays, in packing order
  std::vector<int64_t> offsets;    // gradients.size() + 1 prefix sums, in scalars

  int64_t numel() const { return offsets.back(); }
};

// A run of one gradient inside a range of its stream. All three numbers count scalars.
struct Chunk {
  int64_t gradient;        // index into the call's arrays
  int64_t gradient_begin;  // first scalar within the gradient, in packing order
  int64_t range_begin;     // first scalar within the range
  int64_t count;
};

// Calls visit(Chunk) for the gradients that make up [begin, end) of the stream, in order.
template <typename Visit>
void for_each_chunk(const Stream& stream, int64_t begin, int64_t end, Visit&& visit) {
  if (begin >= end) return;
  const auto& offsets = stream.offsets;
  auto place = std::upper_bound(offsets.begin(), offsets.end(), begin) - offsets.begin() - 1;
  for (int64_t at = begin; at < end; ++place) {
    const int64_t stop = std::min(end, offsets[place + 1]);
    if (stop > at) visit(Chunk{stream.gradients[place], at - offsets[place], at - begin, stop - at});
    at = std::max(at, stop);
  }
}

}  // namespace gradpack
