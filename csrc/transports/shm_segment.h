// The memory that the ranks of one host share: who made it, who may find it, and what lies where.
//
// It holds an identity, then for each rank the counters of its lanes, two mailboxes, and for each lane a ring of slots. A *lane*
// is one thread's way through the segment. Nothing but counters is ever read as more than data, and those are only compared.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "transports/peer_socket.h"
#include "transports/shm_counter.h"

namespace gradpack {

// The same on all ranks.
struct ShmShape {
  int64_t ranks;
  int64_t lanes;
  int64_t slots;       // of each ring
  int64_t slot_bytes;  // a multiple of the page size

  // Raises ValueError.
  void check() const;
  int64_t bytes() const;
};

// What a rank publishes of a lane, counted in steps: a step is one chunk's way through one slot.
enum class ShmProgress { kPacked, kReduced, kDone };

class ShmSegment {
 public:
  static constexpr int64_t kNonceBytes = 16;
  static constexpr int64_t kMailboxBytes = 768;

  // A new segment that other processes find by location() and nonce(): in memory without a name, or in a new file of that path.
  // Throws std::system_error where the system does not grant one, or not all of its memory.
  static std::unique_ptr<ShmSegment> create(const ShmShape& shape, const std::string& path);
  // The one that another process made. Throws std::system_error where it cannot be opened, ValueError where it is another one.
  static std::unique_ptr<ShmSegment> attach(const ShmShape& shape, const std::string& location, const std::string& nonce);
  ShmSegment(const ShmSegment&) = delete;
  ShmSegment& operator=(const ShmSegment&) = delete;
  ~ShmSegment();

  // Nobody else can attach from now on, and nothing of it is left when the last process that did has ended.
  void hide();

  const ShmShape& shape() const { return shape_; }
  const std::string& location() const { return location_; }
  const std::string& nonce() const { return nonce_; }
  // In a forked child there is no memory behind the addresses.
  bool is_mine() const { return forks_ == fork_count(); }

  ShmCounter& counter(int64_t rank, int64_t lane, ShmProgress which) const;
  char* mailbox(int64_t rank, int64_t parity) const;
  char* slot(int64_t rank, int64_t lane, int64_t index) const;

 private:
  ShmSegment(const ShmShape& shape, Descriptor descriptor, std::string location, std::string nonce);

  const ShmShape shape_;
  Descriptor descriptor_;
  std::string location_;
  std::string nonce_;
  bool owns_name_ = false;
  const unsigned forks_ = fork_count();
  char* data_ = nullptr;
};

}  // namespace gradpack
