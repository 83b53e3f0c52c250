// What a rank's threads and the thread of its Peers tell each other. Everything here may be called from any thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace gradpack {

struct Position {
  int64_t call;
  bool inside;
  int64_t step;
};

struct News {
  enum class Kind { kGone, kSilent, kGaveUp, kLeft };

  Kind kind;
  int rank;
  std::string text;
  int64_t finished = 0;  // of kLeft: the calls that the rank has done its part of
};

class PeerBoard {
 public:
  // One word, so that the three are read as they were at one moment: 39 bits of call, 1 of inside, 24 of step.
  static constexpr int64_t kMaxCall = (int64_t{1} << 39) - 1;
  static constexpr int64_t kMaxStep = (int64_t{1} << 24) - 1;
  static Position unpack(uint64_t packed);

  PeerBoard(int rank, int size);

  // Where this rank is. Without a lock: a rank says it several times in each call.
  void enter(int64_t call) { position_.store(static_cast<uint64_t>(call) << 25 | kInside, std::memory_order_relaxed); }
  void step(int64_t step) {
    position_.store((position() & ~uint64_t{kMaxStep}) | static_cast<uint64_t>(step), std::memory_order_relaxed);
  }
  void leave() { position_.store(position() & ~kInside, std::memory_order_relaxed); }
  uint64_t position() const { return position_.load(std::memory_order_relaxed); }
  int64_t finished() const;

  // For the rank. What waits returns early once close() was called.
  bool wait_connected(double seconds);
  std::vector<int> unreached();
  std::optional<News> verdict(int64_t call, double seconds);
  uint64_t want_positions();
  std::vector<std::optional<Position>> wait_positions(uint64_t id, double seconds);
  void give_up(const std::string& text);
  void wait_told(double seconds);
  void close();

  // For the thread.
  struct Orders {
    uint64_t wanted;      // the id of the last question for positions
    std::string give_up;  // empty: none yet
    bool closing;
  };
  Orders orders();
  void set_connected(int rank);
  void set_position(int rank, uint64_t id, uint64_t position);
  void set_told();
  // All but kGaveUp are the last that is heard of the rank.
  void add(News news);

 private:
  static constexpr uint64_t kInside = uint64_t{1} << 24;

  struct Seen {
    bool connected = false;
    bool ended = false;
    uint64_t answered = 0;
    uint64_t position = 0;
  };

  template <typename Ready>
  void wait(std::unique_lock<std::mutex>& lock, double seconds, const Ready& ready);
  const News* first_news(int64_t call) const;

  const int rank_;
  std::atomic<uint64_t> position_{0};
  std::atomic<bool> any_news_{false};

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::vector<Seen> seen_;
  std::vector<News> news_;  // in the order in which it came
  uint64_t wanted_ = 0;
  std::string give_up_;
  bool told_ = false;
  bool closing_ = false;
};

}  // namespace gradpack
