// gradpack._C.Arrays and describe().
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "common/check.h"
#include "python/array_arg.h"
#include "python/protocols.h"

namespace py = pybind11;

namespace gradpack {
namespace {

size_t checked(const Arrays& arrays, Py_ssize_t index) {
  if (index < 0 || static_cast<size_t>(index) >= arrays.size()) {
    throw py::index_error("array " + std::to_string(index) + " of " + std::to_string(arrays.size()));
  }
  return static_cast<size_t>(index);
}

py::bytes present_bits(const Arrays& arrays) {
  std::string bits((arrays.size() + 7) / 8, '\0');
  for (size_t i = 0; i < arrays.size(); ++i) {
    if (arrays.present(i)) bits[i / 8] = static_cast<char>(bits[i / 8] | 1 << i % 8);
  }
  return bits;
}

py::list torch_tensors(const Arrays& arrays) {
  py::list tensors(arrays.torch_tensors().size());
  size_t i = 0;
  for (PyObject* tensor : arrays.torch_tensors()) PyList_SET_ITEM(tensors.ptr(), i++, py::handle(tensor).inc_ref().ptr());
  return tensors;
}

std::unique_ptr<Arrays> describe_objects(py::handle objects, py::handle operation, py::handle argument, py::handle names,
                                         const std::string& stand_for, const std::string& asked) {
  if (stand_for != "grad" && stand_for != "value") {
    raise(ErrorKind::kValue, "describe: parameters: '", stand_for, "', wanted 'grad' or 'value'");
  }
  static constexpr std::pair<std::string_view, Protocol> kProtocols[] = {
      {"auto", Protocol::kNone},     {"exchange", Protocol::kExchange},
      {"dlpack", Protocol::kDLPack}, {"cuda_array_interface", Protocol::kCudaArrayInterface},
      {"buffer", Protocol::kBuffer},
  };
  for (const auto& [name, forced] : kProtocols) {
    if (asked == name) {
      return describe(objects, Where{operation, argument, names}, {stand_for == "grad", forced});
    }
  }
  raise(ErrorKind::kValue, "describe: protocol: '", asked, "', wanted auto, exchange, dlpack, cuda_array_interface or buffer");
}

}  // namespace

void bind_arrays(py::module_& module) {
  py::class_<Arrays>(module, "Arrays", py::is_final())
      .def("__len__", &Arrays::size)
      .def_property_readonly("key", [](const Arrays& self) { return py::bytes(self.key().data(), self.key().size()); })
      .def_property_readonly(
          "device",
          [](const Arrays& self) { return py::make_tuple(self.is_cuda() ? "cuda" : "cpu", self.is_cuda() ? self.device() : 0); })
      .def_property_readonly("nbytes", &Arrays::nbytes)
      .def_property_readonly("present", &present_bits)
      .def_property_readonly("num_absent", &Arrays::num_absent)
      .def(
          "shape", [](const Arrays& self, Py_ssize_t index) { return py::tuple(py::cast(self.shape(checked(self, index)))); },
          py::pos_only())
      .def(
          "dtype",
          [](const Arrays& self, Py_ssize_t index) { return std::string(name(self.views()[checked(self, index)].dtype)); },
          py::pos_only())
      .def(
          "order", [](const Arrays& self, Py_ssize_t index) { return py::tuple(py::cast(self.order(checked(self, index)))); },
          py::pos_only())
      .def(
          "pack_logically",
          [](Arrays& self, const std::vector<Py_ssize_t>& indices) {
            for (const Py_ssize_t index : indices) self.pack_logically(checked(self, index));
          },
          py::pos_only())
      .def("torch_tensors", &torch_tensors);
  module.def("describe", &describe_objects, py::arg("objects"), py::arg("operation"), py::arg("argument"), py::arg("names"),
             py::arg("parameters"), py::arg("protocol"));
}

}  // namespace gradpack
