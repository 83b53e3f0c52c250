#include "transports/shm_channel.h"

#include <algorithm>
#include <cstring>

#include "common/check.h"
#include "kernels/thread_pool.h"

namespace gradpack {
namespace {

// The most that the first chunk has: a call of this size needs one step.
constexpr int64_t kFirstChunkBytes = 128 << 10;
constexpr uint64_t kMaxGatheredBytes = uint64_t{1} << 31;

const std::vector<Stream> kNoStreams;

}  // namespace

ShmChannel::ShmChannel(std::shared_ptr<ShmSegment> segment, int64_t rank, int64_t spin_ns)
    : segment_(std::move(segment)), rank_(rank), tuning_{shape().slot_bytes, 16 << 10, 0} {
  GP_CHECK(kValue, rank >= 0 && rank < shape().ranks, "ShmChannel: rank: found ", rank, ", wanted 0 to ", shape().ranks - 1);
  for (int64_t lane = 0; lane < shape().lanes; ++lane) lanes_.emplace_back(*segment_, rank, lane, spin_ns);
}

void ShmChannel::check_process() const {
  GP_CHECK(kRuntime, segment_->is_mine(), "ShmChannel: found in a forked child, wanted the process that made it");
}

ShmChannel::Mailbox& ShmChannel::mailbox(int64_t rank) const {
  // Two take turns: this one is written again only after all ranks have come to the opening after it.
  return *reinterpret_cast<Mailbox*>(segment_->mailbox(rank, openings_ % 2));
}

void ShmChannel::set_tuning(const ShmTuning& tuning) { tuning_ = tuning; }

// ---- calls -----------------------------------------------------------------------------------------------------------------

void ShmChannel::begin(const ShmCall& call, std::string_view header) {
  check_process();
  GP_CHECK(kValue, header.size() == kHeaderBytes, "ShmChannel: header: found ", header.size(), " bytes, wanted ", kHeaderBytes);
  call_ = call;
  ++openings_;
  Mailbox& own = mailbox(rank_);
  header.copy(own.header, kHeaderBytes);
  own.tuning = tuning_;
  chunks_.open(call.streams ? *call.streams : kNoStreams, std::min(kFirstChunkBytes, shape().slot_bytes));
  lanes_[0].start(call, chunks_, 0);
  phase_ = Phase::kPackFirst;
}

void ShmChannel::carry(const ShmCall& call) {
  check_process();
  call_ = call;
  chunks_.open(call.streams ? *call.streams : kNoStreams, std::min(kFirstChunkBytes, shape().slot_bytes));
  lanes_[0].start(call, chunks_, 0);
  cut_and_share();
  phase_ = Phase::kCarry;
}

void ShmChannel::begin_range(const ShmCall& call, int64_t stream, int64_t begin, int64_t end) {
  check_process();
  call_ = call;
  chunks_.range((*call.streams)[static_cast<size_t>(stream)], begin, end, shape().slot_bytes);
  lanes_[0].start(call, chunks_, 0);
  share_chunks({shape().slot_bytes, 0, 0});
  phase_ = Phase::kCarry;
}

ShmChannel::Status ShmChannel::advance(int64_t until_ns) {
  check_process();
  if (phase_ == Phase::kPackFirst && lanes_[0].pack_first(until_ns)) phase_ = Phase::kCompare;
  if (phase_ == Phase::kCompare && lanes_[0].wait_all_packed(until_ns)) {
    if (!headers_equal()) {
      lanes_[0].drop();
      phase_ = Phase::kIdle;
      return Status::kDiffer;
    }
    cut_and_share();
    phase_ = Phase::kCarry;
  }
  if (phase_ == Phase::kCarry && carry_out(until_ns)) phase_ = Phase::kIdle;
  if (phase_ == Phase::kGather && advance_gather(until_ns)) phase_ = Phase::kIdle;
  return phase_ == Phase::kIdle ? Status::kDone : Status::kWaiting;
}

bool ShmChannel::headers_equal() const {
  const Mailbox& own = mailbox(rank_);
  for (int64_t peer = 0; peer < shape().ranks; ++peer) {
    if (std::memcmp(mailbox(peer).header, own.header, kHeaderBytes) != 0) return false;
  }
  return true;
}

std::vector<std::string> ShmChannel::headers() const {
  check_process();
  std::vector<std::string> found;
  for (int64_t peer = 0; peer < shape().ranks; ++peer) found.emplace_back(mailbox(peer).header, kHeaderBytes);
  return found;
}

ShmTuning ShmChannel::leaders_tuning() const {
  ShmTuning tuning = mailbox(0).tuning;
  tuning.chunk_bytes = std::clamp<int64_t>(tuning.chunk_bytes / 64 * 64, 4096, shape().slot_bytes);
  return tuning;
}

void ShmChannel::cut_and_share() {
  const ShmTuning tuning = leaders_tuning();
  if (call_.streams) chunks_.cut(*call_.streams, tuning.chunk_bytes);
  share_chunks(tuning);
}

// Each lane's share is one stretch of the chunks, so that each thread walks through memory in one go.
void ShmChannel::share_chunks(const ShmTuning& tuning) {
  busy_lanes_ = std::min<int64_t>(shape().lanes, chunks_.size());
  for (int64_t lane = 0; lane < busy_lanes_; ++lane) {
    const int64_t first = chunks_.size() * lane / busy_lanes_, end = chunks_.size() * (lane + 1) / busy_lanes_;
    if (lane > 0) lanes_[static_cast<size_t>(lane)].start(call_, chunks_, first);
    lanes_[static_cast<size_t>(lane)].agreed(tuning, end - first);
  }
}

bool ShmChannel::carry_out(int64_t until_ns) {
  if (busy_lanes_ == 1) return lanes_[0].advance(until_ns);
  struct Job {
    std::vector<ShmLane>& lanes;
    const int64_t until_ns;
    std::atomic<bool> done{true};
  } job{lanes_, until_ns};
  // Where the pool is at work elsewhere one thread takes the lanes one by one, in the same order on every rank.
  run_blocks(
      busy_lanes_,
      [](void* context, int64_t lane) {
        Job& shared = *static_cast<Job*>(context);
        if (!shared.lanes[static_cast<size_t>(lane)].advance(shared.until_ns)) shared.done.store(false);
      },
      &job);
  return job.done.load();
}

uint64_t ShmChannel::steps() const {
  uint64_t sum = 0;
  for (const ShmLane& lane : lanes_) sum += lane.steps();
  return sum;
}

const ShmPart* ShmChannel::unfinished() const {
  if (phase_ != Phase::kCarry) return nullptr;
  for (int64_t lane = 0; lane < busy_lanes_; ++lane) {
    if (const ShmPart* part = lanes_[static_cast<size_t>(lane)].unfinished()) return part;
  }
  return nullptr;
}

// ---- bytes -----------------------------------------------------------------------------------------------------------------

void ShmChannel::begin_gather(std::string_view own) {
  check_process();
  own_ = own;
  gathered_.assign(static_cast<size_t>(shape().ranks), {});
  lengths_.clear();
  gather_begin_ = 0;
  shown_ = false;
  phase_ = Phase::kGather;
}

// The lengths go first, in a step of their own; then as many steps as the longest needs.
bool ShmChannel::advance_gather(int64_t until_ns) {
  ShmLane& lane = lanes_[0];
  const auto part = static_cast<uint64_t>(shape().slot_bytes);
  const auto ranks = static_cast<size_t>(shape().ranks);
  while (true) {
    const bool has_lengths = !lengths_.empty();
    const uint64_t begin = gather_begin_;
    if (has_lengths && begin >= *std::max_element(lengths_.begin(), lengths_.end())) return true;
    if (!shown_) {
      if (!lane.wait_free(until_ns)) return false;
      const uint64_t length = own_.size();
      if (!has_lengths) {
        std::memcpy(lane.own_slot(), &length, sizeof(length));
      } else if (begin < length) {
        std::memcpy(lane.own_slot(), own_.data() + begin, std::min(part, length - begin));
      }
      lane.show();
      shown_ = true;
    }
    if (!lane.wait_all_packed(until_ns)) return false;
    for (size_t peer = 0; peer < ranks; ++peer) {
      const char* const slot = lane.slot_of(static_cast<int64_t>(peer));
      if (!has_lengths) {
        uint64_t length = 0;
        std::memcpy(&length, slot, sizeof(length));
        GP_CHECK(kRuntime, length <= kMaxGatheredBytes, "ShmChannel: gather: found ", length, " bytes of rank ", peer,
                 ", wanted at most ", kMaxGatheredBytes);
        lengths_.push_back(length);
      } else if (begin < lengths_[peer]) {
        gathered_[peer].append(slot, std::min(part, lengths_[peer] - begin));
      }
    }
    lane.finish_step();
    shown_ = false;
    if (has_lengths) gather_begin_ += part;
  }
}

}  // namespace gradpack
