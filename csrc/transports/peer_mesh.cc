#include "transports/peer_mesh.h"

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace gradpack {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLastWordsTime{200};
constexpr milliseconds kFarewellTime{200};
constexpr int kMaxBeatsUnanswered = 64;

std::string error_text(int error) { return std::generic_category().message(error); }

}  // namespace

PeerMesh::PeerMesh(PeerBoard& board, Descriptor listener, const std::vector<PeerCard>& cards, int rank, double host_timeout)
    : board_(board), rank_(rank), host_timeout_(host_timeout), listener_(std::move(listener)), peers_(cards.size()) {
  poll_ = Descriptor::from([] { return epoll_create1(EPOLL_CLOEXEC); });
  if (!poll_) throw_errno("epoll_create1");
  wake_ = Descriptor::from([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
  if (!wake_) throw_errno("eventfd");
  if (!watch(wake_.number(), EPOLLIN, tag(kWakeTag, 0)) || !watch(listener_.number(), EPOLLIN, tag(kListenTag, 0))) {
    throw_errno("epoll_ctl");
  }
  const PeerCard& own = cards[static_cast<size_t>(rank)];
  for (int other = 0; other < size(); ++other) {
    Peer& peer = at(other);
    peer.card = cards[static_cast<size_t>(other)];
    peer.other_host = !own.same_host(peer.card);
    for (const Address& address : peer.card.addresses) {
      if (!address.loopback || own.same_network(peer.card)) peer.addresses.push_back(address);
    }
    if (other != rank && own.same_processes(peer.card)) open_process_of(other);
  }
  // Python's signal handlers belong to its own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread_.native_handle(), "gradpack-peers");
}

PeerMesh::~PeerMesh() {
  wake();
  thread_.join();
}

void PeerMesh::wake() {
  // It fails only where the counter is full, and then the thread is awake.
  [[maybe_unused]] const int failed = eventfd_write(wake_.number(), 1);
}

// ---- The loop ------------------------------------------------------------------------------------------------------------

void PeerMesh::run() {
  for (int rank = 0; rank < rank_; ++rank) dial(rank);
  close_listener_if_all_came();
  while (true) {
    follow_orders();
    keep_time();
    flush();
    if (done()) break;
    std::array<epoll_event, 64> events;
    const int count = epoll_wait(poll_.number(), events.data(), static_cast<int>(events.size()), milliseconds_left());
    for (int i = 0; i < count; ++i) dispatch(events[static_cast<size_t>(i)].data.u64);
  }
  for (auto& [id, link] : links_) link.shut_down();
}

bool PeerMesh::done() const {
  return close_due_ != kNever && (Clock::now() >= close_due_ || std::none_of(links_.begin(), links_.end(), [](const auto& entry) {
                                    return entry.second.sending();
                                  }));
}

int PeerMesh::milliseconds_left() const {
  Clock::time_point next = std::min({listen_again_, next_beat_, close_due_});
  for (const Peer& peer : peers_) next = std::min({next, peer.retry, peer.verdict_due});
  for (const auto& [id, link] : links_) next = std::min(next, link.deadline);
  if (next == kNever) return -1;
  // Rounded up: rounded down, the last millisecond would be one of spinning.
  const auto left = std::chrono::ceil<milliseconds>(next - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1'000'000));
}

void PeerMesh::dispatch(uint64_t what) {
  switch (static_cast<Tag>(what & 3)) {
    case kWakeTag:
      eventfd_t count;
      eventfd_read(wake_.number(), &count);
      return;
    case kListenTag:
      return accept_all();
    case kProcessTag:
      return process_ended(static_cast<int>(what >> 2));
    case kLinkTag:
      return link_ready(what >> 2);
  }
}

void PeerMesh::follow_orders() {
  PeerBoard::Orders orders = board_.orders();
  wanted_ = orders.wanted;
  for (Peer& peer : peers_) ask(peer);
  if (give_up_.empty() && !orders.give_up.empty()) {
    give_up_ = std::move(orders.give_up);
    for (auto& [id, link] : links_) {
      if (link.trusted()) link.queue(Frame::kGiveUp, give_up_);
    }
  }
  if (!orders.closing || close_due_ != kNever) return;
  close_due_ = Clock::now() + kFarewellTime;
  unwatch(listener_);
  listen_again_ = kNever;
  for (Peer& peer : peers_) peer.retry = kNever;
  for (auto entry = links_.begin(); entry != links_.end();) {
    auto& [id, link] = *entry++;
    if (link.trusted()) {
      link.queue(Frame::kFarewell, bytes_of(board_.finished()));
    } else {
      forget_link(id);
    }
  }
}

void PeerMesh::keep_time() {
  const Clock::time_point now = Clock::now();
  if (listen_again_ <= now) resume_listening();
  for (auto entry = links_.begin(); entry != links_.end();) {
    const auto& [id, link] = *entry++;
    if (link.deadline <= now) drop(id);
  }
  for (int rank = 0; rank < size(); ++rank) {
    if (at(rank).retry <= now) dial(rank);
    if (at(rank).verdict_due <= now) lose_process(rank);
  }
  if (next_beat_ > now) return;
  next_beat_ = kNever;
  for (Peer& peer : peers_) {
    const auto link = links_.find(peer.link);
    if (!peer.other_host || link == links_.end() || link->second.state != Link::State::kCounted) continue;
    next_beat_ = now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(host_timeout_ / 6));
    // A stopped process reads nothing. Its window would fill, and a full window looks to TCP_USER_TIMEOUT like a dead host.
    if (link->second.sending() || peer.beats_unanswered >= kMaxBeatsUnanswered) continue;
    link->second.queue(Frame::kBeat);
    ++peer.beats_unanswered;
  }
}

