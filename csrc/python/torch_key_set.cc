#include "python/torch_key_set.h"

#include <cstring>
#include <optional>
#include <vector>

namespace py = pybind11;

namespace gradpack {
namespace {

// A TensorImpl has at most these bytes (torch asserts it), and may have fewer: 176 in torch 2.13. Its key set is its last member
// or nearly so: a search that goes on after it has found it would read what lies behind the object.
constexpr size_t kImplBytes = 208;

struct Probe {
  py::object tensor;
  uint64_t impl;
  uint64_t key_set;
  bool neg;
  bool conj;
};

uint64_t word_at(const void* base, size_t offset) {
  uint64_t word;
  std::memcpy(&word, static_cast<const char*>(base) + offset, sizeof(word));
  return word;
}

std::vector<Probe> make_probes(py::handle torch) {
  const py::object empty = torch.attr("empty");
  const auto make = [&](const char* dtype, const char* device) {
    return empty(py::make_tuple(2, 2), py::arg("dtype") = torch.attr(dtype), py::arg("device") = device);
  };
  const py::object real = make("float32", "cpu"), complex = make("complex64", "cpu");
  const py::object tensors[] = {real,
                                complex,
                                torch.attr("_neg_view")(real),
                                complex.attr("conj")(),
                                complex.attr("conj")().attr("imag").attr("detach")(),
                                make("float32", "meta")};
  std::vector<Probe> probes;
  for (const py::object& tensor : tensors) {
    probes.push_back({tensor, py::cast<uint64_t>(tensor.attr("_cdata")),
                      py::cast<uint64_t>(torch.attr("_C").attr("_dispatch_keys")(tensor).attr("raw_repr")()),
                      py::cast<bool>(tensor.attr("is_neg")()), py::cast<bool>(tensor.attr("is_conj")())});
  }
  return probes;
}

// The first offset at which `base(probe)` holds `wanted(probe)` for all probes.
template <typename Base, typename Wanted>
std::optional<size_t> first_offset(const std::vector<Probe>& probes, size_t bytes, Base base, Wanted wanted) {
  for (size_t offset = 0; offset + sizeof(uint64_t) <= bytes; offset += sizeof(uint64_t)) {
    bool all = true;
    for (const Probe& probe : probes) all = all && word_at(base(probe), offset) == wanted(probe);
    if (all) return offset;
  }
  return std::nullopt;
}

}  // namespace

TorchKeySet TorchKeySet::locate(py::handle torch) try {
  const std::vector<Probe> probes = make_probes(torch);
  const auto object_bytes =
      static_cast<size_t>(reinterpret_cast<PyTypeObject*>(py::object(torch.attr("Tensor").attr("__base__")).ptr())->tp_basicsize);
  const auto impl_offset = first_offset(
      probes, object_bytes, [](const Probe& probe) { return static_cast<const void*>(probe.tensor.ptr()); },
      [](const Probe& probe) { return probe.impl; });
  if (!impl_offset) return {};
  const auto key_set_offset = first_offset(
      probes, kImplBytes, [](const Probe& probe) { return reinterpret_cast<const void*>(probe.impl); },
      [](const Probe& probe) { return probe.key_set; });
  if (!key_set_offset) return {};

  TorchKeySet result;
  result.impl_offset_ = *impl_offset;
  result.key_set_offset_ = *key_set_offset;
  result.neg_ = probes[2].key_set & ~probes[0].key_set;
  result.conj_ = probes[3].key_set & ~probes[1].key_set;
  const auto one_bit = [](uint64_t bits) { return bits != 0 && (bits & (bits - 1)) == 0; };
  result.located_ = one_bit(result.neg_) && one_bit(result.conj_);
  for (const Probe& probe : probes) {
    result.located_ =
        result.located_ && result.is_neg(probe.tensor.ptr()) == probe.neg && result.is_conj(probe.tensor.ptr()) == probe.conj;
  }
  return result;
} catch (py::error_already_set&) {
  return {};  // a torch that lacks one of these: is_neg() and is_conj() it is
}

}  // namespace gradpack
