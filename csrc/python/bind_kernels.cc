// The Python face of the kernels: Buffer, Nonfinite, Plan.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "kernels/backend.h"
#include "python/plan.h"

namespace py = pybind11;

namespace gradpack {

void bind_kernels(py::module_& module) {
  using py::arg;

  module.def("simd_name", &cpu::simd_name);
  module.def("set_num_threads", &cpu::set_num_threads, arg("num_threads"), py::pos_only());
  module.def("num_threads", &cpu::num_threads);

  py::class_<Buffer>(module, "Buffer", py::buffer_protocol(), py::is_final())
      .def(py::init<int64_t>(), arg("nbytes"), py::pos_only())
      .def("__len__", &Buffer::nbytes)
      .def_property_readonly("address", [](const Buffer& buffer) { return reinterpret_cast<uintptr_t>(buffer.data()); })
      .def_buffer([](Buffer& buffer) {
        return py::buffer_info(buffer.data(), 1, py::format_descriptor<uint8_t>::format(), 1, {buffer.nbytes()}, {1});
      });

  py::class_<Nonfinite>(module, "Nonfinite", py::is_final())
      .def(py::init<int64_t>(), arg("num_arrays"), py::pos_only())
      .def("any", &Nonfinite::any)
      .def("indices", &Nonfinite::indices);

  const auto none = py::none();
  py::class_<Plan>(module, "Plan", py::is_final())
      .def(py::init<const py::bytes&, int64_t, const py::iterable&>(), arg("key"), arg("num_arrays"), arg("streams"))
      .def("pack", &Plan::pack, arg("arrays"), arg("stream"), arg("begin"), arg("end"), arg("buffer"), arg("offset"),
           arg("nonfinite") = none)
      .def("unpack", &Plan::unpack, arg("arrays"), arg("stream"), arg("begin"), arg("end"), arg("buffer"), arg("offset"),
           arg("divisor") = 1, arg("counts") = none, arg("nonfinite") = none)
      .def("reduce_unpack", &Plan::reduce_unpack, arg("arrays"), arg("stream"), arg("begin"), arg("end"), arg("buffer"),
           arg("offsets"), arg("divisor") = 1, arg("counts") = none, arg("nonfinite") = none)
      .def("reduce", &Plan::reduce, arg("stream"), arg("begin"), arg("end"), arg("buffer"), arg("offsets"), arg("out"),
           arg("out_offset"), arg("divisor") = 1, arg("counts") = none)
      .def("check_finite", &Plan::check_finite, arg("arrays"), arg("nonfinite"));
}

}  // namespace gradpack
