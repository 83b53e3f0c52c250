// Python objects -> ArrayView, by the fastest protocol that each object offers.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/array_view.h"

namespace gradpack {

// Things to give back when the arrays of a call are no longer used: references, DLPack tensors, buffers.
class KeepAlive {
 public:
  KeepAlive() = default;
  KeepAlive(const KeepAlive&) = delete;
  KeepAlive& operator=(const KeepAlive&) = delete;
  ~KeepAlive() {
    for (const Entry& entry : entries_) entry.release(entry.thing);
  }

  void add(void (*release)(void*), void* thing) { entries_.push_back({release, thing}); }

 private:
  struct Entry {
    void (*release)(void*);
    void* thing;
  };
  std::vector<Entry> entries_;
};

struct Where;
struct Found;

// The arrays of one call. Owns what the views point to (dims) and a reference to each described object or its DLPack
// capsule, so the views stay valid as long as it lives. Made, changed and destroyed with the GIL held; views() and key() may
// be read without.
class Arrays {
 public:
  Arrays() = default;
  Arrays(const Arrays&) = delete;
  Arrays& operator=(const Arrays&) = delete;
  ~Arrays();

  const std::vector<ArrayView>& views() const { return views_; }
  // 16 bytes, equal where dtypes, shapes, memory orders and device kinds are.
  const std::array<char, 16>& key() const { return key_; }

  size_t size() const { return views_.size(); }
  bool is_cuda() const { return device_ >= 0; }
  // -1 for the CPU, else the CUDA device's index.
  int32_t device() const { return device_; }
  int64_t nbytes() const { return nbytes_; }
  bool present(size_t index) const { return items_[index].present; }
  int64_t num_absent() const { return num_absent_; }
  std::vector<int64_t> shape(size_t index) const;
  // Dimensions from outermost to innermost in memory; empty where that is the logical order.
  std::vector<int> order(size_t index) const;
  // Walks this array in logical order from now on. order() and key() stay: they speak of the memory.
  void pack_logically(size_t index);
  const std::vector<PyObject*>& torch_tensors() const { return torch_tensors_; }

  // How describe() fills it: start, then for each object add, then finish.
  void start(size_t count);
  void add(const Found& found, bool present, const Where& where);
  void finish(Where& where);
  void keep_torch_tensor(pybind11::object tensor) { torch_tensors_.push_back(tensor.release().ptr()); }
  KeepAlive& keep_alive() { return keep_alive_; }

 private:
  struct Item {
    size_t extents;  // where its shape starts in extents_; its strides follow where `reordered`
    size_t dims;     // where the view's dims start in dims_
    int32_t ndim;
    bool reordered;
    bool logical;  // pack_logically was called
    bool present;
  };

  void set_dims(size_t index, const int64_t* shape, const int64_t* strides, const int* order, int ndim);
  void point_views_at_dims();

  std::vector<ArrayView> views_;
  std::vector<Item> items_;
  std::vector<int64_t> extents_;
  std::vector<Dim> dims_;
  std::vector<PyObject*> torch_tensors_;  // strong
  KeepAlive keep_alive_;
  std::array<uint64_t, 2> hash_{};
  std::array<char, 16> key_{};
  int64_t nbytes_ = 0;
  int64_t num_absent_ = 0;
  int32_t device_ = -1;
};

enum class Protocol : uint8_t { kExchange, kDLPack, kCudaArrayInterface, kBuffer, kNone };

struct DescribeOptions {
  bool parameters_stand_for_grad;
  Protocol forced;  // kNone: the fastest that the object offers
};

// `where` names the call (operation, argument, names); describe() moves its index along.
std::unique_ptr<Arrays> describe(pybind11::handle objects, Where where, DescribeOptions options);

void bind_arrays(pybind11::module_& module);
void bind_kernels(pybind11::module_& module);
void bind_peers(pybind11::module_& module);
void bind_shm(pybind11::module_& module);

}  // namespace gradpack
