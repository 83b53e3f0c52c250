// Memory that calls work in: Buffer holds packs, Nonfinite what the kernels saw.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace gradpack {

// Pages of its own, zero at first, that nothing but the system takes back.
class Buffer {
 public:
  // Raises ValueError and MemoryError.
  explicit Buffer(int64_t nbytes);
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  char* data() const { return data_; }
  int64_t nbytes() const { return nbytes_; }

 private:
  static constexpr int64_t kHugePage = 2 << 20;

  int64_t nbytes_;
  char* data_;
  void* mapped_;
  size_t mapped_bytes_;
};

// One flag for each of a call's arrays, for backend.h's `nonfinite`.
class Nonfinite {
 public:
  // Raises ValueError.
  explicit Nonfinite(int64_t num_arrays);

  bool any() const { return std::find(flags_.begin(), flags_.end(), 1) != flags_.end(); }
  std::vector<int64_t> indices() const;
  uint8_t* flags() { return flags_.data(); }
  int64_t size() const { return static_cast<int64_t>(flags_.size()); }

 private:
  std::vector<uint8_t> flags_;
};

}  // namespace gradpack
