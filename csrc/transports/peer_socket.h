// Descriptors that end with their owner and that no forked child keeps, and the sockets and process handles that are made of
// them.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>

namespace gradpack {

// Forks that lie between the first process and this one, as far as they ran the handlers of pthread_atfork. An object that
// finds another number than at its construction is a copy in a forked child: its descriptors are closed, its thread is not there
// and its locks may be held for ever.
unsigned fork_count();

// Owns one descriptor. A copy of a connection in a forked child would keep the connection open after its owner's death, so all
// that exist are listed, and the child closes them as the first thing it does.
class Descriptor {
 public:
  Descriptor() = default;
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() { reset(); }

  // Of make(), a system call that returns a descriptor or -1 and errno. No fork comes between the call and the list.
  template <typename Make>
  static Descriptor from(const Make& make) {
    const std::lock_guard<std::mutex> lock(list_mutex());
    return Descriptor(make());
  }

  void reset();
  int number() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }

 private:
  explicit Descriptor(int number);
  static std::mutex& list_mutex();

  int number_ = -1;
};

// Throws std::system_error of errno; what() is "call: text of errno".
[[noreturn]] void throw_errno(const char* call);

struct Address {
  uint8_t loopback;  // 0 or 1
  uint8_t family;    // 4 or 6
  std::array<uint8_t, 16> bytes;
};

struct Listener {
  Descriptor socket;
  uint16_t port;
  bool ipv6;  // and IPv4 as well
};

// On all addresses, at a port that the system chose. Throws std::system_error.
Listener listen_anywhere();

// Empty, with errno, where the attempt has failed at once; else it is under way (or done), and SO_ERROR tells once it is
// writable.
Descriptor start_connecting(const Address& address, uint16_t port);

// `host_timeout`, in seconds, is for connections to another host; 0 is for those to this one, which cannot fall silent.
void set_connection_options(int socket, double host_timeout);

// In clock ticks since boot, as /proc/<process>/stat has it; 0 if that cannot be read.
uint64_t start_time(const std::string& process);

// Becomes readable when the process ends. `gone`: it has already. Empty otherwise where the system grants no handle, or where
// the process of that number is another one.
Descriptor open_process(int32_t pid, uint64_t started, bool* gone);

}  // namespace gradpack
