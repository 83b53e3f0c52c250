// The thread of a Peers: one connection to every other rank, and a handle of every process on this host.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "transports/peer_board.h"
#include "transports/peer_card.h"
#include "transports/peer_link.h"
#include "transports/peer_socket.h"

namespace gradpack {

// Rank i connects to all lower ranks, and keeps trying. The side that connected says which of its attempts counts (kConfirm):
// attempts that it gave up lie in the other's listening socket, complete up to the end of the connection, for as long as that
// one has not begun to accept.
class PeerMesh {
 public:
  // Starts the thread. Throws std::system_error.
  PeerMesh(PeerBoard& board, Descriptor listener, const std::vector<PeerCard>& cards, int rank, double host_timeout);
  PeerMesh(const PeerMesh&) = delete;
  PeerMesh& operator=(const PeerMesh&) = delete;
  // Only after board.close().
  ~PeerMesh();

  // The board has new orders.
  void wake();

 private:
  struct Peer {
    PeerCard card;
    std::vector<Address> addresses;  // those of the card that this rank connects to
    bool other_host = false;
    Descriptor process;
    bool process_ended = false;
    bool ended = false;  // nothing more is heard of it
    uint64_t link = 0;   // the one that counts or, of a lower rank, the attempt under way; 0: none
    size_t next_address = 0;
    int round = 0;  // how often all addresses failed
    Clock::time_point retry = kNever;
    Clock::time_point verdict_due = kNever;  // when a process that ended has had time for last words
    uint64_t asked = 0;
    uint64_t answered = 0;
    int beats_unanswered = 0;
  };
  // What epoll gives back: one of these, and above the two bits the rank or the id of the link.
  enum Tag : uint64_t { kWakeTag, kListenTag, kProcessTag, kLinkTag };

  void run();
  bool done() const;
  int milliseconds_left() const;

  void dispatch(uint64_t what);
  void follow_orders();
  void keep_time();
  void flush();

  void open_process_of(int rank);
  void process_ended(int rank);
  void lose_process(int rank);
  static std::string ended_process_text(const Peer& peer);
  void dial(int rank);
  void accept_all();
  void resume_listening();
  void close_listener_if_all_came();

  void link_ready(uint64_t id);
  bool finish_connecting(Link& link);
  // These return false if the link is gone.
  bool handle(uint64_t id, Link& link, const Received& received);
  bool greet(uint64_t id, Link& link, const Received& received);
  bool confirm(uint64_t id, Link& link, const Received& received);
  bool count(uint64_t id, Link& link);
  bool follow(Link& link, const Received& received);
  bool drop(uint64_t id);

  uint64_t add_link(Descriptor socket, Link::State state, int rank, Clock::time_point deadline);
  void forget_link(uint64_t id);
  void link_ended(uint64_t id, int why);
  void end_peer(int rank, News::Kind kind, const std::string& text, int64_t finished = 0);
  void ask(Peer& peer);

  static constexpr uint64_t tag(Tag kind, uint64_t which) { return which << 2 | kind; }
  bool watch(int number, uint32_t events, uint64_t what, bool again = false);
  void unwatch(Descriptor& descriptor);
  Peer& at(int rank) { return peers_[static_cast<size_t>(rank)]; }
  int size() const { return static_cast<int>(peers_.size()); }

  PeerBoard& board_;
  const int rank_;
  const double host_timeout_;
  Descriptor poll_;
  Descriptor wake_;
  Descriptor listener_;
  std::vector<Peer> peers_;
  std::map<uint64_t, Link> links_;
  uint64_t last_link_ = 0;
  Clock::time_point listen_again_ = kNever;
  Clock::time_point next_beat_ = kNever;
  Clock::time_point close_due_ = kNever;  // kNever: not closing
  uint64_t wanted_ = 0;
  std::string give_up_;
  bool told_ = false;
  std::thread thread_;
};

}  // namespace gradpack
