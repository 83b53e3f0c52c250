// The buffer protocol: array.array, bytearray, memoryview, ctypes arrays.
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>

#include "python/protocols.h"

namespace py = pybind11;

namespace gradpack {
namespace {

// `format` without its byte order. Integers go by the item size: 'l' has 4 bytes or 8.
std::optional<DType> dtype_of(std::string_view format, Py_ssize_t item) {
  const auto sized = [&](DType first) -> std::optional<DType> {
    for (int i = 0; i < 4; ++i) {
      if (item == Py_ssize_t{1} << i) return static_cast<DType>(static_cast<int>(first) + i);
    }
    return std::nullopt;
  };
  std::optional<DType> dtype;
  if (format.size() == 1) {
    if (format == "?") dtype = DType::kBool;
    if (format == "e") dtype = DType::kFloat16;
    if (format == "f") dtype = DType::kFloat32;
    if (format == "d") dtype = DType::kFloat64;
    if (std::strchr("bhilqn", format[0]) != nullptr) dtype = sized(DType::kInt8);
    if (std::strchr("BHILQN", format[0]) != nullptr) dtype = sized(DType::kUInt8);
  }
  if (format == "Ze") dtype = DType::kComplex32;
  if (format == "Zf") dtype = DType::kComplex64;
  if (format == "Zd") dtype = DType::kComplex128;
  if (dtype && itemsize(*dtype) != item) return std::nullopt;
  return dtype;
}

void release_buffer(void* thing) {
  const std::unique_ptr<Py_buffer> buffer(static_cast<Py_buffer*>(thing));
  PyBuffer_Release(buffer.get());
}

bool readable(PyObject* object) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(object, &buffer, PyBUF_STRIDED_RO | PyBUF_FORMAT) != 0) {
    PyErr_Clear();
    return false;
  }
  PyBuffer_Release(&buffer);
  return true;
}

}  // namespace

void find_by_buffer(const Where& where, KeepAlive& keep_alive, Found& found) {
  auto owned = std::make_unique<Py_buffer>();
  PyObject* object = where.object.ptr();
  if (PyObject_GetBuffer(object, owned.get(), PyBUF_STRIDED | PyBUF_WRITABLE | PyBUF_FORMAT) != 0) {
    py::error_already_set error;
    const bool read_only = readable(object);
    const std::string reason = py::str(error.value());
    error.restore();
    if (read_only) {
      where.refuse_from(PyExc_BufferError, "read-only ", where.type_name(), ", wanted one that can be written in place");
    }
    where.refuse_from(PyExc_BufferError, where.type_name(), " that does not give out its memory as a buffer: ", reason);
  }
  const Py_buffer& buffer = *owned;
  keep_alive.add(release_buffer, owned.release());

  const std::string_view format = buffer.format == nullptr ? "B" : buffer.format;
  const bool prefixed = !format.empty() && std::strchr("@=<>!^", format[0]) != nullptr;
  if (prefixed && (format[0] == '>' || format[0] == '!') && buffer.itemsize > 1) {
    where.refuse(ErrorKind::kType, where.type_name(), " of format '", format,
                 "': byte-swapped numbers are not packed, wanted native byte order");
  }
  const std::optional<DType> dtype = dtype_of(prefixed ? format.substr(1) : format, buffer.itemsize);
  if (!dtype) {
    where.refuse(ErrorKind::kType, where.type_name(), " of format '", format, "' and item size ", buffer.itemsize,
                 " is no dtype that gradpack packs");
  }
  if (buffer.ndim > kMaxDims) where.refuse(ErrorKind::kBuffer, buffer.ndim, " dimensions, wanted at most ", kMaxDims);

  found.data = buffer.buf;
  found.dtype = *dtype;
  found.ndim = buffer.ndim;
  found.device = -1;
  // ctypes leaves the strides out although they were asked for.
  for (int d = 0; d < buffer.ndim; ++d) {
    found.own_shape[static_cast<size_t>(d)] = buffer.shape[d];
    if (buffer.strides != nullptr) found.own_strides[static_cast<size_t>(d)] = buffer.strides[d];
  }
  found.shape = found.own_shape.data();
  found.strides = nullptr;
  if (buffer.strides != nullptr) set_byte_strides(where, found);
}

}  // namespace gradpack
