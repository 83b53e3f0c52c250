// A pool is never destroyed and its threads are never joined: at exit they sit in a wait on memory that stays valid, and the
// process ends under them. So no order of static destructors, and no Python thread still inside a call, can hang or crash it.
#include "kernels/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "common/check.h"

namespace gradpack {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kMaxDefaultThreads = 8;

struct Job {
  void (*run)(void* context, int64_t block);
  void* context;
  int64_t num_blocks;
  std::atomic<int64_t> next{0};

  void work() {
    for (int64_t block; (block = next.fetch_add(1, std::memory_order_relaxed)) < num_blocks;) run(context, block);
  }
};

class Pool {
 public:
  // False: another thread has the pool, nothing was done.
  bool try_run(Job& job, int num_helpers) {
    std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
    if (!owner) return false;
    while (num_threads_ < num_helpers && start_thread()) {
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      places_ = num_helpers;
    }
    for (int i = 0; i < std::min(num_helpers, num_threads_); ++i) wake_.notify_one();
    job.work();
    // All blocks are taken. Threads that have not woken by now find no job; only those inside one are waited for.
    std::unique_lock<std::mutex> lock(mutex_);
    job_ = nullptr;
    idle_.wait(lock, [&] { return num_working_ == 0; });
    return true;
  }

 private:
  bool start_thread() {
    // Python's signal handlers belong to its own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = true;
    try {
      std::thread([this] { serve(); }).detach();
      ++num_threads_;
    } catch (const std::system_error&) {
      started = false;  // the process is at its limit: work with the threads there are
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return started;
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return job_ != nullptr && places_ > 0; });
      Job* job = job_;
      --places_;
      ++num_working_;
      lock.unlock();
      job->work();
      lock.lock();
      if (--num_working_ == 0) idle_.notify_one();
    }
  }

  std::mutex owner_;  // held by the call that uses the pool; guards num_threads_
  int num_threads_ = 0;

  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::condition_variable idle_;
  Job* job_ = nullptr;
  int places_ = 0;  // threads that may still join the job
  int num_working_ = 0;
};

std::atomic<Pool*> current_pool{nullptr};

// The child has none of the threads, and perhaps a lock that one of them held.
const int kForkHandler = pthread_atfork(nullptr, nullptr, [] { current_pool.store(nullptr); });

Pool& pool() {
  Pool* existing = current_pool.load(std::memory_order_acquire);
  if (existing) return *existing;
  Pool* made = new Pool;
  if (current_pool.compare_exchange_strong(existing, made)) return *made;
  delete made;
  return *existing;
}

int default_threads() {
  cpu_set_t allowed;
  const bool known = sched_getaffinity(0, sizeof(allowed), &allowed) == 0;
  const int processors = known ? CPU_COUNT(&allowed) : static_cast<int>(std::thread::hardware_concurrency());
  return std::clamp(processors, 1, kMaxDefaultThreads);
}

std::atomic<int> chosen_threads{0};  // 0: not asked yet

}  // namespace

void set_pool_threads(int num_threads) {
  GP_CHECK(kValue, num_threads >= 1 && num_threads <= kMaxThreads, "set_num_threads: num_threads: found ", num_threads,
           ", wanted 1 to ", kMaxThreads);
  chosen_threads.store(num_threads);
}

int pool_threads() {
  const int chosen = chosen_threads.load(std::memory_order_relaxed);
  if (chosen != 0) return chosen;
  int unset = 0;
  chosen_threads.compare_exchange_strong(unset, default_threads());
  return chosen_threads.load();
}

void run_blocks(int64_t num_blocks, void (*run)(void* context, int64_t block), void* context) {
  Job job{run, context, num_blocks};
  const int helpers = static_cast<int>(std::min<int64_t>(pool_threads(), num_blocks)) - 1;
  if (helpers > 0 && pool().try_run(job, helpers)) return;
  job.work();
}

}  // namespace gradpack
