// DLPack (both ways in), with what the protocols share.
#include "python/protocols.h"

#include <cstdlib>
#include <optional>

namespace py = pybind11;

namespace gradpack {

std::string Where::label(Py_ssize_t which) const {
  std::ostringstream out;
  out << std::string(py::str(argument)) << '[' << which << ']';
  if (names && !names.is_none()) out << ' ' << std::string(py::repr(names[py::int_(which)]));
  return out.str();
}

std::string Where::prefix() const { return std::string(py::str(operation)) + ": " + label(index) + ": "; }

void Where::chain(PyObject* exception_class, const std::string& message) {
  // KeyboardInterrupt and its like are nobody's mistake.
  if (PyErr_ExceptionMatches(PyExc_Exception)) py::raise_from(exception_class, message.c_str());
  throw py::error_already_set();
}

void set_byte_strides(const Where& where, Found& found) {
  const int64_t item = itemsize(found.dtype);
  for (int d = 0; d < found.ndim; ++d) {
    int64_t& stride = found.own_strides[static_cast<size_t>(d)];
    // The stride of a dim that does not move means nothing.
    if (stride % item != 0 && found.shape[d] > 1) {
      where.refuse(ErrorKind::kBuffer, "a stride of ", stride, " bytes is no multiple of the ", item, " bytes of a ",
                   name(found.dtype));
    }
    stride /= item;
  }
  found.strides = found.own_strides.data();
}

namespace {

std::optional<DType> known_dtype(DLDataType dtype) {
  if (dtype.lanes != 1) return std::nullopt;
  // `first` is the dtype of 8 << `shift` bits; the next ones double.
  const auto by_bits = [&](DType first, int shift, int count) -> std::optional<DType> {
    for (int i = 0; i < count; ++i) {
      if (dtype.bits == 8 << (shift + i)) return static_cast<DType>(static_cast<int>(first) + i);
    }
    return std::nullopt;
  };
  switch (dtype.code) {
    case kDLInt:
      return by_bits(DType::kInt8, 0, 4);
    case kDLUInt:
      return by_bits(DType::kUInt8, 0, 4);
    case kDLBfloat:
      return by_bits(DType::kBFloat16, 1, 1);
    case kDLComplex:
      return by_bits(DType::kComplex32, 2, 3);
    case kDLBool:
      return by_bits(DType::kBool, 0, 1);
    case kDLFloat:
      if (dtype.bits == 16) return DType::kFloat16;
      return by_bits(DType::kFloat32, 2, 2);
    default:
      return std::nullopt;
  }
}

std::string dtype_label(DLDataType dtype) {
  static constexpr const char* kPlain[] = {"int", "uint", "float", "opaque handle", "bfloat", "complex", "bool"};
  static constexpr const char* kSmall[] = {"float8_e3m4",     "float8_e4m3",   "float8_e4m3b11fnuz", "float8_e4m3fn",
                                           "float8_e4m3fnuz", "float8_e5m2",   "float8_e5m2fnuz",    "float8_e8m0fnu",
                                           "float6_e2m3fn",   "float6_e3m2fn", "float4_e2m1fn"};
  std::ostringstream out;
  if (dtype.code <= kDLBool) {
    out << kPlain[dtype.code] << static_cast<int>(dtype.bits);
  } else if (dtype.code <= kDLFloat4_e2m1fn) {
    out << kSmall[dtype.code - kDLFloat8_e3m4];
  } else {
    out << "DLPack type code " << static_cast<int>(dtype.code) << " of " << static_cast<int>(dtype.bits) << " bits";
  }
  if (dtype.lanes != 1) out << 'x' << dtype.lanes;
  return out.str();
}

void take_versioned(DLManagedTensorVersioned* managed, const Where& where, KeepAlive& keep_alive, Found& found) {
  keep_alive.add(
      [](void* thing) {
        auto* tensor = static_cast<DLManagedTensorVersioned*>(thing);
        if (tensor->deleter != nullptr) tensor->deleter(tensor);
      },
      managed);
  if (managed->version.major != 1) {
    where.refuse(ErrorKind::kBuffer, where.type_name(), " that speaks DLPack ", managed->version.major, ".",
                 managed->version.minor, ", wanted 1.x");
  }
  if (managed->flags & DLPACK_FLAG_BITMASK_READ_ONLY) {
    where.refuse(ErrorKind::kBuffer, "read-only ", where.type_name(), ", wanted one that can be written in place");
  }
  if (managed->flags & DLPACK_FLAG_BITMASK_IS_COPIED) {
    where.refuse(ErrorKind::kBuffer, "this ", where.type_name(), " gives out a copy by __dlpack__: writes would be lost");
  }
  read_dltensor(managed->dl_tensor, where, found);
}

}  // namespace

int32_t cuda_index(int32_t index, const Where& where) {
  if (index < 0) where.refuse(ErrorKind::kBuffer, where.type_name(), " on CUDA device ", index, ", wanted an index of 0 or more");
  return index;
}

void read_dltensor(const DLTensor& tensor, const Where& where, Found& found) {
  switch (tensor.device.device_type) {
    case kDLCPU:
    case kDLCUDAHost:
      found.device = -1;
      break;
    case kDLCUDA:
    case kDLCUDAManaged:
      found.device = cuda_index(tensor.device.device_id, where);
      break;
    default:
      where.refuse(ErrorKind::kType, where.type_name(), " on a device that is neither cpu nor cuda (DLPack device type ",
                   static_cast<int>(tensor.device.device_type), ")");
  }
  const std::optional<DType> dtype = known_dtype(tensor.dtype);
  if (!dtype) where.refuse(ErrorKind::kType, dtype_label(tensor.dtype), " is no dtype that gradpack packs");
  if (tensor.ndim < 0 || tensor.ndim > kMaxDims) {
    where.refuse(ErrorKind::kBuffer, tensor.ndim, " dimensions, wanted at most ", kMaxDims);
  }
  if (tensor.ndim > 0 && tensor.shape == nullptr) {
    where.refuse(ErrorKind::kBuffer, where.type_name(), " that gives no sizes for its ", tensor.ndim, " dimensions");
  }
  // As numbers: an offset may be nonsense, and Arrays::add is where that is found out.
  found.data = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset);
  found.dtype = *dtype;
  found.ndim = tensor.ndim;
  found.shape = tensor.shape;
  found.strides = tensor.strides;
}

