// What one step carries: pure arithmetic on the streams of a call, the same on every rank.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/launch_table.h"

namespace gradpack {

// A range of a stream, in scalars, and its place in the slot, in bytes.
struct ShmPart {
  const Stream* stream;
  int64_t begin;
  int64_t end;
  int64_t offset;

  // The share of one rank where `ranks` take shares of the part: whole lines of the slot, so no two ranks write one.
  std::pair<int64_t, int64_t> shard(int64_t rank, int64_t ranks) const;
};

// The parts that go through a slot together.
struct ShmChunk {
  const ShmPart* parts;
  int64_t num_parts;
  int64_t bytes;

  const ShmPart* begin() const { return parts; }
  const ShmPart* end() const { return parts + num_parts; }
};

// The chunks of one call: a first one, which travels before the ranks have agreed and so has a fixed size, and the rest.
class ShmChunks {
 public:
  // Only the first chunk: as much of the streams, from the first on, as fits into `bytes`.
  void open(const std::vector<Stream>& streams, int64_t bytes);
  // What it left over, in chunks of at most `bytes`.
  void cut(const std::vector<Stream>& streams, int64_t bytes);
  // In place of these: a range of one stream, in scalars, in chunks of at most `bytes`.
  void range(const Stream& stream, int64_t begin, int64_t end, int64_t bytes);

  int64_t size() const { return static_cast<int64_t>(ends_.size()); }
  ShmChunk operator[](int64_t index) const;

 private:
  void fill(const std::vector<Stream>& streams, int64_t bytes);

  std::vector<ShmPart> parts_;
  std::vector<std::pair<size_t, int64_t>> ends_;  // of each chunk: the end of its parts, and its bytes
  size_t stream_ = 0;                             // where the next chunk begins
  int64_t at_ = 0;
};

}  // namespace gradpack
