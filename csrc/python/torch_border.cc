#include "python/torch_border.h"

#include <string>

namespace py = pybind11;

namespace gradpack {
namespace {

PyTypeObject* held_type(py::object type) { return reinterpret_cast<PyTypeObject*>(type.release().ptr()); }

std::string text_of(py::handle tensor, const char* attribute) {
  try {
    return py::str(tensor.attr(attribute));
  } catch (py::error_already_set&) {
    return "unknown";  // some kinds lack some attributes
  }
}

// Empty for a kind without a name.
std::string kind_of(py::handle tensor) {
  const std::string layout = text_of(tensor, "layout");
  if (text_of(tensor, "is_nested") == "True") return "a nested tensor (" + layout + ")";
  if (layout != "torch.strided") return "a tensor of layout " + layout;
  if (text_of(tensor, "is_quantized") == "True") return "a quantized tensor (" + text_of(tensor, "dtype") + ")";
  if (text_of(tensor, "is_meta") == "True") return "a meta tensor";
  return {};
}

}  // namespace

const TorchBorder* TorchBorder::find() {
  static const TorchBorder* found = nullptr;  // guarded by the GIL, never freed: torch cannot be unloaded either
  if (found != nullptr) return found;
  PyObject* torch = PyDict_GetItemString(PyImport_GetModuleDict(), "torch");
  // While `import torch` runs its module is there already, but not yet what we need.
  if (torch == nullptr || !py::hasattr(torch, "nn") || !py::hasattr(py::handle(torch).attr("nn"), "Parameter")) return nullptr;
  found = new TorchBorder(torch);
  return found;
}

TorchBorder::TorchBorder(py::handle torch)
    : tensor_(held_type(torch.attr("Tensor"))), parameter_(held_type(torch.attr("nn").attr("Parameter"))) {
  const py::object base = torch.attr("Tensor").attr("__base__");
  tensor_base_ = held_type(base);
  const auto descriptor = [&](const char* name) -> py::object { return base.attr("__dict__")[name]; };
  grad_ = descriptor("grad");
  requires_grad_ = descriptor("requires_grad");
  is_leaf_ = descriptor("is_leaf");
  is_neg_ = descriptor("is_neg");
  is_conj_ = descriptor("is_conj");
  disable_torch_function_ = torch.attr("_C").attr("DisableTorchFunction");
  num_function_modes_ = torch.attr("_C").attr("_len_torch_function_stack");
  lazy_ = held_type(torch.attr("nn").attr("parameter").attr("UninitializedTensorMixin"));
  key_set_ = TorchKeySet::locate(torch);
}

bool TorchBorder::function_modes_active() const { return py::cast<int64_t>(num_function_modes_()) > 0; }

TorchBorder::NoTorchFunction::NoTorchFunction(const TorchBorder& torch) : guard_(torch.disable_torch_function_()) {
  guard_.attr("__enter__")();
}

TorchBorder::NoTorchFunction::~NoTorchFunction() {
  const py::error_scope keep_pending_error;
  try {
    guard_.attr("__exit__")(py::none(), py::none(), py::none());
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("gradpack: leaving DisableTorchFunction");
  }
}

void TorchBorder::refuse_lazy(PyObject* tensor, bool complex, const Where& where) const {
  bool neg, conj = false;
  if (key_set_.located()) {
    neg = key_set_.is_neg(tensor);
    conj = key_set_.is_conj(tensor);
  } else {
    neg = is_neg_(py::handle(tensor)).ptr() == Py_True;
    if (complex) conj = is_conj_(py::handle(tensor)).ptr() == Py_True;
  }
  if (conj) {
    where.refuse(ErrorKind::kBuffer, "a lazily conjugated view, wanted memory that holds its values: pass .resolve_conj()");
  }
  if (neg) {
    where.refuse(ErrorKind::kBuffer, "a lazily negated view, wanted memory that holds its values: pass .resolve_neg()");
  }
}

void TorchBorder::refuse_kind(PyObject* tensor, const Where& where) const {
  py::error_already_set refusal;  // takes the pending exception
  std::string found = kind_of(tensor);
  if (found.empty()) {
    const std::string reason = py::str(refusal.value());  // with a C++ stack trace below its first line
    found = std::string(where.type_name()) + " of " + text_of(tensor, "dtype") + " on " + text_of(tensor, "device") + " (" +
            reason.substr(0, reason.find('\n')) + ")";
  }
  refusal.restore();
  where.refuse_from(PyExc_TypeError, found, ", wanted a dense tensor in memory");
}

void TorchBorder::refuse_narrow(PyObject* tensor, const Where& where) const {
  const std::string dtype = text_of(tensor, "dtype");
  if (dtype != "torch.bool" && dtype != "torch.int8" && dtype != "torch.uint8") {
    where.refuse(ErrorKind::kType, dtype, " is no dtype that gradpack packs");
  }
}

}  // namespace gradpack