const DLPackExchangeAPI* exchange_api(PyTypeObject* type) {
  PyObject* attribute = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (attribute == nullptr) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw py::error_already_set();
    PyErr_Clear();
    return nullptr;
  }
  const py::object owner = py::reinterpret_steal<py::object>(attribute);
  if (!PyCapsule_IsValid(attribute, "dlpack_exchange_api")) return nullptr;
  const auto* api = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(attribute, "dlpack_exchange_api"));
  for (const DLPackExchangeAPIHeader* header = &api->header; header != nullptr; header = header->prev_api) {
    if (header->version.major == 1) return reinterpret_cast<const DLPackExchangeAPI*>(header);
  }
  return nullptr;
}

// Through the owning call: the borrowing one, which torch tensors take, cannot say that memory is read-only.
void find_by_exchange(const DLPackExchangeAPI* api, const Where& where, KeepAlive& keep_alive, Found& found) {
  DLManagedTensorVersioned* managed = nullptr;
  if (api->managed_tensor_from_py_object_no_sync(where.object.ptr(), &managed) != 0) {
    where.refuse_from(PyExc_BufferError, where.type_name(), " that does not give out its memory by DLPack");
  }
  take_versioned(managed, where, keep_alive, found);
}

void find_by_dlpack(const Where& where, KeepAlive& keep_alive, Found& found) {
  py::object capsule;
  try {
    const py::object method = where.object.attr("__dlpack__");
    try {
      capsule = method(py::arg("max_version") = py::make_tuple(1, 0));
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_TypeError)) throw;
      capsule = method();  // a producer from before DLPack 1.0
    }
  } catch (py::error_already_set& error) {
    std::string dtype;
    if (py::hasattr(where.object, "dtype")) {
      dtype = " of dtype " + std::string(py::str(where.object.attr("dtype")));
    }
    const std::string reason = py::str(error.value());
    PyObject* exception_class = error.matches(PyExc_TypeError) ? PyExc_TypeError : PyExc_BufferError;
    error.restore();
    where.refuse_from(exception_class, where.type_name(), dtype, " that does not give out its memory by __dlpack__: ", reason);
  }
  // From here on the tensor is ours: a capsule of this name frees nothing any more.
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    void* managed = PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned");
    PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
    take_versioned(static_cast<DLManagedTensorVersioned*>(managed), where, keep_alive, found);
  } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    PyCapsule_SetName(capsule.ptr(), "used_dltensor");
    keep_alive.add(
        [](void* thing) {
          auto* tensor = static_cast<DLManagedTensor*>(thing);
          if (tensor->deleter != nullptr) tensor->deleter(tensor);
        },
        managed);
    read_dltensor(managed->dl_tensor, where, found);
  } else {
    where.refuse(ErrorKind::kType, "__dlpack__ of ", where.type_name(), " returned no DLPack capsule");
  }
}

}  // namespace gradpack
