#include "transports/peer_link.h"

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace gradpack {
namespace {

constexpr size_t kMaxPayload = 4096;
constexpr size_t kMaxQueued = 16384;

struct Header {
  uint16_t size;
  Frame frame;
  uint8_t zero;
};
static_assert(sizeof(Header) == 4);

}  // namespace

void Link::queue(Frame frame, std::string_view payload) {
  if (out_.size() + sizeof(Header) + payload.size() > kMaxQueued) return;
  out_ += bytes_of(Header{static_cast<uint16_t>(payload.size()), frame, 0});
  out_ += payload;
}

void Link::flush() {
  size_t sent = 0;
  while (sent < out_.size()) {
    const ssize_t count = send(number(), out_.data() + sent, out_.size() - sent, MSG_NOSIGNAL);
    if (count >= 0) {
      sent += static_cast<size_t>(count);
    } else if (errno == EAGAIN) {
      break;
    } else if (errno != EINTR) {
      // Not yet the end: a farewell may lie unread before it. But what send() was told, recv() is told no more.
      send_error_ = errno;
      sent = out_.size();
    }
  }
  out_.erase(0, sent);
}

int Link::read_some() {
  std::array<char, 4096> buffer;
  while (true) {
    const ssize_t count = recv(number(), buffer.data(), buffer.size(), 0);
    if (count > 0) {
      in_.append(buffer.data(), static_cast<size_t>(count));
      return 0;
    }
    if (count == 0) return send_error_ != 0 ? send_error_ : kEnd;
    if (errno == EAGAIN) return kWouldBlock;
    if (errno != EINTR) return errno;
  }
}

std::optional<Received> Link::next() {
  Header header;
  if (broken_ || in_.size() < sizeof(header)) return std::nullopt;
  std::memcpy(&header, in_.data(), sizeof(header));
  broken_ = header.size > kMaxPayload || header.frame > Frame::kBeat || header.zero != 0;
  if (broken_ || in_.size() < sizeof(header) + header.size) return std::nullopt;
  Received received{header.frame, in_.substr(sizeof(header), header.size)};
  in_.erase(0, sizeof(header) + header.size);
  return received;
}

void Link::shut_down() {
  // Closing with bytes unread resets the connection, which may overtake what was sent last.
  receive([](const Received&) { return true; });
  shutdown(number(), SHUT_RDWR);
}

}  // namespace gradpack
