// describe(): one pass over the user's list.
#include <array>
#include <memory>
#include <optional>

#include "python/protocols.h"
#include "python/torch_border.h"

namespace py = pybind11;

namespace gradpack {
namespace {

// What can be decided from an object's type.
struct TypeFacts {
  py::object type;  // held, so that no other type can come to lie at its address while this is remembered
  Protocol protocol = Protocol::kNone;
  const DLPackExchangeAPI* api = nullptr;
  bool torch = false;
  bool masked = false;     // numpy.ma.MaskedArray or a subclass
  bool plain = false;      // torch.Tensor or torch.nn.Parameter itself
  bool parameter = false;  // torch.nn.Parameter or a subclass

  PyTypeObject* type_object() const { return reinterpret_cast<PyTypeObject*>(type.ptr()); }
};

class Describer {
 public:
  Describer(Where where, DescribeOptions options) : where_(where), options_(options), torch_(TorchBorder::find()) {
    if (torch_ != nullptr && torch_->function_modes_active()) no_modes_.emplace(*torch_);
  }

  std::unique_ptr<Arrays> run(py::handle objects) {
    const auto fast = py::reinterpret_steal<py::object>(PySequence_Fast(objects.ptr(), "wanted a sequence of arrays"));
    if (!fast) throw py::error_already_set();
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(fast.ptr());
    if (!where_.names.is_none() && PySequence_Size(where_.names.ptr()) != count) {
      raise(ErrorKind::kValue, std::string(py::str(where_.operation)), ": ", py::len(where_.names), " names for ", count,
            " arrays");
    }
    arrays_->start(static_cast<size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      where_.index = i;
      // An object's own code may run in between, and other threads.
      if (PySequence_Fast_GET_SIZE(fast.ptr()) != count) where_.refuse(ErrorKind::kValue, "the list changed its length");
      add(py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(fast.ptr(), i)));
    }
    arrays_->finish(where_);
    return std::move(arrays_);
  }

 private:
  void add(py::object object) {
    where_.object = object;
    const TypeFacts& facts = facts_of(Py_TYPE(object.ptr()));
    if (facts.torch) return add_tensor(std::move(object), facts);
    if (facts.masked) where_.refuse(ErrorKind::kBuffer, "masked ", where_.type_name(), ", wanted plain memory: pass its .data");
    find(facts);
    arrays_->add(found_, true, where_);
    arrays_->keep_alive().add([](void* thing) { Py_DECREF(static_cast<PyObject*>(thing)); }, object.release().ptr());
  }

  void add_tensor(py::object object, const TypeFacts& facts) {
    if (!facts.plain) {
      const TorchBorder::NoTorchFunction guard(*torch_);
      add_tensor_unguarded(std::move(object), facts);
    } else {
      add_tensor_unguarded(std::move(object), facts);
    }
  }

  void add_tensor_unguarded(py::object object, const TypeFacts& facts) {
    if (!facts.plain && torch_->is_uninitialized(facts.type_object())) {
      where_.refuse(ErrorKind::kType, where_.type_name(), " has no shape before its lazy module has seen its first input");
    }
    // Parameters of a tensor subclass keep their class and are marked so (torch.nn.Parameter's isinstance looks at that).
    const bool parameter = facts.parameter || (!facts.plain && marked_as_parameter(object));
    if (!parameter) {
      if (torch_->requires_grad(object.ptr()) && torch_->is_leaf(object.ptr())) {
        where_.refuse(ErrorKind::kValue,
                      "a leaf tensor that requires grad: pass its .grad to work on the gradient, or .detach() ",
                      "to work on its values");
      }
    } else if (options_.parameters_stand_for_grad) {
      py::object grad = torch_->grad(object.ptr());
      if (grad.is_none()) {
        find(facts);
        return arrays_->add(found_, false, where_);
      }
      where_.object = grad;
      const bool guarded = !facts.plain;
      const TypeFacts& grad_facts = facts_of(Py_TYPE(grad.ptr()));  // `facts` may be forgotten for them
      if (!grad_facts.plain && !guarded) {
        const TorchBorder::NoTorchFunction guard(*torch_);
        return add_values(std::move(grad), grad_facts);
      }
      return add_values(std::move(grad), grad_facts);
    }
    add_values(std::move(object), facts);
  }

  void add_values(py::object tensor, const TypeFacts& facts) {
    find(facts);
    // What found_ points to lies in the tensor: it is copied before Python code runs again.
    arrays_->add(found_, true, where_);
    const DType dtype = found_.dtype;
    if (itemsize(dtype) == 1) torch_->refuse_narrow(tensor.ptr(), where_);
    torch_->refuse_lazy(tensor.ptr(), is_complex(dtype), where_);
    arrays_->keep_torch_tensor(std::move(tensor));
  }

