// PeerMesh as far as ranks meet: each attempt up to the point where it counts.
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "transports/peer_mesh.h"

namespace gradpack {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kConnectTime{1000};
constexpr milliseconds kStrangerTime{5000};
constexpr milliseconds kListenPause{200};
constexpr int kMaxStrangers = 64;

}  // namespace

void PeerMesh::dial(int rank) {
  Peer& peer = at(rank);
  peer.retry = kNever;
  while (peer.next_address < peer.addresses.size()) {
    Descriptor socket = start_connecting(peer.addresses[peer.next_address++], peer.card.port);
    if (!socket) continue;
    peer.link = add_link(std::move(socket), Link::State::kConnecting, rank, Clock::now() + kConnectTime);
    if (peer.link != 0) return;
  }
  if (peer.addresses.empty()) return;  // only its process can be watched
  peer.next_address = 0;
  peer.retry = Clock::now() + milliseconds(20 << std::min(peer.round++, 4));
}

void PeerMesh::accept_all() {
  while (listener_) {
    Descriptor socket =
        Descriptor::from([&] { return accept4(listener_.number(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); });
    if (!socket) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EAGAIN) return;
      // Out of descriptors, most likely: the connection stays where it is, and epoll would tell of it again and again.
      epoll_ctl(poll_.number(), EPOLL_CTL_DEL, listener_.number(), nullptr);
      listen_again_ = Clock::now() + kListenPause;
      return;
    }
    const auto stranger = [](const auto& entry) { return entry.second.state == Link::State::kAccepted; };
    if (std::count_if(links_.begin(), links_.end(), stranger) >= kMaxStrangers + size()) {
      forget_link(std::find_if(links_.begin(), links_.end(), stranger)->first);
    }
    add_link(std::move(socket), Link::State::kAccepted, -1, Clock::now() + kStrangerTime);
  }
}

void PeerMesh::close_listener_if_all_came() {
  for (int rank = rank_ + 1; rank < size(); ++rank) {
    if (at(rank).link == 0 && !at(rank).ended) return;
  }
  unwatch(listener_);
  listen_again_ = kNever;
}

void PeerMesh::resume_listening() {
  listen_again_ = watch(listener_.number(), EPOLLIN, tag(kListenTag, 0)) ? kNever : Clock::now() + kListenPause;
}

bool PeerMesh::finish_connecting(Link& link) {
  int error = 0;
  socklen_t length = sizeof(error);
  if (getsockopt(link.number(), SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0) return false;
  const Peer& peer = at(link.rank);
  set_connection_options(link.number(), peer.other_host ? host_timeout_ : 0);
  link.queue(Frame::kHello, bytes_of(Hello{kPeerProtocol, static_cast<uint32_t>(rank_), peer.card.token}));
  link.state = Link::State::kHelloSent;
  // A rank that is late to connect() answers late; one that answers to another address answers never.
  link.deadline = Clock::now() + kConnectTime * (1 << std::min(peer.round, 3));
  return true;
}

bool PeerMesh::greet(uint64_t id, Link& link, const Received& received) {
  const auto hello = received.as<Hello>();
  const Token& own = at(rank_).card.token;
  if (received.frame != Frame::kHello || !hello || hello->version != kPeerProtocol || hello->token != own) return drop(id);
  if (hello->rank <= static_cast<uint32_t>(rank_) || hello->rank >= peers_.size()) return drop(id);
  link.rank = static_cast<int>(hello->rank);
  const Peer& peer = at(link.rank);
  set_connection_options(link.number(), peer.other_host ? host_timeout_ : 0);
  link.queue(Frame::kHello, bytes_of(Hello{kPeerProtocol, static_cast<uint32_t>(rank_), peer.card.token}));
  if (!give_up_.empty()) link.queue(Frame::kGiveUp, give_up_);
  link.state = Link::State::kGreeted;
  // The other side may take this answer at any later time, and would take an end of the connection for that of this process.
  link.deadline = kNever;
  return true;
}

bool PeerMesh::confirm(uint64_t id, Link& link, const Received& received) {
  const auto hello = received.as<Hello>();
  const bool right = received.frame == Frame::kHello && hello && hello->version == kPeerProtocol &&
                     hello->token == at(rank_).card.token && hello->rank == static_cast<uint32_t>(link.rank);
  if (!right) return drop(id);
  link.queue(Frame::kConfirm);
  if (!give_up_.empty()) link.queue(Frame::kGiveUp, give_up_);
  return count(id, link);
}

bool PeerMesh::count(uint64_t id, Link& link) {
  Peer& peer = at(link.rank);
  if (peer.ended || (peer.link != 0 && peer.link != id)) return drop(id);
  link.state = Link::State::kCounted;
  link.deadline = kNever;
  peer.link = id;
  board_.set_connected(link.rank);
  ask(peer);
  if (peer.other_host) next_beat_ = std::min(next_beat_, Clock::now());
  close_listener_if_all_came();
  return true;
}

}  // namespace gradpack
