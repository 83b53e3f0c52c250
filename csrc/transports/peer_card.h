// What ranks tell one another, by any means they have, so that each can reach the others.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "transports/peer_socket.h"

namespace gradpack {

using Token = std::array<uint8_t, 16>;

inline constexpr uint32_t kPeerProtocol = 1;

struct PeerCard {
  std::array<char, 36> host{};     // the boot id; zeros: unknown, so equal to none
  uint64_t network_namespace = 0;  // inodes; 0: unknown, so equal to none
  uint64_t pid_namespace = 0;
  int32_t pid = 0;
  uint64_t started = 0;
  uint16_t port = 0;
  Token token{};
  std::vector<Address> addresses;  // in the order in which to try them

  // Of this process, with a new token. `interface` as in Peers; `host` stands in for the boot id unless it is empty.
  // Throws std::system_error.
  static PeerCard of_this_process(const Listener& listener, std::string_view interface, std::string_view host);

  std::string encode() const;
  // Raises a ValueError whose message begins with `where`.
  static PeerCard decode(std::string_view text, const std::string& where);

  bool same_host(const PeerCard& other) const;
  // Loopback addresses of one reach the other.
  bool same_network(const PeerCard& other) const;
  // Process numbers of one mean the same to the other.
  bool same_processes(const PeerCard& other) const;
};

}  // namespace gradpack
