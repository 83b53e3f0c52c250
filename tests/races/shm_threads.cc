// Ranks as threads over one mapping of one segment, for ThreadSanitizer, which sees nothing across two mappings.
//
// Goes through calls of many kinds and sizes, with agreement and without, in every way that chunks can go, and checks each
// result. Ends with 0 if all were right; ThreadSanitizer turns that into its own code where it saw a race.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels/thread_pool.h"
#include "transports/shm_channel.h"

namespace gradpack {
namespace {

constexpr int64_t kCalls = 24;
constexpr int64_t kDeadlineSeconds = 120;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "shm_threads: %s\n", what.c_str());
  std::_Exit(1);
}

// The gradients of one rank in one call: float32 (which may travel as bfloat16) and int32, in several arrays each.
struct Gradients {
  std::vector<std::vector<float>> floats;
  std::vector<std::vector<int32_t>> integers;
  std::vector<Dim> dims;
  std::vector<ArrayView> arrays;
  std::vector<Stream> streams;

  // So small that bfloat16 holds every sum, and another one at every place that could be mistaken.
  static int64_t value(int64_t call, int64_t rank, int64_t index) { return (call * 3 + rank * 5 + index % 13) % 16; }

  Gradients(int64_t call, int64_t rank, const std::vector<int64_t>& counts, DType wire) {
    for (const int64_t count : counts) {
      floats.emplace_back(static_cast<size_t>(count));
      integers.emplace_back(static_cast<size_t>(count));
      for (int64_t index = 0; index < count; ++index) {
        floats.back()[static_cast<size_t>(index)] = static_cast<float>(value(call, rank, index));
        integers.back()[static_cast<size_t>(index)] = static_cast<int32_t>(value(call, rank, index));
      }
      dims.push_back({count, 1});
    }
    for (const DType dtype : {DType::kFloat32, DType::kInt32}) {
      Stream stream{dtype, dtype == DType::kFloat32 ? wire : dtype, {}, {0}};
      for (size_t place = 0; place < counts.size(); ++place) {
        void* const data = dtype == DType::kFloat32 ? static_cast<void*>(floats[place].data()) : integers[place].data();
        stream.gradients.push_back(static_cast<int64_t>(arrays.size()));
        stream.offsets.push_back(stream.offsets.back() + counts[place]);
        arrays.push_back({data, counts[place], dtype, counts[place] == 1 ? 0 : 1, &dims[place]});
      }
      streams.push_back(std::move(stream));
    }
  }

  void check(int64_t call, int64_t ranks, int64_t root) const {
    for (size_t place = 0; place < floats.size(); ++place) {
      for (int64_t index = 0; index < static_cast<int64_t>(floats[place].size()); ++index) {
        int64_t wanted = root >= 0 ? value(call, root, index) : 0;
        for (int64_t rank = 0; root < 0 && rank < ranks; ++rank) wanted += value(call, rank, index);
        const auto at = static_cast<size_t>(index);
        if (floats[place][at] != static_cast<float>(wanted) || integers[place][at] != wanted) {
          fail("call " + std::to_string(call) + ": array " + std::to_string(place) + "[" + std::to_string(index) + "]: found " +
               std::to_string(floats[place][at]) + " and " + std::to_string(integers[place][at]) + ", wanted " +
               std::to_string(wanted));
        }
      }
    }
  }
};

// As whoever drives a channel does: in short turns.
ShmChannel::Status drive(ShmChannel& channel) {
  const int64_t deadline = now_ns() + kDeadlineSeconds * 1000000000;
  while (true) {
    const ShmChannel::Status status = channel.advance(now_ns() + 2000000);
    if (status != ShmChannel::Status::kWaiting) return status;
    if (now_ns() > deadline) fail("no end within " + std::to_string(kDeadlineSeconds) + " s");
  }
}

