#include "transports/shm_counter.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace gradpack {
namespace {

// A look at the clock costs as much as so many looks at a counter.
constexpr int kLooksPerClock = 16;

// Both a rank that publishes and one that waits write one word and read the other's, so neither may overtake itself.
#ifdef GRADPACK_PLANTED_RACE  // shows that the tests with ThreadSanitizer would find the order missing
constexpr std::memory_order kPublish = std::memory_order_relaxed;
#else
constexpr std::memory_order kPublish = std::memory_order_seq_cst;
#endif

void relax() {
#if defined(__SSE__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// The word of a counter that the kernel compares: the low one.
const uint32_t* word(const ShmCounter& counter) {
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the low word of a counter is taken to be its first"
#endif
  return reinterpret_cast<const uint32_t*>(&counter.value);
}

}  // namespace

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{1000000000} * now.tv_sec + now.tv_nsec;
}

void publish(ShmCounter& counter, uint64_t value) {
  counter.value.store(value, kPublish);
  if (counter.waiters.load(std::memory_order_seq_cst) != 0) {
    syscall(SYS_futex, word(counter), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

bool wait_for(ShmCounter& counter, uint64_t wanted, int64_t spin_ns, int64_t until_ns) {
  if (counter.value.load(std::memory_order_acquire) >= wanted) return true;
  const int64_t spin_until = std::min(until_ns, now_ns() + spin_ns);
  do {
    for (int look = 0; look < kLooksPerClock; ++look) {
      relax();
      if (counter.value.load(std::memory_order_acquire) >= wanted) return true;
    }
  } while (now_ns() < spin_until);

  counter.waiters.fetch_add(1, std::memory_order_seq_cst);
  bool there = false;
  while (true) {
    const uint64_t value = counter.value.load(std::memory_order_seq_cst);
    there = value >= wanted;
    const int64_t left = until_ns - now_ns();
    if (there || left <= 0) break;
    const timespec limit{static_cast<time_t>(left / 1000000000), static_cast<long>(left % 1000000000)};
    syscall(SYS_futex, word(counter), FUTEX_WAIT, static_cast<uint32_t>(value), &limit, nullptr, 0);
  }
  counter.waiters.fetch_sub(1, std::memory_order_relaxed);
  return there;
}

}  // namespace gradpack
