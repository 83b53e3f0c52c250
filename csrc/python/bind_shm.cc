// ShmChannel: the Python face of transports/shm_channel.h. Keeps what a call points to until the call is over.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>

#include "common/check.h"
#include "python/plan.h"
#include "python/without_gil.h"
#include "transports/shm_channel.h"

namespace py = pybind11;

namespace gradpack {
namespace {

// time.monotonic() as now_ns() counts; a time that is never reached where it is too large for that.
int64_t nanoseconds(double seconds) {
  GP_CHECK(kValue, !std::isnan(seconds), "ShmChannel: seconds: found NaN, wanted a number");
  return seconds >= 9e9 ? INT64_MAX : seconds <= 0 ? 0 : static_cast<int64_t>(seconds * 1e9);
}

class Channel {
 public:
  Channel(std::unique_ptr<ShmSegment> segment, int64_t rank, double spin_seconds)
      : location_(segment->location()),
        nonce_(segment->nonce()),
        rank_(rank),
        channel_(std::make_unique<ShmChannel>(std::move(segment), rank, nanoseconds(spin_seconds))) {}

  const std::string& location() const { return location_; }
  py::bytes nonce() const { return nonce_; }

  void begin(const py::bytes& header, const py::object& plan, const py::object& arrays, std::optional<int64_t> root,
             int64_t divisor, const Plan::Counts& counts, const py::object& nonfinite) {
    const ShmCall call = call_of(plan, arrays, root, divisor, counts, nonfinite);
    open().begin(call, std::string_view(header));
  }

  void carry(const py::object& plan, const py::object& arrays, std::optional<int64_t> root, int64_t divisor,
             const Plan::Counts& counts, const py::object& nonfinite) {
    const ShmCall call = call_of(plan, arrays, root, divisor, counts, nonfinite);
    open().carry(call);
  }

  void begin_range(const std::string& kind, const py::object& plan, const py::object& arrays, int64_t stream, int64_t begin,
                   int64_t end, const py::object& buffer, int64_t offset, int64_t divisor, const Plan::Counts& counts,
                   const py::object& nonfinite) {
    GP_CHECK(kValue, kind == "collect" || kind == "spread", "ShmChannel: kind: found ", kind, ", wanted collect or spread");
    ShmCall call = call_of(plan, arrays, 0, divisor, counts, nonfinite);
    const Range range = plan.cast<const Plan&>().range_of("ShmChannel", stream, begin, end, &arrays.cast<const Arrays&>());
    call.kind = kind == "collect" ? ShmCall::Kind::kCollect : ShmCall::Kind::kSpread;
    call.dense_begin = range.begin;
    if (!buffer.is_none()) {
      const auto& memory = buffer.cast<const Buffer&>();
      const int64_t bytes = (range.end - range.begin) * itemsize(range.stream->wire);
      GP_CHECK(kValue, offset >= 0 && offset <= memory.nbytes() && bytes <= memory.nbytes() - offset,
               "ShmChannel: offset: found ", offset, " with ", bytes, " bytes from there, wanted both within ", memory.nbytes());
      call.dense = memory.data() + offset;
    }
    GP_CHECK(kValue, call.dense || rank_ != 0, "ShmChannel: buffer: found None on the leader, wanted a Buffer");
    open().begin_range(call, stream, range.begin, range.end);
    kept_ = py::make_tuple(kept_, buffer);
  }

  void begin_gather(const py::bytes& own) { open().begin_gather(std::string_view(own)); }

  const char* advance(double until) {
    ShmChannel& channel = open();
    ShmChannel::Status status{};
    const int64_t until_ns = nanoseconds(until);
    without_gil([&] { status = channel.advance(until_ns); });
    if (status == ShmChannel::Status::kWaiting) return "waiting";
    kept_ = py::none();
    return status == ShmChannel::Status::kDone ? "done" : "differ";
  }

  std::vector<py::bytes> headers() const { return as_bytes(open().headers()); }
  std::vector<py::bytes> gathered() const { return as_bytes(open().gathered()); }
  uint64_t steps() const { return open().steps(); }
  // (stream, first element, one past the last) of what is not finished yet; None: there is nothing.
  py::object position() const {
    const ShmPart* const part = open().unfinished();
    if (!part) return py::none();
    const int64_t parts = components(part->stream->dtype);
    return py::make_tuple(part->stream - streams_->data(), part->begin / parts, part->end / parts);
  }
  void hide() { open().hide(); }
  void set_tuning(int64_t chunk_bytes, int64_t sharded_bytes, bool past_caches) {
    open().set_tuning({chunk_bytes, sharded_bytes, past_caches});
  }
  int64_t nbytes() const { return open().shape().bytes(); }
  void close() { channel_.reset(); }

