#include "transports/peer_card.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>

#include "common/check.h"

namespace gradpack {
namespace {

// 64 addresses of 18 bytes keep a card below the 4096 bytes that it is promised to have at most.
constexpr size_t kMaxAddresses = 64;

// As it lies on the wire. Every machine that gradpack runs on is little-endian, and the fields need no padding.
struct Head {
  uint32_t version;
  std::array<char, 36> host;
  uint64_t network_namespace;
  uint64_t pid_namespace;
  uint64_t started;
  int32_t pid;
  uint16_t port;
  uint16_t num_addresses;
  Token token;
};
static_assert(sizeof(Head) == 88 && sizeof(Address) == 18);

uint64_t inode(const char* path) {
  struct stat found{};
  return stat(path, &found) == 0 ? found.st_ino : 0;
}

std::optional<Address> usable_address(const ifaddrs& entry, bool ipv6) {
  if (!entry.ifa_addr || !(entry.ifa_flags & IFF_UP)) return std::nullopt;
  Address address{static_cast<uint8_t>((entry.ifa_flags & IFF_LOOPBACK) != 0), 4, {}};
  if (entry.ifa_addr->sa_family == AF_INET) {
    std::memcpy(address.bytes.data(), &reinterpret_cast<const sockaddr_in*>(entry.ifa_addr)->sin_addr, 4);
    return address;
  }
  if (entry.ifa_addr->sa_family != AF_INET6 || !ipv6) return std::nullopt;
  const in6_addr& found = reinterpret_cast<const sockaddr_in6*>(entry.ifa_addr)->sin6_addr;
  // These need the name of an interface of the other host.
  if (IN6_IS_ADDR_LINKLOCAL(&found)) return std::nullopt;
  address.family = 6;
  std::memcpy(address.bytes.data(), &found, 16);
  return address;
}

std::vector<Address> own_addresses(std::string_view interface, bool ipv6) {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) throw_errno("getifaddrs");
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(first, &freeifaddrs);
  const std::string_view wanted = interface.substr(0, interface.find(','));
  struct Found {
    Address address;
    int order;
  };
  std::vector<Found> found;
  for (const ifaddrs* entry = first; entry; entry = entry->ifa_next) {
    if (const std::optional<Address> address = usable_address(*entry, ipv6)) {
      found.push_back({*address, address->loopback ? 0 : entry->ifa_name == wanted ? 1 : 2});
    }
  }
  std::stable_sort(found.begin(), found.end(), [](const Found& a, const Found& b) { return a.order < b.order; });
  found.resize(std::min(found.size(), kMaxAddresses));
  std::vector<Address> addresses;
  for (const Found& entry : found) addresses.push_back(entry.address);
  return addresses;
}

template <typename Id>
bool same(const Id& a, const Id& b) {
  return a == b && a != Id{};
}

}  // namespace

PeerCard PeerCard::of_this_process(const Listener& listener, std::string_view interface, std::string_view host) {
  PeerCard card;
  std::string boot_id(host);
  if (boot_id.empty()) std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  std::copy_n(boot_id.begin(), std::min(boot_id.size(), card.host.size()), card.host.begin());
  card.network_namespace = inode("/proc/self/ns/net");
  card.pid_namespace = inode("/proc/self/ns/pid");
  card.pid = getpid();
  card.started = start_time("self");
  card.port = listener.port;
  if (getrandom(card.token.data(), card.token.size(), 0) != static_cast<ssize_t>(card.token.size())) throw_errno("getrandom");
  card.addresses = own_addresses(interface, listener.ipv6);
  return card;
}

std::string PeerCard::encode() const {
  const Head head{
      kPeerProtocol, host, network_namespace, pid_namespace, started, pid, port, static_cast<uint16_t>(addresses.size()), token};
  std::string text(reinterpret_cast<const char*>(&head), sizeof(head));
  text.append(reinterpret_cast<const char*>(addresses.data()), addresses.size() * sizeof(Address));
  return text;
}

PeerCard PeerCard::decode(std::string_view text, const std::string& where) {
  GP_CHECK(kValue, text.size() >= sizeof(Head), where, ": found ", text.size(), " bytes, wanted at least ", sizeof(Head));
  Head head;
  std::memcpy(&head, text.data(), sizeof(head));
  GP_CHECK(kValue, head.version == kPeerProtocol, where, ": found version ", head.version, " in ", text.size(),
           " bytes, wanted version ", kPeerProtocol, ": all ranks need the same gradpack");
  const size_t size = sizeof(Head) + head.num_addresses * sizeof(Address);
  GP_CHECK(kValue, text.size() == size, where, ": found ", text.size(), " bytes, wanted ", size);
  PeerCard card{head.host, head.network_namespace, head.pid_namespace, head.pid, head.started, head.port, head.token, {}};
  card.addresses.resize(head.num_addresses);
  if (head.num_addresses > 0) std::memcpy(card.addresses.data(), text.data() + sizeof(head), size - sizeof(head));
  return card;
}

bool PeerCard::same_host(const PeerCard& other) const { return same(host, other.host); }

bool PeerCard::same_network(const PeerCard& other) const {
  return same_host(other) && same(network_namespace, other.network_namespace);
}

bool PeerCard::same_processes(const PeerCard& other) const {
  return same_host(other) && same(pid_namespace, other.pid_namespace);
}

}  // namespace gradpack
