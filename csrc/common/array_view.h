// One array as the kernels see it: an address and the order in which its elements are packed.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace gradpack {

inline constexpr int kMaxDims = 64;

// One loop of the walk over an array. `stride` is in elements and may be negative (never 0 where size > 1).
struct Dim {
  int64_t size;
  int64_t stride;
};

// `dims` are the loops in packing order, outermost first, coalesced: neighbours that form one run are one Dim and sizes
// of 1 are gone. So ndim is 0 for one element, and an array whose elements lie side by side in packing order has
// ndim <= 1 and stride 1.
struct ArrayView {
  void* data = nullptr;  // null: this rank has no such gradient (or it has no elements); packs as zeros, is not written
  int64_t numel = 0;
  DType dtype = DType::kFloat32;
  int32_t ndim = 0;
  const Dim* dims = nullptr;

  bool dense() const { return ndim == 0 || (ndim == 1 && dims[0].stride == 1); }
};

}  // namespace gradpack
