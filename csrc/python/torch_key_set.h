// Whether a torch tensor is a lazily negated or conjugated view, in 2 ns instead of the 48 ns of Tensor.is_neg().
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>

namespace gradpack {

// HACK, and why: a negated view's memory holds the wrong numbers, nothing but its dispatch key set says so (a detached one has no
// _base), and the one public way to ask, is_neg(), drops and retakes the GIL: 300 gradients would take 14 us of their 40.
// So the place of the key set inside tensors is found once per process, by looking for what torch itself says that the key sets
// of six different tensors are. Only if a place holds them all, and the two bits prove to be what is_neg() and is_conj() report,
// is it used; otherwise those methods are called.
class TorchKeySet {
 public:
  static TorchKeySet locate(pybind11::handle torch);

  bool located() const { return located_; }
  bool is_neg(PyObject* tensor) const { return (read(tensor) & neg_) != 0; }
  bool is_conj(PyObject* tensor) const { return (read(tensor) & conj_) != 0; }

 private:
  uint64_t read(PyObject* tensor) const {
    const auto* impl = *reinterpret_cast<const char* const*>(reinterpret_cast<const char*>(tensor) + impl_offset_);
    return *reinterpret_cast<const uint64_t*>(impl + key_set_offset_);
  }

  bool located_ = false;
  size_t impl_offset_ = 0;     // of the TensorImpl pointer in the Python object
  size_t key_set_offset_ = 0;  // of the key set in the TensorImpl
  uint64_t neg_ = 0;
  uint64_t conj_ = 0;
};

}  // namespace gradpack
