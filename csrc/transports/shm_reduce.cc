#include "transports/shm_reduce.h"

#include <cstring>
#include <tuple>

namespace gradpack {

ShmLane::ShmLane(const ShmSegment& segment, int64_t rank, int64_t lane, int64_t spin_ns)
    : segment_(segment),
      rank_(rank),
      lane_(lane),
      ranks_(segment.shape().ranks),
      slots_(static_cast<uint64_t>(segment.shape().slots)),
      spin_ns_(spin_ns),
      rows_(static_cast<size_t>(ranks_)) {
  for (const ShmProgress which : {ShmProgress::kPacked, ShmProgress::kReduced, ShmProgress::kDone}) {
    for (int64_t peer = 0; peer < ranks_; ++peer) seen(which).push_back({&segment.counter(peer, lane, which), 0});
  }
}

// ---- the steps of a call -----------------------------------------------------------------------------------------------------

void ShmLane::start(const ShmCall& call, const ShmChunks& chunks, int64_t first) {
  call_ = call;
  chunks_ = &chunks;
  first_ = first;
  num_chunks_ = packed_ = reduced_ = applied_ = 0;
}

bool ShmLane::pack_first(int64_t until_ns) {
  if (!wait_free(until_ns)) return false;
  pack((*chunks_)[first_], next_);
  show();
  packed_ = 1;
  return true;
}

bool ShmLane::wait_all_packed(int64_t until_ns) { return wait(ShmProgress::kPacked, next_ + 1, until_ns); }

void ShmLane::drop() {
  finish_step();
  packed_ = 0;
}

void ShmLane::agreed(const ShmTuning& tuning, int64_t num_chunks) {
  tuning_ = tuning;
  num_chunks_ = num_chunks;
  if (!is_broadcast() || num_chunks == 0) return;
  // The root reads no slots, and the others have nothing to show.
  const uint64_t end = next_ + static_cast<uint64_t>(num_chunks);
  if (is_root()) {
    publish(ShmProgress::kDone, end);
    applied_ = reduced_ = packed_;
  } else {
    publish(ShmProgress::kPacked, end);
    packed_ = num_chunks;
  }
}

bool ShmLane::advance(int64_t until_ns) {
  while (applied_ < num_chunks_) {
    // What is oldest comes first: its slots are in the caches still, and other ranks may wait for them.
    const uint64_t applying = next_ + static_cast<uint64_t>(applied_);
    if (applied_ < reduced_) {
      const ShmChunk chunk = (*chunks_)[first_ + applied_];
      if (!is_sharded(chunk) || have(ShmProgress::kReduced, applying + 1)) {
        apply(chunk, applying);
        publish(ShmProgress::kDone, applying + 1);
        ++applied_;
        continue;
      }
    }
    const uint64_t reducing = next_ + static_cast<uint64_t>(reduced_);
    if (reduced_ < packed_ && have(ShmProgress::kPacked, reducing + 1)) {
      const ShmChunk chunk = (*chunks_)[first_ + reduced_];
      if (is_sharded(chunk)) {
        reduce(chunk, reducing);
        publish(ShmProgress::kReduced, reducing + 1);
      }
      ++reduced_;
      continue;
    }
    const uint64_t packing = next_ + static_cast<uint64_t>(packed_);
    const uint64_t freed = packing < slots_ ? 0 : packing + 1 - slots_;
    if (packed_ < num_chunks_ && have(ShmProgress::kDone, freed)) {
      pack((*chunks_)[first_ + packed_], packing);
      publish(ShmProgress::kPacked, packing + 1);
      ++packed_;
      if (is_broadcast() && is_root()) reduced_ = applied_ = packed_;
      continue;
    }
    const bool there = applied_ < reduced_  ? wait(ShmProgress::kReduced, applying + 1, until_ns)
                       : reduced_ < packed_ ? wait(ShmProgress::kPacked, reducing + 1, until_ns)
                                            : wait(ShmProgress::kDone, freed, until_ns);
    if (!there) return false;
  }
  next_ += static_cast<uint64_t>(num_chunks_);
  num_chunks_ = packed_ = reduced_ = applied_ = 0;
  return true;
}

bool ShmLane::wait_free(int64_t until_ns) { return next_ < slots_ || wait(ShmProgress::kDone, next_ + 1 - slots_, until_ns); }

void ShmLane::show() { publish(ShmProgress::kPacked, next_ + 1); }

void ShmLane::finish_step() {
  publish(ShmProgress::kDone, next_ + 1);
  ++next_;
}

const ShmPart* ShmLane::unfinished() const {
  if (!chunks_ || first_ + applied_ >= chunks_->size() || (num_chunks_ > 0 && applied_ >= num_chunks_)) return nullptr;
  const ShmChunk chunk = (*chunks_)[first_ + applied_];
  return chunk.num_parts > 0 ? chunk.parts : nullptr;
}

// ---- what is done to a chunk -------------------------------------------------------------------------------------------------

bool ShmLane::is_sharded(const ShmChunk& chunk) const {
  return ranks_ > 2 && call_.kind == ShmCall::Kind::kAllReduce && chunk.bytes >= tuning_.sharded_bytes;
}

// Where other ranks are to read a sum it is rounded to the wire dtype, and which way a chunk goes must not change its bits.
bool ShmLane::rounds(const Stream& stream) const {
  return ranks_ > 2 && (stream.wire == DType::kFloat16 || stream.wire == DType::kBFloat16);
}

char* ShmLane::slot_of(int64_t rank, uint64_t step) const {
  return segment_.slot(rank, lane_, static_cast<int64_t>(step % slots_));
}

Range ShmLane::range(const ShmPart& part, int64_t begin, int64_t end) const {
  return {part.stream, call_.arrays, begin, end, Manner{Walk::kUsual, false}};
}

void ShmLane::pack(const ShmChunk& chunk, uint64_t step) {
  if (is_broadcast() && !is_root()) return;
  char* const slot = slot_of(rank_, step);
  for (const ShmPart& part : chunk) {
    if (call_.kind == ShmCall::Kind::kSpread) {
      std::memcpy(slot + part.offset, dense_of(part), static_cast<size_t>((part.end - part.begin) * itemsize(part.stream->wire)));
      cpu::unpack(range(part, part.begin, part.end), dense_of(part), Divide{}, call_.nonfinite);
      continue;
    }
    Range whole = range(part, part.begin, part.end);
    whole.manner.walk = Walk::kManyPlaces;
    cpu::pack(whole, slot + part.offset, nullptr);
  }
}

void ShmLane::reduce(const ShmChunk& chunk, uint64_t step) {
  for (const ShmPart& part : chunk) {
    const auto [begin, end] = part.shard(rank_, ranks_);
    if (begin == end) continue;
    const int64_t offset = part.offset + (begin - part.begin) * itemsize(part.stream->wire);
    for (int64_t peer = 0; peer < ranks_; ++peer) rows_[static_cast<size_t>(peer)] = slot_of(peer, step) + offset;
    cpu::reduce(range(part, begin, end), rows_.data(), static_cast<int>(ranks_), call_.divide, slot_of(rank_, step) + offset);
  }
}

void ShmLane::apply(const ShmChunk& chunk, uint64_t step) {
  if (call_.kind == ShmCall::Kind::kCollect && !is_root()) return;
  for (const ShmPart& part : chunk) {
    Range whole = range(part, part.begin, part.end);
    if (tuning_.past_caches != 0) whole.manner.walk = Walk::kPastCaches;
    if (is_broadcast()) {
      cpu::unpack(whole, slot_of(call_.root, step) + part.offset, Divide{}, call_.nonfinite);
      continue;
    }
    if (is_sharded(chunk)) {
      for (int64_t peer = 0; peer < ranks_; ++peer) {
        Range shard = whole;
        std::tie(shard.begin, shard.end) = part.shard(peer, ranks_);
        const int64_t offset = part.offset + (shard.begin - part.begin) * itemsize(part.stream->wire);
        cpu::unpack(shard, slot_of(peer, step) + offset, Divide{}, call_.nonfinite);
      }
      continue;
    }
    for (int64_t peer = 0; peer < ranks_; ++peer) rows_[static_cast<size_t>(peer)] = slot_of(peer, step) + part.offset;
    if (call_.kind == ShmCall::Kind::kCollect) {
      cpu::reduce(whole, rows_.data(), static_cast<int>(ranks_), call_.divide, dense_of(part));
    } else if (rounds(*part.stream)) {
      sums_.resize(static_cast<size_t>(segment_.shape().slot_bytes));
      cpu::reduce(whole, rows_.data(), static_cast<int>(ranks_), call_.divide, sums_.data());
      cpu::unpack(whole, sums_.data(), Divide{}, call_.nonfinite);
    } else {
      cpu::reduce_unpack(whole, rows_.data(), static_cast<int>(ranks_), call_.divide, call_.nonfinite);
    }
  }
}

// ---- counters ----------------------------------------------------------------------------------------------------------------

void ShmLane::publish(ShmProgress which, uint64_t value) { gradpack::publish(segment_.counter(rank_, lane_, which), value); }

bool ShmLane::have(ShmProgress which, uint64_t wanted) {
  for (Seen& other : seen(which)) {
    if (other.value >= wanted) continue;
    other.value = other.counter->value.load(std::memory_order_acquire);
    if (other.value < wanted) return false;
  }
  return true;
}

bool ShmLane::wait(ShmProgress which, uint64_t wanted, int64_t until_ns) {
  for (Seen& other : seen(which)) {
    if (other.value < wanted && !wait_for(*other.counter, wanted, spin_ns_, until_ns)) return false;
  }
  return have(which, wanted);
}

}  // namespace gradpack
