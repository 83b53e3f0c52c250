// Do two elements share memory? Decided exactly, from addresses, sizes and strides alone; no memory is read.
#pragma once

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "common/array_view.h"

namespace gradpack {

// Whether two different elements of one array lie at one address. Sizes are above 0, strides as in Dim (0 is allowed here),
// and the array fits the address space.
bool overlaps_itself(const Dim* dims, int ndim);

// Two arrays that share a byte, as (smaller, larger) index, or nothing. Arrays without memory (data null, numel 0) overlap
// none. No array overlaps itself.
std::optional<std::pair<size_t, size_t>> find_overlap(const std::vector<ArrayView>& views);

}  // namespace gradpack
