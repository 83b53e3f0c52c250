#include "transports/peer_board.h"

#include <algorithm>
#include <chrono>

namespace gradpack {
namespace {

// More is as good as for ever, and a time point holds it.
constexpr double kMaxSeconds = 1e8;

}  // namespace

PeerBoard::PeerBoard(int rank, int size) : rank_(rank), seen_(static_cast<size_t>(size)) {}

Position PeerBoard::unpack(uint64_t packed) {
  return {static_cast<int64_t>(packed >> 25), (packed & kInside) != 0, static_cast<int64_t>(packed & kMaxStep)};
}

int64_t PeerBoard::finished() const {
  const Position now = unpack(position());
  return now.call - now.inside;
}

template <typename Ready>
void PeerBoard::wait(std::unique_lock<std::mutex>& lock, double seconds, const Ready& ready) {
  if (!(seconds > 0)) return;
  const std::chrono::duration<double> bound(std::min(seconds, kMaxSeconds));
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(bound);
  changed_.wait_until(lock, end, [&] { return closing_ || ready(); });
}

bool PeerBoard::wait_connected(double seconds) {
  const auto count = [&](bool Seen::* what) {
    return std::count_if(seen_.begin(), seen_.end(), [&](const Seen& s) { return s.*what; });
  };
  const auto others = static_cast<std::ptrdiff_t>(seen_.size()) - 1;
  std::unique_lock<std::mutex> lock(mutex_);
  wait(lock, seconds, [&] {
    // A rank that ended unconnected never will be.
    return count(&Seen::connected) == others ||
           std::any_of(seen_.begin(), seen_.end(), [](const Seen& seen) { return seen.ended && !seen.connected; });
  });
  return count(&Seen::connected) == others;
}

std::vector<int> PeerBoard::unreached() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int> found;
  for (int rank = 0; rank < static_cast<int>(seen_.size()); ++rank) {
    if (rank != rank_ && !seen_[static_cast<size_t>(rank)].connected) found.push_back(rank);
  }
  return found;
}

const News* PeerBoard::first_news(int64_t call) const {
  const News* first = nullptr;
  for (const News& news : news_) {
    if (news.kind == News::Kind::kGaveUp) return &news;
    if (!first && (news.kind != News::Kind::kLeft || news.finished < call)) first = &news;
  }
  return first;
}

std::optional<News> PeerBoard::verdict(int64_t call, double seconds) {
  if (!(seconds > 0) && !any_news_.load(std::memory_order_acquire)) return std::nullopt;
  std::unique_lock<std::mutex> lock(mutex_);
  const News* found = first_news(call);
  if (!found) {
    wait(lock, seconds, [&] { return first_news(call) != nullptr; });
    found = first_news(call);
  }
  return found ? std::optional<News>(*found) : std::nullopt;
}

uint64_t PeerBoard::want_positions() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ++wanted_;
}

std::vector<std::optional<Position>> PeerBoard::wait_positions(uint64_t id, double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  wait(lock, seconds, [&] {
    for (int rank = 0; rank < static_cast<int>(seen_.size()); ++rank) {
      const Seen& seen = seen_[static_cast<size_t>(rank)];
      if (rank != rank_ && !seen.ended && seen.answered < id) return false;
    }
    return true;
  });
  std::vector<std::optional<Position>> positions;
  for (int rank = 0; rank < static_cast<int>(seen_.size()); ++rank) {
    const Seen& seen = seen_[static_cast<size_t>(rank)];
    positions.emplace_back();
    if (rank == rank_) {
      positions.back() = unpack(position());
    } else if (seen.answered >= id) {
      positions.back() = unpack(seen.position);
    }
  }
  return positions;
}

void PeerBoard::give_up(const std::string& text) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (give_up_.empty()) give_up_ = text;
}

void PeerBoard::wait_told(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  wait(lock, seconds, [&] { return told_; });
}

void PeerBoard::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  closing_ = true;
  changed_.notify_all();
}

PeerBoard::Orders PeerBoard::orders() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {wanted_, give_up_, closing_};
}

void PeerBoard::set_connected(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  seen_[static_cast<size_t>(rank)].connected = true;
  changed_.notify_all();
}

void PeerBoard::set_position(int rank, uint64_t id, uint64_t position) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Seen& seen = seen_[static_cast<size_t>(rank)];
  seen.answered = id;
  seen.position = position;
  changed_.notify_all();
}

void PeerBoard::set_told() {
  const std::lock_guard<std::mutex> lock(mutex_);
  told_ = true;
  changed_.notify_all();
}

void PeerBoard::add(News news) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (news.kind != News::Kind::kGaveUp) seen_[static_cast<size_t>(news.rank)].ended = true;
  news_.push_back(std::move(news));
  any_news_.store(true, std::memory_order_release);
  changed_.notify_all();
}

}  // namespace gradpack
