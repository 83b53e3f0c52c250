// Buffer, Nonfinite and Plan: the kernels' Python face. Checks every argument once, so that the kernels need not.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>

#include "common/check.h"
#include "kernels/backend.h"
#include "python/array_arg.h"
#include "python/without_gil.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define GP_POISON(address, nbytes) __asan_poison_memory_region(address, static_cast<size_t>(nbytes))
#define GP_UNPOISON(address, nbytes) __asan_unpoison_memory_region(address, static_cast<size_t>(nbytes))
#else
#define GP_POISON(address, nbytes) ((void)0)
#define GP_UNPOISON(address, nbytes) ((void)0)
#endif

namespace py = pybind11;

namespace gradpack {
namespace {

// ---- Buffer --------------------------------------------------------------------------------------------------------------

class Buffer {
 public:
  explicit Buffer(int64_t nbytes) : nbytes_(nbytes) {
    GP_CHECK(kValue, nbytes >= 0, "Buffer: nbytes: found ", nbytes, ", wanted 0 or more");
    const int64_t alignment = nbytes >= kHugePage ? kHugePage : sysconf(_SC_PAGESIZE);
    GP_CHECK(kValue, nbytes <= std::numeric_limits<int64_t>::max() - 2 * alignment, "Buffer: nbytes: found ", nbytes,
             ", wanted what fits into the address space");
    mapped_bytes_ = static_cast<size_t>(std::max<int64_t>(nbytes, 1) + alignment);
    mapped_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped_ == MAP_FAILED) {
      PyErr_Format(PyExc_MemoryError, "Buffer: nbytes: no memory for %lld bytes", static_cast<long long>(nbytes));
      throw py::error_already_set();
    }
    const uintptr_t address = reinterpret_cast<uintptr_t>(mapped_);
    data_ = reinterpret_cast<char*>((address + alignment - 1) / alignment * alignment);
#if defined(MADV_HUGEPAGE)
    // Advice only: without huge pages a buffer of 16 MiB is 4,096 page faults and as many TLB entries.
    if (alignment == kHugePage) madvise(data_, static_cast<size_t>(nbytes / kHugePage * kHugePage), MADV_HUGEPAGE);
#endif
    // What mmap gave beside the buffer is memory that only a bug touches; AddressSanitizer cannot know by itself.
    GP_POISON(mapped_, data_ - static_cast<char*>(mapped_));
    GP_POISON(data_ + nbytes, static_cast<char*>(mapped_) + mapped_bytes_ - (data_ + nbytes));
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    GP_UNPOISON(mapped_, mapped_bytes_);
    munmap(mapped_, mapped_bytes_);
  }

  char* data() const { return data_; }
  int64_t nbytes() const { return nbytes_; }

 private:
  static constexpr int64_t kHugePage = 2 << 20;

  int64_t nbytes_;
  char* data_;
  void* mapped_;
  size_t mapped_bytes_;
};

// ---- Nonfinite -----------------------------------------------------------------------------------------------------------

class Nonfinite {
 public:
  explicit Nonfinite(int64_t num_arrays) {
    GP_CHECK(kValue, num_arrays >= 0, "Nonfinite: num_arrays: found ", num_arrays, ", wanted 0 or more");
    flags_.resize(static_cast<size_t>(num_arrays));
  }

  bool any() const { return std::find(flags_.begin(), flags_.end(), 1) != flags_.end(); }
  std::vector<int64_t> indices() const {
    std::vector<int64_t> found;
    for (size_t i = 0; i < flags_.size(); ++i) {
      if (flags_[i]) found.push_back(static_cast<int64_t>(i));
    }
    return found;
  }
  uint8_t* flags() { return flags_.data(); }
  int64_t size() const { return static_cast<int64_t>(flags_.size()); }

