// What gradpack has to know about torch tensors beyond DLPack, looked up at run time: torch's headers are never included, torch
// is never linked, and it is only used where the program has imported it already.
#pragma once

#include <pybind11/pybind11.h>

#include "python/protocols.h"
#include "python/torch_key_set.h"

namespace gradpack {

class TorchBorder {
 public:
  // Null while the program has not imported torch.
  static const TorchBorder* find();

  bool is_tensor(PyTypeObject* type) const { return PyType_IsSubtype(type, tensor_base_); }
  // Types whose getters nobody overrides. Others are looked at with __torch_function__ off.
  bool is_plain(PyTypeObject* type) const { return type == tensor_ || type == parameter_; }
  bool is_parameter(PyTypeObject* type) const { return PyType_IsSubtype(type, parameter_); }

  // Parameters of lazy modules before their first forward.
  bool is_uninitialized(PyTypeObject* type) const { return PyType_IsSubtype(type, lazy_); }

  // The base class's attributes, whatever a subclass makes of them.
  pybind11::object grad(PyObject* tensor) const { return get(grad_, tensor); }
  bool requires_grad(PyObject* tensor) const { return get(requires_grad_, tensor).ptr() == Py_True; }
  bool is_leaf(PyObject* tensor) const { return get(is_leaf_, tensor).ptr() == Py_True; }

  // Refuses views that are negated or conjugated when read: their memory holds other numbers.
  void refuse_lazy(PyObject* tensor, bool complex, const Where& where) const;
  // Says what kind of tensor this is that torch has refused to give out with the Python exception that is set.
  [[noreturn]] void refuse_kind(PyObject* tensor, const Where& where) const;
  // torch.uint4 and its like come through DLPack as bytes.
  void refuse_narrow(PyObject* tensor, const Where& where) const;

  bool function_modes_active() const;
  // Turns __torch_function__ of subclasses and modes off.
  class NoTorchFunction {
   public:
    explicit NoTorchFunction(const TorchBorder& torch);
    ~NoTorchFunction();
    NoTorchFunction(const NoTorchFunction&) = delete;
    NoTorchFunction& operator=(const NoTorchFunction&) = delete;

   private:
    pybind11::object guard_;
  };

 private:
  explicit TorchBorder(pybind11::handle torch);

  static pybind11::object get(const pybind11::object& descriptor, PyObject* tensor) {
    PyObject* value =
        Py_TYPE(descriptor.ptr())->tp_descr_get(descriptor.ptr(), tensor, reinterpret_cast<PyObject*>(Py_TYPE(tensor)));
    if (value == nullptr) throw pybind11::error_already_set();
    return pybind11::reinterpret_steal<pybind11::object>(value);
  }

  // Held for ever, like torch itself.
  PyTypeObject* tensor_base_;
  PyTypeObject* tensor_;
  PyTypeObject* parameter_;
  PyTypeObject* lazy_;
  pybind11::object grad_, requires_grad_, is_leaf_, is_neg_, is_conj_;
  pybind11::object disable_torch_function_, num_function_modes_;
  TorchKeySet key_set_;
};

}  // namespace gradpack
