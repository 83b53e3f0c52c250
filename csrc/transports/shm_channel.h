// One rank's end of a segment: opens calls, finds out whether all ranks make the same one, and carries it out.
//
// Everything is done inside advance(), which comes back when its time is up, so that whoever drives it can look at signals, at
// deadlines and at who has died; there is no thread and no callback.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "transports/shm_chunks.h"
#include "transports/shm_reduce.h"
#include "transports/shm_segment.h"

namespace gradpack {

class ShmChannel {
 public:
  enum class Status { kWaiting, kDone, kDiffer };

  static constexpr size_t kHeaderBytes = 640;

  // `spin_ns`: how long to wait for another rank before giving up the processor.
  ShmChannel(std::shared_ptr<ShmSegment> segment, int64_t rank, int64_t spin_ns);

  // What follows goes on in advance(), until that returns another status than kWaiting.

  // All ranks show their headers, with the first chunk of what the call moves. Where the headers are equal it is carried out.
  // Where not (kDiffer), nothing was written, and what comes next is for all ranks to agree on.
  void begin(const ShmCall& call, std::string_view header);
  // The call as they have agreed on it then.
  void carry(const ShmCall& call);
  // A collect or a spread of a range of a stream, in scalars, that all ranks have agreed on: no headers are shown.
  void begin_range(const ShmCall& call, int64_t stream, int64_t begin, int64_t end);
  // Collects bytes of any length from all ranks.
  void begin_gather(std::string_view own);

  Status advance(int64_t until_ns);

  // Of the last begin(), in rank order.
  std::vector<std::string> headers() const;
  // Of the last begin_gather(), in rank order.
  const std::vector<std::string>& gathered() const { return gathered_; }
  // Steps that this rank has finished since the beginning.
  uint64_t steps() const;
  // The part of the call under way that its first unfinished lane waits to finish; null: there is none.
  const ShmPart* unfinished() const;
  // No other process can attach from now on.
  void hide() { segment_->hide(); }

  // What this rank's calls are to use where it is the leader.
  void set_tuning(const ShmTuning& tuning);
  const ShmShape& shape() const { return segment_->shape(); }

 private:
  enum class Phase { kIdle, kPackFirst, kCompare, kCarry, kGather };

  struct Mailbox {
    char header[kHeaderBytes];
    ShmTuning tuning;
  };
  static_assert(sizeof(Mailbox) <= ShmSegment::kMailboxBytes);

  Mailbox& mailbox(int64_t rank) const;
  bool headers_equal() const;
  ShmTuning leaders_tuning() const;
  void check_process() const;
  void cut_and_share();
  void share_chunks(const ShmTuning& tuning);
  bool carry_out(int64_t until_ns);
  bool advance_gather(int64_t until_ns);

  const std::shared_ptr<ShmSegment> segment_;
  const int64_t rank_;
  std::vector<ShmLane> lanes_;
  int64_t busy_lanes_ = 0;
  ShmTuning tuning_;
  ShmChunks chunks_;
  ShmCall call_;
  Phase phase_ = Phase::kIdle;
  int64_t openings_ = 0;

  std::string own_;
  std::vector<std::string> gathered_;
  std::vector<uint64_t> lengths_;  // empty until they are known
  uint64_t gather_begin_ = 0;      // where the part of this step begins
  bool shown_ = false;             // that part
};

}  // namespace gradpack
