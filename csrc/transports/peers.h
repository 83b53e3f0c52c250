// Who of a group of processes is alive, what those that gave up said, and where each is in the sequence of calls.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transports/peer_board.h"

namespace gradpack {

// A rank that is stopped is not gone: its system still acknowledges what it is sent. A process that ends closes its connections
// and makes its handle (pidfd) readable, and a host that is lost acknowledges nothing.
//
// Methods may be called from any thread, except that enter(), step() and leave() are for one thread at a time. In a forked child
// every method raises and touches nothing, except close() and the destructor, which do nothing.
class Peers {
 public:
  // Opens the listening socket and draws the token. `interface` names the one whose addresses others are to try first; of a list
  // with commas, the first; "" for none. `host` stands for the boot id of this host unless it is empty: ranks with different ones
  // treat each other as being on different hosts. Throws std::system_error.
  Peers(int64_t rank, int64_t size, double host_timeout, std::string_view interface, std::string_view host);
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;
  ~Peers();

  // What the other ranks need to reach this one, 4096 bytes at most.
  const std::string& card() const;
  // Starts the thread. Throws std::system_error.
  void connect(const std::vector<std::string>& cards);
  // False early where a rank has ended before it was connected.
  bool wait_connected(double seconds);
  std::vector<int> unreached();

  void enter(int64_t call);
  void step(int64_t step);
  void leave();

  std::optional<News> verdict(int64_t call, double seconds);
  std::vector<std::optional<Position>> positions(double seconds);
  // Only the first counts.
  void give_up(std::string_view kind, std::string_view text);
  void close();

 private:
  struct State;

  State& state() const;

  State* state_;  // abandoned in a forked child
};

}  // namespace gradpack