void PeerMesh::flush() {
  bool all_sent = true;
  for (auto& [id, link] : links_) {
    if (link.state == Link::State::kConnecting) continue;
    if (link.sending()) link.flush();
    all_sent = all_sent && !link.sending();
    const uint32_t events = link.sending() ? EPOLLIN | EPOLLOUT : EPOLLIN;
    if (events != link.watched && watch(link.number(), events, tag(kLinkTag, id), true)) link.watched = events;
  }
  if (all_sent && !told_ && !give_up_.empty()) {
    told_ = true;
    board_.set_told();
  }
}

// ---- Processes -----------------------------------------------------------------------------------------------------------

void PeerMesh::open_process_of(int rank) {
  Peer& peer = at(rank);
  bool gone = false;
  peer.process = open_process(peer.card.pid, peer.card.started, &gone);
  peer.process_ended = gone;
  if (gone) peer.verdict_due = Clock::now();
  if (peer.process && !watch(peer.process.number(), EPOLLIN, tag(kProcessTag, static_cast<uint64_t>(rank)))) peer.process.reset();
}

void PeerMesh::process_ended(int rank) {
  Peer& peer = at(rank);
  unwatch(peer.process);
  if (peer.ended) return;
  peer.process_ended = true;
  // Its last words may be on the way, and only they say whether it left in good order.
  peer.verdict_due = Clock::now() + kLastWordsTime;
}

void PeerMesh::lose_process(int rank) {
  Peer& peer = at(rank);
  // The last words may have come since epoll was asked.
  const auto link = links_.find(peer.link);
  if (link != links_.end() && link->second.state == Link::State::kCounted) link_ready(peer.link);
  if (!peer.ended) end_peer(rank, News::Kind::kGone, ended_process_text(peer));
}

std::string PeerMesh::ended_process_text(const Peer& peer) {
  return "its process, " + std::to_string(peer.card.pid) + " on this host, has ended";
}

// ---- Connections ---------------------------------------------------------------------------------------------------------

uint64_t PeerMesh::add_link(Descriptor socket, Link::State state, int rank, Clock::time_point deadline) {
  const uint64_t id = ++last_link_;
  const uint32_t events = state == Link::State::kConnecting ? EPOLLOUT : EPOLLIN;
  if (!watch(socket.number(), events, tag(kLinkTag, id))) return 0;
  links_.emplace(id, Link(std::move(socket), state, rank, deadline)).first->second.watched = events;
  return id;
}

void PeerMesh::forget_link(uint64_t id) {
  const auto found = links_.find(id);
  if (found == links_.end()) return;
  // Before it is closed: epoll goes on with it where another process holds a copy.
  epoll_ctl(poll_.number(), EPOLL_CTL_DEL, found->second.number(), nullptr);
  if (found->second.trusted()) found->second.shut_down();
  links_.erase(found);
}

