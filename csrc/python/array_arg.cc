// From what an object said about its memory to a view: checks, memory order, key.
#include "python/array_arg.h"

#include <cstdlib>
#include <cstring>
#include <sstream>

#include "common/check.h"
#include "common/overlap.h"
#include "python/protocols.h"

namespace gradpack {
namespace {

std::string bracketed(const int64_t* values, int count) {
  std::ostringstream out;
  out << '[';
  for (int d = 0; d < count; ++d) out << (d ? ", " : "") << values[d];
  out << ']';
  return out.str();
}

std::string device_label(int32_t device) { return device < 0 ? "cpu" : "cuda:" + std::to_string(device); }

// MurmurHash3 (x64, 128 bits), one word at a time: the lanes change places after each.
void mix(std::array<uint64_t, 2>& hash, uint64_t word) {
  const auto rotate = [](uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); };
  word = rotate(word * 0x87c37b91114253d5u, 31) * 0x4cf5ad432745937fu;
  const uint64_t mixed = (rotate(hash[0] ^ word, 27) + hash[1]) * 5 + 0x52dce729u;
  hash = {hash[1], mixed};
}

std::array<char, 16> finished(std::array<uint64_t, 2> hash) {
  const auto avalanche = [](uint64_t x) {
    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdu;
    x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53u;
    return x ^ (x >> 33);
  };
  hash[0] += hash[1];
  hash[1] += hash[0];
  hash = {avalanche(hash[0]), avalanche(hash[1])};
  hash[0] += hash[1];
  hash[1] += hash[0];
  std::array<char, 16> key;
  std::memcpy(key.data(), hash.data(), key.size());
  return key;
}

// The permutation of all dims, outermost first, that walks the memory upwards (or downwards, for negative strides). Dims of
// size 1 keep their places: their strides say nothing. False where that is the logical order.
bool memory_order(const int64_t* shape, const int64_t* strides, int ndim, int* order) {
  std::array<int, kMaxDims> moving;  // dims of size > 1, by falling stride, equal ones in logical order
  size_t count = 0;
  bool reordered = false;
  for (int d = 0; d < ndim; ++d) {
    order[d] = d;
    if (shape[d] <= 1) continue;
    size_t place = count++;
    for (; place > 0 && std::abs(strides[moving[place - 1]]) < std::abs(strides[d]); --place) moving[place] = moving[place - 1];
    moving[place] = d;
    reordered = reordered || place + 1 != count;
  }
  if (!reordered) return false;
  for (int d = 0, next = 0; d < ndim; ++d) {
    if (shape[d] > 1) order[d] = moving[static_cast<size_t>(next++)];
  }
  return true;
}

// Refuses what does not fit the address space, so that later sums of extents cannot wrap.
void check_extent(const Found& found, bool has_memory, const Where& where) {
  using Wide = __int128;
  const Wide item = itemsize(found.dtype);
  Wide lowest = has_memory ? static_cast<Wide>(reinterpret_cast<uintptr_t>(found.data)) : 0;
  Wide highest = lowest + item;
  bool fits = true;
  for (int d = 0; d < found.ndim; ++d) {
    // Two factors below 2^63, times at most 16: within 130 bits, so look before the item size joins.
    const Wide extent = static_cast<Wide>(found.strides[d]) * (found.shape[d] - 1);
    fits = fits && extent < (Wide{1} << 63) && extent > -(Wide{1} << 63);
    if (!fits) break;
    (extent < 0 ? lowest : highest) += extent * item;
  }
  const bool inside = !has_memory || (lowest >= 0 && highest <= (Wide{1} << 64));
  if (!fits || !inside || highest - lowest >= (Wide{1} << 63)) {
    where.refuse(ErrorKind::kBuffer, "shape ", bracketed(found.shape, found.ndim), " with strides ",
                 bracketed(found.strides, found.ndim), " reaches beyond the address space");
  }
}

}  // namespace

Arrays::~Arrays() {
  for (PyObject* tensor : torch_tensors_) Py_DECREF(tensor);
}

void Arrays::start(size_t count) {
  views_.reserve(count);
  items_.reserve(count);
  torch_tensors_.reserve(count);
  dims_.reserve(count);
  extents_.reserve(4 * count);
  mix(hash_, count);
}