  static bool marked_as_parameter(py::handle tensor) {
    return py::hasattr(tensor, "_is_param") && py::bool_(tensor.attr("_is_param"));
  }

  // Fills found_ from where_.object.
  void find(const TypeFacts& facts) {
    const Protocol protocol = facts.protocol == Protocol::kNone ? protocol_of_instance() : facts.protocol;
    switch (protocol) {
      case Protocol::kExchange:
        if (!facts.torch) return find_by_exchange(facts.api, where_, arrays_->keep_alive(), found_);
        return find_tensor(facts.api);
      case Protocol::kDLPack:
        return facts.torch ? find_tensor_by_dlpack() : find_by_dlpack(where_, arrays_->keep_alive(), found_);
      case Protocol::kCudaArrayInterface:
        return find_by_cuda_array_interface(where_, found_);
      case Protocol::kBuffer:
        return find_by_buffer(where_, arrays_->keep_alive(), found_);
      case Protocol::kNone:
        break;
    }
    if (where_.object.is_none()) {
      where_.refuse(ErrorKind::kType, "None has no shape: pass the module or its parameters so that a missing gradient has one");
    }
    if (options_.forced != Protocol::kNone) {
      where_.refuse(ErrorKind::kType, where_.type_name(), " does not speak the protocol that was asked for");
    }
    where_.refuse(ErrorKind::kType, where_.type_name(), " is no array: wanted one that speaks DLPack, ",
                  "__cuda_array_interface__ or the (writable) buffer protocol");
  }

  // Torch tensors are never read-only and outlive the call in `arrays_`: the borrowing call will do, which is the faster one.
  void find_tensor(const DLPackExchangeAPI* api) {
    DLTensor tensor;
    if (api->dltensor_from_py_object_no_sync(where_.object.ptr(), &tensor) != 0) {
      torch_->refuse_kind(where_.object.ptr(), where_);
    }
    read_dltensor(tensor, where_, found_);
  }

  // Tensor.__dlpack__ refuses tensors that require grad or are conjugated; the values are what matters here.
  void find_tensor_by_dlpack() {
    const py::object tensor = py::reinterpret_borrow<py::object>(where_.object);
    Where detached = where_;
    const py::object values = torch_->requires_grad(tensor.ptr()) ? py::object(tensor.attr("detach")()) : tensor;
    detached.object = values;
    find_by_dlpack(detached, arrays_->keep_alive(), found_);
  }

  const TypeFacts& facts_of(PyTypeObject* type) {
    for (TypeFacts& facts : remembered_) {
      if (facts.type_object() == type) return facts;
    }
    TypeFacts& facts = remembered_[next_forgotten_++ % remembered_.size()];
    facts = TypeFacts{};
    facts.type = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type));
    facts.torch = torch_ != nullptr && torch_->is_tensor(type);
    facts.masked = !facts.torch && py::hasattr(facts.type, "harden_mask");
    facts.plain = facts.torch && torch_->is_plain(type);
    facts.parameter = facts.torch && torch_->is_parameter(type);
    if (wanted(Protocol::kExchange)) {
      facts.api = exchange_api(type);
      if (facts.api != nullptr) facts.protocol = Protocol::kExchange;
    }
    const py::handle holder = facts.type;
    if (facts.protocol == Protocol::kNone) facts.protocol = protocol_by_attributes(holder);
    if (facts.protocol == Protocol::kNone && wanted(Protocol::kBuffer) && type->tp_as_buffer != nullptr &&
        type->tp_as_buffer->bf_getbuffer != nullptr) {
      facts.protocol = Protocol::kBuffer;
    }
    return facts;
  }

  // Some objects carry the attribute themselves.
  Protocol protocol_of_instance() const { return protocol_by_attributes(where_.object); }

  Protocol protocol_by_attributes(py::handle holder) const {
    if (wanted(Protocol::kDLPack) && py::hasattr(holder, "__dlpack__")) return Protocol::kDLPack;
    if (wanted(Protocol::kCudaArrayInterface) && py::hasattr(holder, "__cuda_array_interface__")) {
      return Protocol::kCudaArrayInterface;
    }
    return Protocol::kNone;
  }

  bool wanted(Protocol protocol) const { return options_.forced == Protocol::kNone || options_.forced == protocol; }

  Where where_;
  const DescribeOptions options_;
  const TorchBorder* const torch_;
  std::optional<TorchBorder::NoTorchFunction> no_modes_;
  std::array<TypeFacts, 8> remembered_;
  size_t next_forgotten_ = 0;
  Found found_;
  std::unique_ptr<Arrays> arrays_ = std::make_unique<Arrays>();
};

}  // namespace

std::unique_ptr<Arrays> describe(py::handle objects, Where where, DescribeOptions options) {
  return Describer(where, options).run(objects);
}

}  // namespace gradpack
