// One connection: frames in, frames out, never blocking.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "transports/peer_card.h"
#include "transports/peer_socket.h"

namespace gradpack {

using Clock = std::chrono::steady_clock;

inline constexpr Clock::time_point kNever = Clock::time_point::max();

enum class Frame : uint8_t {
  kHello,     // Hello; the first frame of either side
  kConfirm,   // from the side that connected, once it has the other's hello: this connection is the one
  kAsk,       // uint64_t id
  kAnswer,    // Answer
  kGiveUp,    // text
  kFarewell,  // int64_t calls finished; the last frame
  kBeat,      // nothing
};

struct Hello {
  uint32_t version;
  uint32_t rank;  // the sender's
  Token token;    // the receiver's
};

struct Answer {
  uint64_t id;
  uint64_t position;  // packed as PeerBoard has it
};

template <typename Value>
std::string_view bytes_of(const Value& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

struct Received {
  Frame frame;
  std::string payload;

  // Nothing if the payload has another size.
  template <typename Value>
  std::optional<Value> as() const {
    Value value;
    if (payload.size() != sizeof(value)) return std::nullopt;
    payload.copy(reinterpret_cast<char*>(&value), sizeof(value));
    return value;
  }
};

class Link {
 public:
  enum class State {
    kConnecting,  // until the system says that there is a connection
    kHelloSent,   // until the other side's hello
    kAccepted,    // until the other side's hello: it may be anyone
    kGreeted,     // until the confirmation: a rank's, perhaps an attempt that it has given up
    kCounted,
  };
  // What receive() returns beside 0 and values of errno.
  static constexpr int kEnd = -1;      // the other side ended the connection
  static constexpr int kGarbage = -2;  // it is not a gradpack of this version

  Link(Descriptor socket, State state, int rank, Clock::time_point deadline)
      : state(state), rank(rank), deadline(deadline), socket_(std::move(socket)) {}

  int number() const { return socket_.number(); }
  bool trusted() const { return state == State::kGreeted || state == State::kCounted; }
  bool sending() const { return !out_.empty(); }

  // A frame for which the queue has no room is left out.
  void queue(Frame frame, std::string_view payload = {});
  void flush();
  // Gives every complete frame that is there to handle(Received), until it returns false (also if the link is gone by then).
  // Returns 0 if the connection goes on.
  template <typename Handle>
  int receive(const Handle& handle) {
    while (true) {
      const int ended = read_some();
      while (true) {
        std::optional<Received> received = next();
        if (!received) break;
        if (!handle(*received)) return 0;
      }
      if (broken_) return kGarbage;
      if (ended != 0) return ended == kWouldBlock ? 0 : ended;
    }
  }
  // Ends the connection even where a copy of the descriptor got into another process.
  void shut_down();

  State state;
  int rank;  // -1: not known yet
  Clock::time_point deadline;
  uint32_t watched = 0;  // the events that epoll watches for

 private:
  static constexpr int kWouldBlock = -3;

  int read_some();
  std::optional<Received> next();

  Descriptor socket_;
  std::string in_;
  std::string out_;
  int send_error_ = 0;
  bool broken_ = false;
};

}  // namespace gradpack
