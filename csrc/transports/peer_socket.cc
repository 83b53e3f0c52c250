#include "transports/peer_socket.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>
#include <system_error>

namespace gradpack {
namespace {

struct List {
  std::mutex mutex;
  std::set<int> open;
};

// Never destroyed: threads may still work while the process ends.
List& list = *new List;
std::atomic<unsigned> forks{0};

// The list is locked over a fork, so the child finds it whole, and the lock in the hands of its only thread.
const int kForkHandlers = pthread_atfork([] { list.mutex.lock(); }, [] { list.mutex.unlock(); },
                                         [] {
                                           for (const int number : list.open) close(number);
                                           list.open.clear();
                                           forks.fetch_add(1);
                                           list.mutex.unlock();
                                         });

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;
};

SocketAddress socket_address(const Address& address, uint16_t port) {
  SocketAddress made;
  if (address.family == 6) {
    auto* place = reinterpret_cast<sockaddr_in6*>(&made.storage);
    place->sin6_family = AF_INET6;
    place->sin6_port = htons(port);
    std::memcpy(&place->sin6_addr, address.bytes.data(), sizeof(place->sin6_addr));
    made.length = sizeof(*place);
  } else {
    auto* place = reinterpret_cast<sockaddr_in*>(&made.storage);
    place->sin_family = AF_INET;
    place->sin_port = htons(port);
    std::memcpy(&place->sin_addr, address.bytes.data(), sizeof(place->sin_addr));
    made.length = sizeof(*place);
  }
  return made;
}

const sockaddr* pointer(const SocketAddress& address) { return reinterpret_cast<const sockaddr*>(&address.storage); }

Descriptor stream_socket(int family) {
  return Descriptor::from([&] { return socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
}

// Options are advice: a kernel that does not know one still has connections.
void set_option(int socket, int level, int option, int value) { setsockopt(socket, level, option, &value, sizeof(value)); }

Descriptor listening_ipv6() {
  Descriptor made = stream_socket(AF_INET6);
  if (!made) return made;
  set_option(made.number(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
  const SocketAddress any = socket_address({0, 6, {}}, 0);
  // Binding fails where IPv6 is compiled in and switched off.
  if (bind(made.number(), pointer(any), any.length) != 0) made.reset();
  return made;
}

}  // namespace

unsigned fork_count() { return forks.load(std::memory_order_relaxed); }

std::mutex& Descriptor::list_mutex() { return list.mutex; }

Descriptor::Descriptor(int number) : number_(number) {
  if (number >= 0) list.open.insert(number);
}

void Descriptor::reset() {
  if (number_ < 0) return;
  const std::lock_guard<std::mutex> lock(list.mutex);
  list.open.erase(number_);
  close(std::exchange(number_, -1));
}

void throw_errno(const char* call) { throw std::system_error(errno, std::generic_category(), call); }

Listener listen_anywhere() {
  Listener made{listening_ipv6(), 0, true};
  if (!made.socket) {
    made.ipv6 = false;
    made.socket = stream_socket(AF_INET);
    if (!made.socket) throw_errno("socket");
    const SocketAddress any = socket_address({0, 4, {}}, 0);
    if (bind(made.socket.number(), pointer(any), any.length) != 0) throw_errno("bind");
  }
  if (listen(made.socket.number(), SOMAXCONN) != 0) throw_errno("listen");
  sockaddr_storage name{};
  socklen_t length = sizeof(name);
  if (getsockname(made.socket.number(), reinterpret_cast<sockaddr*>(&name), &length) != 0) throw_errno("getsockname");
  made.port =
      ntohs(made.ipv6 ? reinterpret_cast<sockaddr_in6*>(&name)->sin6_port : reinterpret_cast<sockaddr_in*>(&name)->sin_port);
  return made;
}

Descriptor start_connecting(const Address& address, uint16_t port) {
  Descriptor made = stream_socket(address.family == 6 ? AF_INET6 : AF_INET);
  const SocketAddress target = socket_address(address, port);
  // An interrupted connect goes on in the background as one that would block does.
  if (made && connect(made.number(), pointer(target), target.length) != 0 && errno != EINPROGRESS && errno != EINTR) made.reset();
  return made;
}

void set_connection_options(int socket, double host_timeout) {
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  if (host_timeout <= 0) return;
  set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(host_timeout * 1000));
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, 1);
}

uint64_t start_time(const std::string& process) {
  std::ifstream file("/proc/" + process + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  // The second field, the name, may hold spaces and parentheses of its own; what is counted are the fields behind it.
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(text.substr(name_end + 1));
  std::string field;
  for (int number = 3; number < 22; ++number) fields >> field;
  uint64_t found = 0;
  fields >> found;
  return found;
}

Descriptor open_process(int32_t pid, uint64_t started, bool* gone) {
#if defined(SYS_pidfd_open)
  constexpr long kPidfdOpen = SYS_pidfd_open;
#else
  constexpr long kPidfdOpen = 434;  // on every architecture
#endif
  Descriptor made = Descriptor::from([&] { return static_cast<int>(syscall(kPidfdOpen, pid, 0)); });  // always close-on-exec
  *gone = !made && errno == ESRCH;
  // Looked at only now: the handle pins its process, so what is read is of the one that it stands for.
  if (made && (started == 0 || start_time(std::to_string(pid)) != started)) made.reset();
  return made;
}

}  // namespace gradpack
