#include "python/plan.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <limits>

#include "common/check.h"
#include "python/without_gil.h"

namespace py = pybind11;

namespace gradpack {
namespace {

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

char* place(const char* operation, const char* argument, const Range& range, const Buffer& buffer, int64_t offset) {
  const int64_t size = itemsize(range.stream->wire);
  const int64_t bytes = (range.end - range.begin) * size;
  GP_CHECK(kValue, offset >= 0 && offset % size == 0, operation, ": offset into ", argument, ": found ", offset,
           ", wanted a multiple of ", size, ", the size of ", name(range.stream->wire));
  GP_CHECK(kValue, offset <= buffer.nbytes() && bytes <= buffer.nbytes() - offset, operation, ": ", argument, ": found ",
           buffer.nbytes(), " bytes, wanted ", bytes, " from offset ", offset, " on");
  return buffer.data() + offset;
}

std::vector<const void*> rows_of(const char* operation, const Range& range, const Buffer& buffer,
                                 const std::vector<int64_t>& offsets) {
  GP_INTERNAL(range.stream->dtype != DType::kBool, operation, ": found bool, wanted a dtype that has sums");
  GP_CHECK(kValue, !offsets.empty(), operation, ": offsets: found none, wanted one for each row");
  std::vector<const void*> rows;
  for (const int64_t offset : offsets) rows.push_back(place(operation, "buffer", range, buffer, offset));
  return rows;
}

}  // namespace

Plan::Plan(const py::bytes& key, int64_t num_arrays, const py::iterable& streams) : num_arrays_(num_arrays) {
  const std::string_view bytes = key;
  GP_CHECK(kValue, bytes.size() == key_.size(), "Plan: key: found ", bytes.size(), " bytes, wanted ", key_.size());
  std::copy(bytes.begin(), bytes.end(), key_.begin());
  GP_CHECK(kValue, num_arrays >= 0 && num_arrays <= kMaxArrays, "Plan: num_arrays: found ", num_arrays, ", wanted 0 to ",
           kMaxArrays);
  for (const py::handle& stream : streams) add_stream(stream.cast<StreamArgument>());
}

void Plan::pack(const Arrays& arrays, int64_t stream, int64_t begin, int64_t end, const Buffer& buffer, int64_t offset,
                Nonfinite* nonfinite) const {
  const char* const operation = "pack";
  const Range range = range_of(operation, stream, begin, end, &arrays);
  char* wire = place(operation, "buffer", range, buffer, offset);
  uint8_t* flags = flags_of(operation, nonfinite);
  without_gil([&] { cpu::pack(range, wire, flags); });
}

void Plan::unpack(const Arrays& arrays, int64_t stream, int64_t begin, int64_t end, const Buffer& buffer, int64_t offset,
                  int64_t divisor, const Counts& counts, Nonfinite* nonfinite) const {
  const char* const operation = "unpack";
  const Range range = range_of(operation, stream, begin, end, &arrays);
  const char* wire = place(operation, "buffer", range, buffer, offset);
  const Divide divide = divide_of(operation, *range.stream, divisor, counts);
  uint8_t* flags = flags_of(operation, nonfinite);
  without_gil([&] { cpu::unpack(range, wire, divide, flags); });
}

void Plan::reduce_unpack(const Arrays& arrays, int64_t stream, int64_t begin, int64_t end, const Buffer& buffer,
                         const std::vector<int64_t>& offsets, int64_t divisor, const Counts& counts, Nonfinite* nonfinite) const {
  const char* const operation = "reduce_unpack";
  const Range range = range_of(operation, stream, begin, end, &arrays);
  const std::vector<const void*> rows = rows_of(operation, range, buffer, offsets);
  const Divide divide = divide_of(operation, *range.stream, divisor, counts);
  uint8_t* flags = flags_of(operation, nonfinite);
  without_gil([&] { cpu::reduce_unpack(range, rows.data(), static_cast<int>(rows.size()), divide, flags); });
}

void Plan::reduce(int64_t stream, int64_t begin, int64_t end, const Buffer& buffer, const std::vector<int64_t>& offsets,
                  const Buffer& out, int64_t out_offset, int64_t divisor, const Counts& counts) const {
  const char* const operation = "reduce";
  const Range range = range_of(operation, stream, begin, end, nullptr);
  const std::vector<const void*> rows = rows_of(operation, range, buffer, offsets);
  char* wire = place(operation, "out", range, out, out_offset);
  const int64_t bytes = (range.end - range.begin) * itemsize(range.stream->wire);
  for (const void* row : rows) {
    const char* from = static_cast<const char*>(row);
    GP_CHECK(kValue, from == wire || from + bytes <= wire || wire + bytes <= from, "reduce: out_offset: found ", out_offset,
             ", inside a row, wanted one of the rows or memory beside them");
  }
  const Divide divide = divide_of(operation, *range.stream, divisor, counts);
  without_gil([&] { cpu::reduce(range, rows.data(), static_cast<int>(rows.size()), divide, wire); });
}

void Plan::check_finite(const Arrays& arrays, Nonfinite& nonfinite) const {
  const char* const operation = "check_finite";
  const std::vector<Range> ranges = ranges_of(operation, arrays);
  uint8_t* flags = flags_of(operation, &nonfinite);
  without_gil([&] {
    for (const Range& range : ranges) cpu::check_finite(range, flags);
  });
}

std::vector<Range> Plan::ranges_of(const char* operation, const Arrays& arrays) const {
  std::vector<Range> ranges;
  for (size_t i = 0; i < streams_.size(); ++i) {
    const Stream& stream = streams_[i];
    ranges.push_back(range_of(operation, static_cast<int64_t>(i), 0, stream.numel() / components(stream.dtype), &arrays));
  }
  return ranges;
}

void Plan::add_stream(const StreamArgument& argument) {
  const auto& [dtype_name, wire_name, gradients, counts] = argument;
  Stream stream{dtype_named(dtype_name, "dtype"), dtype_named(wire_name, "wire dtype"), gradients, {0}};
  GP_CHECK(kValue, can_travel(stream.dtype, stream.wire), "Plan: wire dtype: found ", wire_name, " for gradients of ", dtype_name,
           ", wanted ", name(scalar(stream.dtype)), " (or a 16-bit float for float32 and float64)");
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

Range Plan::range_of(const char* operation, int64_t index, int64_t begin, int64_t end, const Arrays* arrays) const {
  GP_CHECK(kValue, index >= 0 && index < static_cast<int64_t>(streams_.size()), operation, ": stream: found ", index,
           ", wanted less than ", streams_.size());
  const Stream& stream = streams_[static_cast<size_t>(index)];
  const int64_t parts = components(stream.dtype);
  GP_CHECK(kValue, 0 <= begin && begin <= end && end <= stream.numel() / parts, operation, ": begin, end: found ", begin, ", ",
           end, ", wanted 0 <= begin <= end <= ", stream.numel() / parts);
  const Range range{&stream, arrays ? arrays->views().data() : nullptr, begin * parts, end * parts, usual_manner(stream)};
  if (arrays) check_arrays(operation, *arrays, range);
  return range;
}

void Plan::check_arrays(const char* operation, const Arrays& arrays, const Range& range) const {
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
    GP_CHECK(kValue, view.dtype == stream.dtype && view.numel == count, operation, ": arrays[", stream.gradients[i], "]: found ",
             view.numel, " elements of ", name(view.dtype), ", wanted ", count, " of ", name(stream.dtype));
  }
}

Divide Plan::divide_of(const char* operation, const Stream& stream, int64_t divisor, const Counts& counts) const {
  GP_CHECK(kValue, divisor >= 0, operation, ": divisor: found ", divisor, ", wanted 0 or more");
  Divide divide{divisor, nullptr};
  if (counts) {
    const auto nbytes = static_cast<int64_t>(PyBytes_GET_SIZE(counts->ptr()));
    GP_CHECK(kValue, nbytes == 4 * num_arrays_, operation, ": counts: found ", nbytes, " bytes, wanted ", 4 * num_arrays_,
             " (an int32 for each array)");
    divide.counts = reinterpret_cast<const int32_t*>(PyBytes_AS_STRING(counts->ptr()));
    for (int64_t i = 0; i < num_arrays_; ++i) {
      GP_CHECK(kValue, divide.counts[i] >= 0, operation, ": counts[", i, "]: found ", divide.counts[i], ", wanted 0 or more");
    }
  }
  GP_INTERNAL(is_floating(stream.dtype) || (divisor <= 1 && !counts), operation, ": found a divisor for ", name(stream.dtype),
              ", wanted none: integers have no mean");
  return divide;
}

uint8_t* Plan::flags_of(const char* operation, Nonfinite* nonfinite) const {
  if (!nonfinite) return nullptr;
  GP_CHECK(kValue, nonfinite->size() == num_arrays_, operation, ": nonfinite: found ", nonfinite->size(), " flags, wanted ",
           num_arrays_);
  return nonfinite->flags();
}

}  // namespace gradpack
