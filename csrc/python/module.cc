// The module only lists its areas; each binds itself.
#include <pybind11/pybind11.h>

#include "common/check.h"
#include "python/array_arg.h"

namespace py = pybind11;

namespace gradpack {
namespace {

py::object python_class(ErrorKind kind) {
  const auto errors = [](const char* name) -> py::object { return py::module_::import("gradpack.errors").attr(name); };
  switch (kind) {
    case ErrorKind::kValue:
      return py::reinterpret_borrow<py::object>(PyExc_ValueError);
    case ErrorKind::kType:
      return py::reinterpret_borrow<py::object>(PyExc_TypeError);
    case ErrorKind::kBuffer:
      return py::reinterpret_borrow<py::object>(PyExc_BufferError);
    case ErrorKind::kRuntime:
      return py::reinterpret_borrow<py::object>(PyExc_RuntimeError);
    case ErrorKind::kLayout:
      return errors("LayoutError");
    case ErrorKind::kBuild:
      return errors("BuildError");
  }
  return py::reinterpret_borrow<py::object>(PyExc_RuntimeError);
}

}  // namespace
}  // namespace gradpack

PYBIND11_MODULE(_C, module) {
  py::register_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const gradpack::Error& error) {
      PyErr_SetString(gradpack::python_class(error.kind()).ptr(), error.what());
    }
  });
  module.attr("__version__") = GRADPACK_VERSION;
  module.attr("cuda_built") = false;
  gradpack::bind_arrays(module);
  gradpack::bind_kernels(module);
  gradpack::bind_peers(module);
  gradpack::bind_shm(module);
}