void Arrays::add(const Found& found, bool present, const Where& where) {
  const int ndim = found.ndim;
  const DTypeTraits& dtype = traits(found.dtype);
  int64_t numel = 1;
  bool row_major = true, empty = false, too_many = false;
  for (int d = ndim - 1; d >= 0; --d) {
    const int64_t size = found.shape[d];
    if (size < 0) where.refuse(ErrorKind::kBuffer, "shape ", bracketed(found.shape, ndim), " has a negative size");
    row_major = row_major && (size == 1 || found.strides == nullptr || found.strides[d] == numel);
    empty = empty || size == 0;
    too_many = __builtin_mul_overflow(numel, size, &numel) || too_many;
  }
  int64_t nbytes = 0;
  if (empty) {
    numel = 0;
    row_major = true;
  } else if (too_many || __builtin_mul_overflow(numel, dtype.itemsize, &nbytes) ||
             __builtin_add_overflow(nbytes_, nbytes, &nbytes_)) {
    where.refuse(ErrorKind::kBuffer, "shape ", bracketed(found.shape, ndim), " of ", dtype.name,
                 " has more bytes than 64 bits count");
  }

  if (items_.empty()) {
    device_ = found.device;
  } else if (found.device != device_) {
    where.refuse(ErrorKind::kLayout, "on ", device_label(found.device), ", but ", where.label(0), " is on ",
                 device_label(device_), ": all arrays of a call must be on one device");
  }

  const auto address = reinterpret_cast<uintptr_t>(found.data);
  // An absent gradient too: its parameter is what the gradient will be like.
  if (!empty && address == 0) {
    where.refuse(ErrorKind::kType, where.type_name(), " without memory of its own (a null pointer for ", numel,
                 " elements): pass the plain local tensor that it wraps");
  }
  const bool has_memory = present && !empty;
  const int64_t alignment = itemsize(dtype.scalar);
  if (has_memory && address % static_cast<uintptr_t>(alignment) != 0) {
    where.refuse(ErrorKind::kBuffer, "its memory at ", found.data, " is not aligned to the ", alignment, " bytes of a ",
                 name(dtype.scalar));
  }

  std::array<int, kMaxDims> order;
  bool reordered = false;
  const size_t index = items_.size();
  const Item item{extents_.size(), dims_.size(), ndim, false, false, present};
  extents_.insert(extents_.end(), found.shape, found.shape + ndim);
  views_.push_back({has_memory ? found.data : nullptr, numel, found.dtype, 0, nullptr});
  items_.push_back(item);
  if (row_major) {
    if (has_memory && address + static_cast<uintptr_t>(nbytes) < address) {
      where.refuse(ErrorKind::kBuffer, "shape ", bracketed(found.shape, ndim), " reaches beyond the address space");
    }
    if (numel > 1) {
      dims_.push_back({numel, 1});
      views_.back().ndim = 1;
    }
  } else {
    check_extent(found, has_memory, where);
    reordered = memory_order(found.shape, found.strides, ndim, order.data());
    set_dims(index, found.shape, found.strides, order.data(), ndim);
    const ArrayView& view = views_.back();
    const bool dense = view.ndim == 0 || (view.ndim == 1 && std::abs(dims_[item.dims].stride) == 1);
    if (present && !dense && overlaps_itself(dims_.data() + item.dims, view.ndim)) {
      where.refuse(ErrorKind::kBuffer, "shape ", bracketed(found.shape, ndim), " with strides ", bracketed(found.strides, ndim),
                   " puts several elements at one address: pass memory of its own for each (.contiguous())");
    }
    if (!present && !dense) {
      // A gradient takes the strides of its parameter only where those are dense (autograd's layout contract).
      reordered = false;
      dims_.resize(item.dims);
      dims_.push_back({numel, 1});
      views_.back().ndim = 1;
    }
  }
  if (reordered) {
    items_.back().reordered = true;
    extents_.insert(extents_.end(), found.strides, found.strides + ndim);
  }

  mix(hash_, static_cast<uint64_t>(found.dtype) | static_cast<uint64_t>(ndim) << 8 | uint64_t{reordered} << 16);
  for (int d = 0; d < ndim; ++d) mix(hash_, static_cast<uint64_t>(found.shape[d]));
  if (reordered) {
    for (int d = 0; d < ndim; ++d) mix(hash_, static_cast<uint64_t>(order[static_cast<size_t>(d)]));
  }
  num_absent_ += !present;
}

void Arrays::finish(Where& where) {
  point_views_at_dims();
  mix(hash_, is_cuda());
  key_ = finished(hash_);
  if (const auto pair = find_overlap(views_)) {
    where.index = static_cast<Py_ssize_t>(pair->second);
    const ArrayView &first = views_[pair->first], &second = views_[pair->second];
    const bool same = first.data == second.data && first.numel == second.numel && first.dtype == second.dtype;
    where.refuse(ErrorKind::kLayout, same ? "the same memory as " : "overlaps the memory of ",
                 where.label(static_cast<Py_ssize_t>(pair->first)), ": every array of a call must have memory of its own");
  }
}

// Writes the dims of one array at the end of dims_.
void Arrays::set_dims(size_t index, const int64_t* shape, const int64_t* strides, const int* order, int ndim) {
  items_[index].dims = dims_.size();
  const size_t first = dims_.size();
  for (int i = 0; i < ndim; ++i) {
    const Dim dim{shape[order[i]], strides[order[i]]};
    if (dim.size == 1) continue;
    if (dims_.size() > first && dim.stride != 0 && dims_.back().stride % dim.stride == 0 &&
        dims_.back().stride / dim.stride == dim.size) {
      dims_.back() = {dims_.back().size * dim.size, dim.stride};
    } else {
      dims_.push_back(dim);
    }
  }
  views_[index].ndim = static_cast<int32_t>(dims_.size() - first);
}

void Arrays::point_views_at_dims() {
  for (size_t i = 0; i < views_.size(); ++i) views_[i].dims = dims_.data() + items_[i].dims;
}

std::vector<int64_t> Arrays::shape(size_t index) const {
  const int64_t* first = extents_.data() + items_[index].extents;
  return {first, first + items_[index].ndim};
}

std::vector<int> Arrays::order(size_t index) const {
  const Item& item = items_[index];
  if (!item.reordered) return {};
  std::vector<int> order(static_cast<size_t>(item.ndim));
  const int64_t* shape = extents_.data() + item.extents;
  memory_order(shape, shape + item.ndim, item.ndim, order.data());
  return order;
}

void Arrays::pack_logically(size_t index) {
  Item& item = items_[index];
  if (!item.reordered || item.logical) return;
  item.logical = true;
  std::array<int, kMaxDims> logical;
  for (int d = 0; d < item.ndim; ++d) logical[static_cast<size_t>(d)] = d;
  const int64_t* shape = extents_.data() + item.extents;
  set_dims(index, shape, shape + item.ndim, logical.data(), item.ndim);
  point_views_at_dims();
}

}  // namespace gradpack
