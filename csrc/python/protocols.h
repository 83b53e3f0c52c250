// What one object says about its memory, by each of the four protocols.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <string>

#include "common/array_view.h"
#include "common/check.h"
#include "python/array_arg.h"
#include "third_party/dlpack.h"

namespace gradpack {

// The place in the user's call that a message names.
struct Where {
  pybind11::handle operation;  // str
  pybind11::handle argument;   // str
  pybind11::handle names;      // sequence of str, or None
  Py_ssize_t index = 0;
  pybind11::handle object = {};

  // grads[3] 'layer.weight'
  std::string label(Py_ssize_t which) const;
  std::string prefix() const;
  const char* type_name() const { return Py_TYPE(object.ptr())->tp_name; }

  template <typename... Parts>
  [[noreturn]] void refuse(ErrorKind kind, const Parts&... parts) const {
    raise(kind, prefix(), parts...);
  }

  // The same with the Python exception that is set now as the cause.
  template <typename... Parts>
  [[noreturn]] void refuse_from(PyObject* exception_class, const Parts&... parts) const {
    std::ostringstream message;
    (message << prefix() << ... << parts);
    chain(exception_class, message.str());
  }

 private:
  [[noreturn]] static void chain(PyObject* exception_class, const std::string& message);
};

// `shape` and `strides` (in elements; null means row-major) point into the object or into the buffers below.
struct Found {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int32_t ndim = 0;
  const int64_t* shape = nullptr;
  const int64_t* strides = nullptr;
  int32_t device = -1;  // -1 for the CPU, else the CUDA device's index

  std::array<int64_t, kMaxDims> own_shape;
  std::array<int64_t, kMaxDims> own_strides;
};

// Takes over what a DLTensor says. The tensor's shape and strides must outlive `found`.
void read_dltensor(const DLTensor& tensor, const Where& where, Found& found);

// The index of a CUDA device; -1, which would mean the CPU, and less are refused.
int32_t cuda_index(int32_t index, const Where& where);

// A type's table, or null where it has none. The table lives as long as the process.
const DLPackExchangeAPI* exchange_api(PyTypeObject* type);

void find_by_exchange(const DLPackExchangeAPI* api, const Where& where, KeepAlive& keep_alive, Found& found);
void find_by_dlpack(const Where& where, KeepAlive& keep_alive, Found& found);
void find_by_cuda_array_interface(const Where& where, Found& found);
void find_by_buffer(const Where& where, KeepAlive& keep_alive, Found& found);

// Strides in bytes -> elements, into found.own_strides.
void set_byte_strides(const Where& where, Found& found);

}  // namespace gradpack
