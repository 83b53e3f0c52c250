// The way of chunks through one lane: pack, sum in rank order, unpack, with nothing between the ranks but counters.
//
// *Symmetric*: every rank packs a chunk into its own slot; once all have, each sums the slots of all ranks and writes straight
// into its gradients. *Sharded*: once all have packed, each rank sums its share of the chunk into its own slot, and once all have
// done that, each unpacks everyone's shares. The same bits come of both.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/backend.h"
#include "transports/shm_chunks.h"
#include "transports/shm_segment.h"

namespace gradpack {

// A call, as all ranks have agreed on it. What it points to is the caller's.
struct ShmCall {
  enum class Kind {
    kAllReduce,
    kBroadcast,  // of the root's gradients
    kCollect,    // sums, into the root's `dense`, which takes the place of its gradients
    kSpread,     // the root's `dense` to the gradients of all, the root's too
  };
  Kind kind = Kind::kAllReduce;
  const std::vector<Stream>* streams = nullptr;  // null: moves no arrays
  const ArrayView* arrays = nullptr;
  Divide divide;
  int64_t root = -1;
  uint8_t* nonfinite = nullptr;
  char* dense = nullptr;    // of the root: a range of one stream, in its wire dtype
  int64_t dense_begin = 0;  // its first scalar
};

// What the leader (rank 0) chooses for a call. No choice changes a bit of the result.
struct ShmTuning {
  int64_t chunk_bytes;
  int64_t sharded_bytes;  // chunks of this size and more go the sharded way where there are more than two ranks
  int64_t past_caches;    // 1: gradients are written with streaming stores
};

class ShmLane {
 public:
  ShmLane(const ShmSegment& segment, int64_t rank, int64_t lane, int64_t spin_ns);

  // Begins a call at chunk number `first` of `chunks`. Nothing is known of the other ranks' yet.
  void start(const ShmCall& call, const ShmChunks& chunks, int64_t first);
  // The first step by itself: packs the first chunk; waits until all ranks have. Either returns false where time was up.
  bool pack_first(int64_t until_ns);
  bool wait_all_packed(int64_t until_ns);
  // The ranks do not agree: the first chunk is not used, and the step is over.
  void drop();
  // They do, and the lane's share of the call is `num_chunks` chunks.
  void agreed(const ShmTuning& tuning, int64_t num_chunks);
  // Does as much of it as is possible before now_ns() comes to `until_ns`. True once all is done.
  bool advance(int64_t until_ns);

  // One step in which each rank shows all others the bytes that it has written to own_slot() after wait_free().
  bool wait_free(int64_t until_ns);
  char* own_slot() const { return slot_of(rank_, next_); }
  const char* slot_of(int64_t rank) const { return slot_of(rank, next_); }
  void show();
  void finish_step();

  // The first part of what this rank has not finished of a call; null: it has finished all.
  const ShmPart* unfinished() const;

  // Steps that this rank has finished in the lane since it was made.
  uint64_t steps() const { return next_ + static_cast<uint64_t>(applied_); }

 private:
  // Another rank's counter, and how far it was seen.
  struct Seen {
    ShmCounter* counter;
    uint64_t value;
  };

  bool is_broadcast() const { return call_.kind == ShmCall::Kind::kBroadcast || call_.kind == ShmCall::Kind::kSpread; }
  bool is_root() const { return rank_ == call_.root; }
  char* dense_of(const ShmPart& part) const {
    return call_.dense + (part.begin - call_.dense_begin) * itemsize(part.stream->wire);
  }
  bool is_sharded(const ShmChunk& chunk) const;
  bool rounds(const Stream& stream) const;
  char* slot_of(int64_t rank, uint64_t step) const;
  Range range(const ShmPart& part, int64_t begin, int64_t end) const;

  void pack(const ShmChunk& chunk, uint64_t step);
  void reduce(const ShmChunk& chunk, uint64_t step);
  void apply(const ShmChunk& chunk, uint64_t step);

  void publish(ShmProgress which, uint64_t value);
  bool have(ShmProgress which, uint64_t wanted);
  bool wait(ShmProgress which, uint64_t wanted, int64_t until_ns);
  std::vector<Seen>& seen(ShmProgress which) { return seen_[static_cast<size_t>(which)]; }

  const ShmSegment& segment_;
  const int64_t rank_;
  const int64_t lane_;
  const int64_t ranks_;
  const uint64_t slots_;
  const int64_t spin_ns_;
  std::vector<Seen> seen_[3];
  std::vector<const void*> rows_;
  std::vector<char> sums_;  // where sums are rounded before they are unpacked

  ShmCall call_;
  ShmTuning tuning_{};
  const ShmChunks* chunks_ = nullptr;
  int64_t first_ = 0;
  int64_t num_chunks_ = 0;
  uint64_t next_ = 0;  // the step of the first chunk; the lane's own between calls
  int64_t packed_ = 0, reduced_ = 0, applied_ = 0;
};

}  // namespace gradpack
