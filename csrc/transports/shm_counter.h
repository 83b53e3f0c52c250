// Counters in shared memory: each has one rank that moves it on, and every rank may wait for it.
#pragma once

#include <atomic>
#include <cstdint>

namespace gradpack {

// CLOCK_MONOTONIC.
int64_t now_ns();

// On lines of its own: neighbours are written by other ranks, and processors fetch lines in pairs.
struct alignas(128) ShmCounter {
  std::atomic<uint64_t> value;
  std::atomic<uint32_t> waiters;  // more than there are where one died in its wait: that costs a system call, no more
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// Everything that was written before becomes visible to whoever waits for `value`. Counters only grow.
void publish(ShmCounter& counter, uint64_t value);

// Waits until the counter is at `wanted` or beyond, at first without giving up the processor. False: now_ns() came to
// `until_ns` first.
bool wait_for(ShmCounter& counter, uint64_t wanted, int64_t spin_ns, int64_t until_ns);

}  // namespace gradpack
