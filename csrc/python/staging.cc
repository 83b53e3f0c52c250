#include "python/staging.h"

#include <pybind11/pybind11.h>
#include <sys/mman.h>
#include <unistd.h>

#include <limits>

#include "common/check.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define GP_POISON(address, nbytes) __asan_poison_memory_region(address, static_cast<size_t>(nbytes))
#define GP_UNPOISON(address, nbytes) __asan_unpoison_memory_region(address, static_cast<size_t>(nbytes))
#else
#define GP_POISON(address, nbytes) ((void)0)
#define GP_UNPOISON(address, nbytes) ((void)0)
#endif

namespace py = pybind11;

namespace gradpack {

Buffer::Buffer(int64_t nbytes) : nbytes_(nbytes) {
  GP_CHECK(kValue, nbytes >= 0, "Buffer: nbytes: found ", nbytes, ", wanted 0 or more");
  const int64_t alignment = nbytes >= kHugePage ? kHugePage : sysconf(_SC_PAGESIZE);
  GP_CHECK(kValue, nbytes <= std::numeric_limits<int64_t>::max() - 2 * alignment, "Buffer: nbytes: found ", nbytes,
           ", wanted what fits into the address space");
  mapped_bytes_ = static_cast<size_t>(std::max<int64_t>(nbytes, 1) + alignment);
  mapped_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped_ == MAP_FAILED) {
    PyErr_Format(PyExc_MemoryError, "Buffer: nbytes: no memory for %lld bytes", static_cast<long long>(nbytes));
    throw py::error_already_set();
  }
  const uintptr_t address = reinterpret_cast<uintptr_t>(mapped_);
  data_ = reinterpret_cast<char*>((address + alignment - 1) / alignment * alignment);
#if defined(MADV_HUGEPAGE)
  // Advice only: without huge pages a buffer of 16 MiB is 4,096 page faults and as many TLB entries.
  if (alignment == kHugePage) madvise(data_, static_cast<size_t>(nbytes / kHugePage * kHugePage), MADV_HUGEPAGE);
#endif
  // What mmap gave beside the buffer is memory that only a bug touches; AddressSanitizer cannot know by itself.
  GP_POISON(mapped_, data_ - static_cast<char*>(mapped_));
  GP_POISON(data_ + nbytes, static_cast<char*>(mapped_) + mapped_bytes_ - (data_ + nbytes));
}

Buffer::~Buffer() {
  GP_UNPOISON(mapped_, mapped_bytes_);
  munmap(mapped_, mapped_bytes_);
}

Nonfinite::Nonfinite(int64_t num_arrays) {
  GP_CHECK(kValue, num_arrays >= 0, "Nonfinite: num_arrays: found ", num_arrays, ", wanted 0 or more");
  flags_.resize(static_cast<size_t>(num_arrays));
}

std::vector<int64_t> Nonfinite::indices() const {
  std::vector<int64_t> found;
  for (size_t i = 0; i < flags_.size(); ++i) {
    if (flags_[i]) found.push_back(static_cast<int64_t>(i));
  }
  return found;
}

}  // namespace gradpack
