#include "transports/shm_chunks.h"

#include <algorithm>

namespace gradpack {
namespace {

constexpr int64_t kLineBytes = 64;
// Parts begin at a multiple of this within their stream: never inside a complex number, and whole lines of any wire dtype.
constexpr int64_t kScalars = 64;

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

}  // namespace

std::pair<int64_t, int64_t> ShmPart::shard(int64_t rank, int64_t ranks) const {
  const int64_t share = round_up((end - begin + ranks - 1) / ranks, kScalars);
  return {std::min(end, begin + rank * share), std::min(end, begin + (rank + 1) * share)};
}

void ShmChunks::open(const std::vector<Stream>& streams, int64_t bytes) {
  parts_.clear();
  ends_.clear();
  stream_ = 0;
  at_ = 0;
  fill(streams, bytes);
}

void ShmChunks::cut(const std::vector<Stream>& streams, int64_t bytes) {
  while (stream_ < streams.size()) fill(streams, bytes);
}

void ShmChunks::range(const Stream& stream, int64_t begin, int64_t end, int64_t bytes) {
  parts_.clear();
  ends_.clear();
  const int64_t size = itemsize(stream.wire), most = bytes / size / kScalars * kScalars;
  for (int64_t at = begin; at < end; at += most) {
    const int64_t count = std::min(most, end - at);
    parts_.push_back({&stream, at, at + count, 0});
    ends_.emplace_back(parts_.size(), count * size);
  }
}

// Adds one chunk.
void ShmChunks::fill(const std::vector<Stream>& streams, int64_t bytes) {
  int64_t used = 0;
  while (stream_ < streams.size()) {
    const Stream& stream = streams[stream_];
    const int64_t size = itemsize(stream.wire), left = stream.numel() - at_;
    const int64_t fits = (bytes - used) / size;
    if (left > fits && fits < kScalars) break;
    const int64_t count = left <= fits ? left : fits / kScalars * kScalars;
    if (count > 0) parts_.push_back({&stream, at_, at_ + count, used});
    used = round_up(used + count * size, kLineBytes);
    at_ += count;
    if (at_ < stream.numel()) break;
    ++stream_;
    at_ = 0;
  }
  ends_.emplace_back(parts_.size(), used);
}

ShmChunk ShmChunks::operator[](int64_t index) const {
  const size_t first = index > 0 ? ends_[static_cast<size_t>(index - 1)].first : 0;
  const auto& [end, bytes] = ends_[static_cast<size_t>(index)];
  return {parts_.data() + first, static_cast<int64_t>(end - first), bytes};
}

}  // namespace gradpack
