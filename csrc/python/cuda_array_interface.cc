// __cuda_array_interface__ (CuPy, Numba and their like): a dict that describes device memory.
#include <cstring>
#include <optional>

#include "python/protocols.h"

namespace py = pybind11;

namespace gradpack {
namespace {

// '<f4': byte order, kind, bytes.
std::optional<DType> dtype_of(const std::string& typestr) {
  if (typestr.size() < 3 || std::strchr("<|=", typestr[0]) == nullptr) return std::nullopt;
  static constexpr struct {
    char kind;
    DType first;
    DType last;
  } kKinds[] = {{'b', DType::kBool, DType::kBool},
                {'i', DType::kInt8, DType::kInt64},
                {'u', DType::kUInt8, DType::kUInt64},
                {'c', DType::kComplex32, DType::kComplex128}};
  const std::string size = typestr.substr(2);
  if (typestr[1] == 'f') {
    for (const DType dtype : {DType::kFloat16, DType::kFloat32, DType::kFloat64}) {
      if (size == std::to_string(itemsize(dtype))) return dtype;
    }
  }
  for (const auto& kind : kKinds) {
    for (int i = static_cast<int>(kind.first); typestr[1] == kind.kind && i <= static_cast<int>(kind.last); ++i) {
      if (size == std::to_string(itemsize(static_cast<DType>(i)))) return static_cast<DType>(i);
    }
  }
  return std::nullopt;
}

// The dict does not say which device; producers that also speak DLPack do.
int32_t device_index(py::handle object) {
  if (!py::hasattr(object, "__dlpack_device__")) return 0;
  const auto device = py::cast<std::pair<int32_t, int32_t>>(object.attr("__dlpack_device__")());
  return device.first == kDLCUDA || device.first == kDLCUDAManaged ? device.second : 0;
}

void copy_extents(py::handle values, int ndim, std::array<int64_t, kMaxDims>& out) {
  for (int d = 0; d < ndim; ++d) out[static_cast<size_t>(d)] = py::cast<int64_t>(values[py::int_(d)]);
}

void read_interface(const py::dict& interface, const Where& where, Found& found) {
  const auto typestr = py::cast<std::string>(interface["typestr"]);
  const std::optional<DType> dtype = dtype_of(typestr);
  if (!dtype) {
    where.refuse(ErrorKind::kType, where.type_name(), " of typestr '", typestr,
                 "' is no dtype that gradpack packs (native byte order, no structures)");
  }
  if (interface.contains("mask") && !interface["mask"].is_none()) {
    where.refuse(ErrorKind::kBuffer, "masked ", where.type_name(), ", wanted plain memory");
  }
  const auto data = py::cast<std::pair<uintptr_t, bool>>(interface["data"]);
  if (data.second) {
    where.refuse(ErrorKind::kBuffer, "read-only ", where.type_name(), ", wanted one that can be written in place");
  }
  const py::tuple shape = interface["shape"];
  if (shape.size() > kMaxDims) where.refuse(ErrorKind::kBuffer, shape.size(), " dimensions, wanted at most ", kMaxDims);
  found.data = reinterpret_cast<void*>(data.first);
  found.dtype = *dtype;
  found.ndim = static_cast<int32_t>(shape.size());
  found.device = cuda_index(device_index(where.object), where);
  copy_extents(shape, found.ndim, found.own_shape);
  found.shape = found.own_shape.data();
  found.strides = nullptr;
  if (interface.contains("strides") && !interface["strides"].is_none()) {
    const py::tuple strides = interface["strides"];
    if (strides.size() != shape.size()) {
      where.refuse(ErrorKind::kBuffer, strides.size(), " strides for ", shape.size(), " dimensions");
    }
    copy_extents(strides, found.ndim, found.own_strides);
    set_byte_strides(where, found);
  }
}

}  // namespace

void find_by_cuda_array_interface(const Where& where, Found& found) {
  try {
    read_interface(where.object.attr("__cuda_array_interface__"), where, found);
  } catch (const py::builtin_exception& error) {
    where.refuse(ErrorKind::kType, where.type_name(),
                 " that does not describe its memory by __cuda_array_interface__: ", error.what());
  } catch (py::error_already_set& error) {
    const std::string reason = py::str(error.value());
    error.restore();
    where.refuse_from(PyExc_TypeError, where.type_name(),
                      " that does not describe its memory by __cuda_array_interface__: ", reason);
  }
}

}  // namespace gradpack