// A range of one stream: to the leader's memory and back to all.
void collect_and_spread(ShmChannel& channel, int64_t call, int64_t rank, int64_t ranks, const std::vector<int64_t>& counts) {
  Gradients gradients(call, rank, counts, DType::kFloat32);
  const int64_t begin = 0, end = gradients.streams[0].numel();
  std::vector<float> dense(static_cast<size_t>(rank == 0 ? end : 0));
  ShmCall moved;
  moved.streams = &gradients.streams;
  moved.arrays = gradients.arrays.data();
  moved.root = 0;
  moved.dense = reinterpret_cast<char*>(dense.data());
  for (const ShmCall::Kind kind : {ShmCall::Kind::kCollect, ShmCall::Kind::kSpread}) {
    moved.kind = kind;
    channel.begin_range(moved, 0, begin, end);
    drive(channel);
  }
  // The integers took no part.
  for (size_t place = 0; place < gradients.integers.size(); ++place) {
    for (int64_t index = 0; index < static_cast<int64_t>(gradients.integers[place].size()); ++index) {
      int64_t sum = 0;
      for (int64_t peer = 0; peer < ranks; ++peer) sum += Gradients::value(call, peer, index);
      gradients.integers[place][static_cast<size_t>(index)] = static_cast<int32_t>(sum);
    }
  }
  gradients.check(call, ranks, -1);
}

void run_rank(ShmChannel& channel, int64_t rank, int64_t ranks) {
  const std::vector<std::vector<int64_t>> sizes = {{1}, {17, 1, 3}, {5000, 20000, 1}, {60000, 7}};
  for (int64_t call = 0; call < kCalls; ++call) {
    const auto& counts = sizes[static_cast<size_t>(call) % sizes.size()];
    const int64_t root = call % 5 == 4 ? call % ranks : -1;
    const DType wire = call % 3 == 2 ? DType::kBFloat16 : DType::kFloat32;
    Gradients gradients(call, rank, counts, wire);
    std::vector<uint8_t> nonfinite(gradients.arrays.size());
    ShmCall moved;
    moved.streams = &gradients.streams;
    moved.arrays = gradients.arrays.data();
    moved.root = root;
    if (root >= 0) moved.kind = ShmCall::Kind::kBroadcast;
    moved.nonfinite = root >= 0 ? nullptr : nonfinite.data();

    const bool differs = call % 7 == 6;
    channel.set_tuning({call % 2 ? 4096 : 16384, call % 4 < 2 ? 0 : int64_t{1} << 40, call % 3 == 0});
    channel.begin(moved, std::string(ShmChannel::kHeaderBytes, differs ? static_cast<char>(rank) : 'h'));
    if (drive(channel) == ShmChannel::Status::kDiffer) {
      if (!differs && ranks > 1) fail("equal headers were found to differ");
      if (channel.headers()[static_cast<size_t>(ranks - 1)][0] != static_cast<char>(ranks - 1)) fail("a wrong header");
      channel.begin_gather(std::string(static_cast<size_t>(rank * 9000), 'g'));
      drive(channel);
      for (int64_t peer = 0; peer < ranks; ++peer) {
        if (channel.gathered()[static_cast<size_t>(peer)].size() != static_cast<size_t>(peer * 9000))
          fail("wrong bytes gathered");
      }
      channel.carry(moved);
      drive(channel);
    } else if (differs && ranks > 1) {
      fail("headers that differ were found equal");
    }
    gradients.check(call, ranks, root);
    collect_and_spread(channel, call, rank, ranks, counts);
  }
}

void run(int64_t ranks, int64_t lanes, int64_t slots, int64_t spin_ns) {
  const std::shared_ptr<ShmSegment> segment = ShmSegment::create({ranks, lanes, slots, 16384}, "");
  std::vector<std::unique_ptr<ShmChannel>> channels;
  for (int64_t rank = 0; rank < ranks; ++rank) channels.push_back(std::make_unique<ShmChannel>(segment, rank, spin_ns));
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] { run_rank(*channels[static_cast<size_t>(rank)], rank, ranks); });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace gradpack

int main() {
  gradpack::set_pool_threads(3);
  int64_t runs = 0;
  for (const int64_t ranks : {1, 2, 3, 4}) {
    for (const int64_t lanes : {1, 3}) {
      for (const int64_t slots : {1, 2, 4}) {
        gradpack::run(ranks, lanes, slots, runs % 2 ? 0 : 50000);
        ++runs;
      }
    }
  }
  std::printf("%d passed, runs of %d calls each\n", static_cast<int>(runs), static_cast<int>(gradpack::kCalls));
  return 0;
}