 private:
  std::vector<uint8_t> flags_;
};

// ---- Plan ----------------------------------------------------------------------------------------------------------------

DType dtype_named(const std::string& wanted, const char* argument) {
  for (int i = 0; i < kNumDTypes; ++i) {
    if (kDTypeTraits[i].name == wanted) return static_cast<DType>(i);
  }
  raise(ErrorKind::kValue, "Plan: ", argument, ": found '", wanted, "', wanted the name of a dtype that gradpack knows");
}

bool can_travel(DType dtype, DType wire) {
  if (wire == scalar(dtype)) return true;
  return (dtype == DType::kFloat32 || dtype == DType::kFloat64) && (wire == DType::kFloat16 || wire == DType::kBFloat16);
}

class Plan {
 public:
  // What sizes computed from the number of arrays cannot overflow with.
  static constexpr int64_t kMaxArrays = INT32_MAX;

  using StreamArgument = std::tuple<std::string, std::string, std::vector<int64_t>, std::vector<int64_t>>;

  Plan(const py::bytes& key, int64_t num_arrays, const py::iterable& streams) : num_arrays_(num_arrays) {
    const std::string_view bytes = key;
    GP_CHECK(kValue, bytes.size() == key_.size(), "Plan: key: found ", bytes.size(), " bytes, wanted ", key_.size());
    std::copy(bytes.begin(), bytes.end(), key_.begin());
    GP_CHECK(kValue, num_arrays >= 0 && num_arrays <= kMaxArrays, "Plan: num_arrays: found ", num_arrays, ", wanted 0 to ",
             kMaxArrays);
    for (const py::handle& stream : streams) add_stream(stream.cast<StreamArgument>());
  }

  void pack(const Arrays& arrays, int64_t stream, int64_t begin, int64_t end, const Buffer& buffer, int64_t offset,
            Nonfinite* nonfinite) const {
    const Call call{"pack"};
    const Range range = range_of(call, stream, begin, end, &arrays);
    char* wire = place(call, "buffer", range, buffer, offset);
    uint8_t* flags = flags_of(call, nonfinite);
    without_gil([&] { cpu::pack(range, wire, flags); });
  }

  void unpack(const Arrays& arrays, int64_t stream, int64_t begin, int64_t end, const Buffer& buffer, int64_t offset,
              int64_t divisor, const std::optional<py::bytes>& counts, Nonfinite* nonfinite) const {
    const Call call{"unpack"};
    const Range range = range_of(call, stream, begin, end, &arrays);
    const char* wire = place(call, "buffer", range, buffer, offset);
    const Divide divide = divide_of(call, range, divisor, counts);
    uint8_t* flags = flags_of(call, nonfinite);
    without_gil([&] { cpu::unpack(range, wire, divide, flags); });
  }

  void reduce_unpack(const Arrays& arrays, int64_t stream, int64_t begin, int64_t end, const Buffer& buffer,
                     const std::vector<int64_t>& offsets, int64_t divisor, const std::optional<py::bytes>& counts,
                     Nonfinite* nonfinite) const {
    const Call call{"reduce_unpack"};
    const Range range = range_of(call, stream, begin, end, &arrays);
    const std::vector<const void*> rows = rows_of(call, range, buffer, offsets);
    const Divide divide = divide_of(call, range, divisor, counts);
    uint8_t* flags = flags_of(call, nonfinite);
    without_gil([&] { cpu::reduce_unpack(range, rows.data(), static_cast<int>(rows.size()), divide, flags); });
  }

  void reduce(int64_t stream, int64_t begin, int64_t end, const Buffer& buffer, const std::vector<int64_t>& offsets,
              const Buffer& out, int64_t out_offset, int64_t divisor, const std::optional<py::bytes>& counts) const {
    const Call call{"reduce"};
    const Range range = range_of(call, stream, begin, end, nullptr);
    const std::vector<const void*> rows = rows_of(call, range, buffer, offsets);
    char* wire = place(call, "out", range, out, out_offset);
    const int64_t bytes = (range.end - range.begin) * itemsize(range.stream->wire);
    for (const void* row : rows) {
      const char* from = static_cast<const char*>(row);
      GP_CHECK(kValue, from == wire || from + bytes <= wire || wire + bytes <= from, "reduce: out_offset: found ", out_offset,
               ", inside a row, wanted one of the rows or memory beside them");
    }
    const Divide divide = divide_of(call, range, divisor, counts);
    without_gil([&] { cpu::reduce(range, rows.data(), static_cast<int>(rows.size()), divide, wire); });
  }