void PeerMesh::link_ready(uint64_t id) {
  const auto found = links_.find(id);
  if (found == links_.end()) return;  // it went with an event before this one
  Link& link = found->second;
  if (link.state == Link::State::kConnecting) {
    if (!finish_connecting(link)) drop(id);
    return;
  }
  if (link.state == Link::State::kCounted) at(link.rank).beats_unanswered = 0;
  const int ended = link.receive([&](const Received& received) { return handle(id, link, received); });
  if (ended != 0) link_ended(id, ended);
}

bool PeerMesh::handle(uint64_t id, Link& link, const Received& received) {
  switch (link.state) {
    case Link::State::kAccepted:
      return greet(id, link, received);
    case Link::State::kHelloSent:
      return confirm(id, link, received);
    case Link::State::kGreeted:
      return received.frame == Frame::kConfirm ? count(id, link) : drop(id);
    case Link::State::kCounted:
      return follow(link, received);
    case Link::State::kConnecting:
      break;
  }
  return drop(id);
}

bool PeerMesh::follow(Link& link, const Received& received) {
  Peer& peer = at(link.rank);
  if (const auto id = received.as<uint64_t>(); received.frame == Frame::kAsk && id) {
    link.queue(Frame::kAnswer, bytes_of(Answer{*id, board_.position()}));
  } else if (const auto answer = received.as<Answer>(); received.frame == Frame::kAnswer && answer) {
    peer.answered = answer->id;
    board_.set_position(link.rank, answer->id, answer->position);
    ask(peer);
  } else if (received.frame == Frame::kGiveUp) {
    board_.add({News::Kind::kGaveUp, link.rank, received.payload});
  } else if (const auto finished = received.as<int64_t>(); received.frame == Frame::kFarewell && finished) {
    end_peer(link.rank, News::Kind::kLeft, "it closed, having finished " + std::to_string(*finished) + " calls", *finished);
    return false;
  } else if (received.frame != Frame::kBeat) {
    end_peer(link.rank, News::Kind::kGone, "its connection carried what no gradpack sends");
    return false;
  }
  return true;
}

bool PeerMesh::drop(uint64_t id) {
  const auto found = links_.find(id);
  const int rank = found == links_.end() ? -1 : found->second.rank;
  forget_link(id);
  if (rank >= 0 && at(rank).link == id) {
    at(rank).link = 0;
    if (close_due_ == kNever) dial(rank);
  }
  return false;
}

void PeerMesh::link_ended(uint64_t id, int why) {
  const Link& link = links_.at(id);
  if (link.state != Link::State::kCounted) {
    drop(id);
  } else if (why == Link::kGarbage) {
    end_peer(link.rank, News::Kind::kGone, "its connection carried what no gradpack sends");
  } else if (at(link.rank).process_ended) {
    end_peer(link.rank, News::Kind::kGone, ended_process_text(at(link.rank)));
  } else if (why == Link::kEnd || why == ECONNRESET || why == EPIPE) {
    const std::string error = why == Link::kEnd ? "" : " (" + error_text(why) + ")";
    end_peer(link.rank, News::Kind::kGone,
             "its connection ended without a farewell" + error + ", as it does when a process ends");
  } else {
    end_peer(link.rank, News::Kind::kSilent, "its host, or the network to it, no longer answers (" + error_text(why) + ")");
  }
}

void PeerMesh::end_peer(int rank, News::Kind kind, const std::string& text, int64_t finished) {
  Peer& peer = at(rank);
  peer.ended = true;
  peer.retry = kNever;
  peer.verdict_due = kNever;
  unwatch(peer.process);
  forget_link(std::exchange(peer.link, 0));
  board_.add({kind, rank, text, finished});
  close_listener_if_all_came();
}

void PeerMesh::ask(Peer& peer) {
  const auto link = links_.find(peer.link);
  if (link == links_.end() || link->second.state != Link::State::kCounted) return;
  // One question at a time: a stopped process must not find more than its window holds.
  if (peer.asked != peer.answered || wanted_ == peer.asked) return;
  peer.asked = wanted_;
  link->second.queue(Frame::kAsk, bytes_of(wanted_));
}

// ---- epoll ---------------------------------------------------------------------------------------------------------------

bool PeerMesh::watch(int number, uint32_t events, uint64_t what, bool again) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = what;
  return epoll_ctl(poll_.number(), again ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, number, &event) == 0;
}

void PeerMesh::unwatch(Descriptor& descriptor) {
  if (!descriptor) return;
  epoll_ctl(poll_.number(), EPOLL_CTL_DEL, descriptor.number(), nullptr);
  descriptor.reset();
}

}  // namespace gradpack
