// Plan: the streams of one set of arrays, and the operations of backend.h on ranges of them. Checks every argument once, so that
// the kernels need not.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/backend.h"
#include "python/array_arg.h"
#include "python/staging.h"

namespace gradpack {

class Plan {
 public:
  // What sizes computed from the number of arrays cannot overflow with.
  static constexpr int64_t kMaxArrays = INT32_MAX;

  using StreamArgument = std::tuple<std::string, std::string, std::vector<int64_t>, std::vector<int64_t>>;
  using Counts = std::optional<pybind11::bytes>;  // an int32 for each array

  Plan(const pybind11::bytes& key, int64_t num_arrays, const pybind11::iterable& streams);

  void pack(const Arrays& arrays, int64_t stream, int64_t begin, int64_t end, const Buffer& buffer, int64_t offset,
            Nonfinite* nonfinite) const;
  void unpack(const Arrays& arrays, int64_t stream, int64_t begin, int64_t end, const Buffer& buffer, int64_t offset,
              int64_t divisor, const Counts& counts, Nonfinite* nonfinite) const;
  void reduce_unpack(const Arrays& arrays, int64_t stream, int64_t begin, int64_t end, const Buffer& buffer,
                     const std::vector<int64_t>& offsets, int64_t divisor, const Counts& counts, Nonfinite* nonfinite) const;
  void reduce(int64_t stream, int64_t begin, int64_t end, const Buffer& buffer, const std::vector<int64_t>& offsets,
              const Buffer& out, int64_t out_offset, int64_t divisor, const Counts& counts) const;
  void check_finite(const Arrays& arrays, Nonfinite& nonfinite) const;

  // For transports that take whole calls. `operation` is for messages.
  const std::vector<Stream>& streams() const { return streams_; }
  // A range of one stream, in elements; `arrays` is null for operations that touch no gradient.
  Range range_of(const char* operation, int64_t index, int64_t begin, int64_t end, const Arrays* arrays) const;
  // All of each stream.
  std::vector<Range> ranges_of(const char* operation, const Arrays& arrays) const;
  Divide divide_of(const char* operation, const Stream& stream, int64_t divisor, const Counts& counts) const;
  uint8_t* flags_of(const char* operation, Nonfinite* nonfinite) const;

 private:
  void add_stream(const StreamArgument& argument);
  void check_arrays(const char* operation, const Arrays& arrays, const Range& range) const;

  std::array<char, 16> key_;
  int64_t num_arrays_;
  std::vector<Stream> streams_;
};

}  // namespace gradpack