  void check_finite(const Arrays& arrays, Nonfinite& nonfinite) const {
    const Call call{"check_finite"};
    std::vector<Range> ranges;
    for (size_t i = 0; i < streams_.size(); ++i) {
      const Stream& stream = streams_[i];
      ranges.push_back(range_of(call, static_cast<int64_t>(i), 0, stream.numel() / components(stream.dtype), &arrays));
    }
    uint8_t* flags = flags_of(call, &nonfinite);
    without_gil([&] {
      for (const Range& range : ranges) cpu::check_finite(range, flags);
    });
  }

 private:
  struct Call {
    const char* operation;
  };

  void add_stream(const StreamArgument& argument) {
    const auto& [dtype_name, wire_name, gradients, counts] = argument;
    Stream stream{dtype_named(dtype_name, "dtype"), dtype_named(wire_name, "wire dtype"), gradients, {0}};
    GP_CHECK(kValue, can_travel(stream.dtype, stream.wire), "Plan: wire dtype: found ", wire_name, " for gradients of ",
             dtype_name, ", wanted ", name(scalar(stream.dtype)), " (or a 16-bit float for float32 and float64)");
    GP_CHECK(kValue, gradients.size() == counts.size(), "Plan: counts: found ", counts.size(), ", wanted one for each of ",
             gradients.size(), " gradients");
    const int64_t parts = components(stream.dtype);
    for (size_t i = 0; i < gradients.size(); ++i) {
      GP_CHECK(kValue, gradients[i] >= 0 && gradients[i] < num_arrays_, "Plan: gradients: found index ", gradients[i],
               ", wanted 0 to ", num_arrays_ - 1);
      const int64_t most = (std::numeric_limits<int64_t>::max() / 16 - stream.offsets.back()) / parts;
      GP_CHECK(kValue, counts[i] >= 0 && counts[i] <= most, "Plan: counts: found ", counts[i], ", wanted 0 to ", most);
      stream.offsets.push_back(stream.offsets.back() + counts[i] * parts);
    }
    streams_.push_back(std::move(stream));
  }

  // `arrays` is null for operations that touch no gradient.
  Range range_of(const Call& call, int64_t index, int64_t begin, int64_t end, const Arrays* arrays) const {
    const char* operation = call.operation;
    GP_CHECK(kValue, index >= 0 && index < static_cast<int64_t>(streams_.size()), operation, ": stream: found ", index,
             ", wanted less than ", streams_.size());
    const Stream& stream = streams_[static_cast<size_t>(index)];
    const int64_t parts = components(stream.dtype);
    GP_CHECK(kValue, 0 <= begin && begin <= end && end <= stream.numel() / parts, operation, ": begin, end: found ", begin, ", ",
             end, ", wanted 0 <= begin <= end <= ", stream.numel() / parts);
    const Range range{&stream, arrays ? arrays->views().data() : nullptr, begin * parts, end * parts};
    if (arrays) check_arrays(call, *arrays, range);
    return range;
  }