 private:
  ShmChannel& open() const {
    GP_CHECK(kRuntime, channel_, "ShmChannel: found it closed, wanted it open");
    return *channel_;
  }

  static std::vector<py::bytes> as_bytes(const std::vector<std::string>& found) { return {found.begin(), found.end()}; }

  ShmCall call_of(const py::object& plan, const py::object& arrays, std::optional<int64_t> root, int64_t divisor,
                  const Plan::Counts& counts, const py::object& nonfinite) {
    ShmCall call;
    call.root = root.value_or(-1);
    call.kind = root ? ShmCall::Kind::kBroadcast : ShmCall::Kind::kAllReduce;
    GP_CHECK(kValue, call.root >= -1 && call.root < open().shape().ranks, "ShmChannel: root: found ", call.root,
             ", wanted a rank");
    if (!plan.is_none()) {
      const auto& moved = plan.cast<const Plan&>();
      const auto& described = arrays.cast<const Arrays&>();
      moved.ranges_of("ShmChannel", described);  // for its checks
      call.streams = streams_ = &moved.streams();
      call.arrays = described.views().data();
      for (const Stream& stream : moved.streams()) {
        GP_INTERNAL(root || stream.dtype != DType::kBool, "ShmChannel", ": found bool, wanted a dtype that has sums");
        call.divide = moved.divide_of("ShmChannel", stream, divisor, counts);
      }
      call.nonfinite = moved.flags_of("ShmChannel", nonfinite.is_none() ? nullptr : nonfinite.cast<Nonfinite*>());
    }
    kept_ = py::make_tuple(plan, arrays, counts ? py::object(*counts) : py::none(), nonfinite);
    return call;
  }

  const std::string location_;
  const std::string nonce_;
  const int64_t rank_;
  std::unique_ptr<ShmChannel> channel_;
  const std::vector<Stream>* streams_ = nullptr;  // of the last call that moved arrays
  py::object kept_ = py::none();
};

}  // namespace

void bind_shm(py::module_& module) {
  using py::arg;
  const auto none = py::none();

  py::class_<Channel>(module, "ShmChannel", py::is_final())
      .def_static(
          "create",
          [](int64_t ranks, int64_t lanes, int64_t slots, int64_t slot_bytes, int64_t rank, double spin,
             const std::string& path) {
            return std::make_unique<Channel>(ShmSegment::create({ranks, lanes, slots, slot_bytes}, path), rank, spin);
          },
          arg("ranks"), arg("lanes"), arg("slots"), arg("slot_bytes"), arg("rank"), arg("spin"), arg("path") = "")
      .def_static(
          "attach",
          [](int64_t ranks, int64_t lanes, int64_t slots, int64_t slot_bytes, int64_t rank, double spin,
             const std::string& location, const py::bytes& nonce) {
            auto segment = ShmSegment::attach({ranks, lanes, slots, slot_bytes}, location, nonce);
            return std::make_unique<Channel>(std::move(segment), rank, spin);
          },
          arg("ranks"), arg("lanes"), arg("slots"), arg("slot_bytes"), arg("rank"), arg("spin"), arg("location"), arg("nonce"))
      .def_property_readonly("location", &Channel::location)
      .def_property_readonly("nonce", &Channel::nonce)
      .def_property_readonly("nbytes", &Channel::nbytes)
      .def("begin", &Channel::begin, arg("header"), arg("plan") = none, arg("arrays") = none, arg("root") = none,
           arg("divisor") = 1, arg("counts") = none, arg("nonfinite") = none)
      .def("carry", &Channel::carry, arg("plan"), arg("arrays"), arg("root") = none, arg("divisor") = 1, arg("counts") = none,
           arg("nonfinite") = none)
      .def("begin_range", &Channel::begin_range, arg("kind"), arg("plan"), arg("arrays"), arg("stream"), arg("begin"), arg("end"),
           arg("buffer"), arg("offset"), arg("divisor") = 1, arg("counts") = none, arg("nonfinite") = none)
      .def("begin_gather", &Channel::begin_gather, arg("own"))
      .def("advance", &Channel::advance, arg("until"))
      .def("headers", &Channel::headers)
      .def("gathered", &Channel::gathered)
      .def("steps", &Channel::steps)
      .def("position", &Channel::position)
      .def("hide", &Channel::hide)
      .def("set_tuning", &Channel::set_tuning, arg("chunk_bytes"), arg("sharded_bytes"), arg("past_caches"))
      .def("close", &Channel::close);
}

}  // namespace gradpack
