// Peers: the Python face of transports/peers.h.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <system_error>

#include "python/array_arg.h"
#include "python/without_gil.h"
#include "transports/peers.h"

namespace py = pybind11;

namespace gradpack {
namespace {

const char* name(News::Kind kind) {
  switch (kind) {
    case News::Kind::kGone:
      return "gone";
    case News::Kind::kSilent:
      return "silent";
    case News::Kind::kGaveUp:
      return "gave_up";
    case News::Kind::kLeft:
      return "left";
  }
  return "";
}

// Text of errors may hold what UTF-8 cannot (file names with surrogates), and saying why a rank gives up must not fail for that.
std::string utf8(const py::str& text) {
  PyObject* encoded = PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace");
  if (!encoded) throw py::error_already_set();
  return py::reinterpret_steal<py::bytes>(encoded);
}

py::str decoded(const std::string& text) {
  PyObject* made = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
  if (!made) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(made);
}

py::object python_position(const std::optional<Position>& position) {
  if (!position) return py::none();
  return py::make_tuple(position->call, position->inside, position->step);
}

}  // namespace

void bind_peers(py::module_& module) {
  using py::arg;

  // Local: what other modules throw is theirs to translate.
  py::register_local_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const std::system_error& error) {
      PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), error.what()).ptr());
    }
  });

  py::class_<Peers>(module, "Peers", py::is_final())
      .def(py::init<int64_t, int64_t, double, std::string, std::string>(), arg("rank"), arg("size"), arg("host_timeout"),
           arg("interface"), py::kw_only(), arg("host") = "")
      .def("card", [](const Peers& peers) { return py::bytes(peers.card()); })
      .def(
          "connect",
          [](Peers& peers, const std::vector<py::bytes>& cards) {
            const std::vector<std::string> copies(cards.begin(), cards.end());
            without_gil([&] { peers.connect(copies); });
          },
          arg("cards"))
      .def(
          "wait_connected",
          [](Peers& peers, double seconds) {
            bool all = false;
            without_gil([&] { all = peers.wait_connected(seconds); });
            return all;
          },
          arg("seconds"))
      .def("unreached", &Peers::unreached)
      .def("enter", &Peers::enter, arg("call"))
      .def("step", &Peers::step, arg("step"))
      .def("leave", &Peers::leave)
      .def(
          "verdict",
          [](Peers& peers, int64_t call, double seconds) -> py::object {
            std::optional<News> news;
            const auto look = [&] { news = peers.verdict(call, seconds); };
            // Who only looks need not queue up for the GIL behind other threads.
            seconds > 0 ? without_gil(look) : look();
            if (!news) return py::none();
            return py::make_tuple(name(news->kind), news->rank, decoded(news->text));
          },
          arg("call"), arg("seconds"))
      .def(
          "positions",
          [](Peers& peers, double seconds) {
            std::vector<std::optional<Position>> positions;
            without_gil([&] { positions = peers.positions(seconds); });
            py::list made;
            for (const std::optional<Position>& position : positions) made.append(python_position(position));
            return made;
          },
          arg("seconds"))
      .def(
          "give_up",
          [](Peers& peers, const py::str& kind, const py::str& text) {
            const std::string kind_bytes = utf8(kind), text_bytes = utf8(text);
            without_gil([&] { peers.give_up(kind_bytes, text_bytes); });
          },
          arg("kind"), arg("text"))
      .def("close", [](Peers& peers) { without_gil([&] { peers.close(); }); });
}

}  // namespace gradpack