  void check_arrays(const Call& call, const Arrays& arrays, const Range& range) const {
    const char* operation = call.operation;
    const std::vector<ArrayView>& views = arrays.views();
    GP_CHECK(kValue, static_cast<int64_t>(views.size()) == num_arrays_, operation, ": arrays: found ", views.size(), ", wanted ",
             num_arrays_);
    GP_CHECK(kValue, arrays.key() == key_, operation, ": arrays: found other dtypes, shapes or memory orders than the plan's");
    GP_CHECK(kValue, !arrays.is_cuda(), operation, ": arrays: found them on a CUDA device, wanted the CPU");
    // The key says as much, if the plan was made from the arrays that it names; a plan that was not must not touch memory.
    const Stream& stream = *range.stream;
    const auto first = std::upper_bound(stream.offsets.begin(), stream.offsets.end(), range.begin) - 1;
    for (size_t i = first - stream.offsets.begin(); i < stream.gradients.size() && stream.offsets[i] < range.end; ++i) {
      const ArrayView& view = views[static_cast<size_t>(stream.gradients[i])];
      const int64_t count = (stream.offsets[i + 1] - stream.offsets[i]) / components(stream.dtype);
      GP_CHECK(kValue, view.dtype == stream.dtype && view.numel == count, operation, ": arrays[", stream.gradients[i],
               "]: found ", view.numel, " elements of ", name(view.dtype), ", wanted ", count, " of ", name(stream.dtype));
    }
  }

  static char* place(const Call& call, const char* argument, const Range& range, const Buffer& buffer, int64_t offset) {
    const int64_t size = itemsize(range.stream->wire);
    const int64_t bytes = (range.end - range.begin) * size;
    GP_CHECK(kValue, offset >= 0 && offset % size == 0, call.operation, ": offset into ", argument, ": found ", offset,
             ", wanted a multiple of ", size, ", the size of ", name(range.stream->wire));
    GP_CHECK(kValue, offset <= buffer.nbytes() && bytes <= buffer.nbytes() - offset, call.operation, ": ", argument, ": found ",
             buffer.nbytes(), " bytes, wanted ", bytes, " from offset ", offset, " on");
    return buffer.data() + offset;
  }

  static std::vector<const void*> rows_of(const Call& call, const Range& range, const Buffer& buffer,
                                          const std::vector<int64_t>& offsets) {
    GP_INTERNAL(range.stream->dtype != DType::kBool, call.operation, ": found bool, wanted a dtype that has sums");
    GP_CHECK(kValue, !offsets.empty(), call.operation, ": offsets: found none, wanted one for each row");
    std::vector<const void*> rows;
    for (const int64_t offset : offsets) rows.push_back(place(call, "buffer", range, buffer, offset));
    return rows;
  }

  Divide divide_of(const Call& call, const Range& range, int64_t divisor, const std::optional<py::bytes>& counts) const {
    const Stream& stream = *range.stream;
    GP_CHECK(kValue, divisor >= 0, call.operation, ": divisor: found ", divisor, ", wanted 0 or more");
    Divide divide{divisor, nullptr};
    if (counts) {
      const auto nbytes = static_cast<int64_t>(PyBytes_GET_SIZE(counts->ptr()));
      GP_CHECK(kValue, nbytes == 4 * num_arrays_, call.operation, ": counts: found ", nbytes, " bytes, wanted ", 4 * num_arrays_,
               " (an int32 for each array)");
      divide.counts = reinterpret_cast<const int32_t*>(PyBytes_AS_STRING(counts->ptr()));
      for (int64_t i = 0; i < num_arrays_; ++i) {
        GP_CHECK(kValue, divide.counts[i] >= 0, call.operation, ": counts[", i, "]: found ", divide.counts[i],
                 ", wanted 0 or more");
      }
    }
    GP_INTERNAL(is_floating(stream.dtype) || (divisor <= 1 && !counts), call.operation, ": found a divisor for ",
                name(stream.dtype), ", wanted none: integers have no mean");
    return divide;
  }

  uint8_t* flags_of(const Call& call, Nonfinite* nonfinite) const {
    if (!nonfinite) return nullptr;
    GP_CHECK(kValue, nonfinite->size() == num_arrays_, call.operation, ": nonfinite: found ", nonfinite->size(),
             " flags, wanted ", num_arrays_);
    return nonfinite->flags();
  }

  std::array<char, 16> key_;
  int64_t num_arrays_;
  std::vector<Stream> streams_;
};

}  // namespace

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
