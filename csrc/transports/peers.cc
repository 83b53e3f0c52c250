#include "transports/peers.h"

#include <climits>
#include <memory>
#include <mutex>

#include "common/check.h"
#include "transports/peer_mesh.h"

namespace gradpack {
namespace {

constexpr double kMinHostTimeout = 0.1;
constexpr double kMaxHostTimeout = 1e6;
constexpr double kGiveUpSeconds = 0.2;
constexpr size_t kMaxGiveUpText = 2000;
constexpr size_t kMaxGiveUpKind = 200;

// No character of UTF-8 is cut in two.
std::string_view cut(std::string_view text, size_t most) {
  if (text.size() <= most) return text;
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xC0) == 0x80) --most;
  return text.substr(0, most);
}

int checked_rank(int64_t rank, int64_t size) {
  GP_CHECK(kValue, size >= 1 && size <= INT_MAX, "Peers: size: found ", size, ", wanted 1 or more");
  GP_CHECK(kValue, rank >= 0 && rank < size, "Peers: rank: found ", rank, ", wanted 0 to ", size - 1);
  return static_cast<int>(rank);
}

}  // namespace

struct Peers::State {
  State(int rank, int size, double host_timeout, std::string_view interface, std::string_view host)
      : rank(rank),
        size(size),
        host_timeout(host_timeout),
        listener(listen_anywhere()),
        card(PeerCard::of_this_process(listener, interface, host).encode()),
        board(rank, size) {}

  // False: there is no thread.
  bool wake() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (mesh) mesh->wake();
    return mesh != nullptr;
  }

  const unsigned born = fork_count();
  const int rank;
  const int size;
  const double host_timeout;
  Listener listener;
  const std::string card;
  PeerBoard board;

  std::mutex mutex;  // guards what follows, and listener from then on
  bool closed = false;
  std::unique_ptr<PeerMesh> mesh;
};

Peers::Peers(int64_t rank, int64_t size, double host_timeout, std::string_view interface, std::string_view host) {
  const int own = checked_rank(rank, size);
  GP_CHECK(kValue, host_timeout >= kMinHostTimeout && host_timeout <= kMaxHostTimeout, "Peers: host_timeout: found ",
           host_timeout, ", wanted ", kMinHostTimeout, " to ", kMaxHostTimeout, " seconds");
  state_ = new State(own, static_cast<int>(size), host_timeout, interface, host);
}

Peers::~Peers() {
  if (state_->born != fork_count()) return;
  close();
  delete state_;
}

Peers::State& Peers::state() const {
  GP_CHECK(kRuntime, state_->born == fork_count(), "Peers: found an object of the parent process in a forked child");
  return *state_;
}

const std::string& Peers::card() const { return state().card; }

void Peers::connect(const std::vector<std::string>& cards) {
  State& here = state();
  GP_CHECK(kValue, cards.size() == static_cast<size_t>(here.size), "Peers.connect: cards: found ", cards.size(),
           ", wanted one for each of ", here.size, " ranks");
  std::vector<PeerCard> decoded;
  for (size_t rank = 0; rank < cards.size(); ++rank) {
    decoded.push_back(PeerCard::decode(cards[rank], "Peers.connect: the card of rank " + std::to_string(rank)));
  }
  GP_CHECK(kValue, cards[static_cast<size_t>(here.rank)] == here.card, "Peers.connect: the card of rank ", here.rank,
           ": found another object's, wanted this one's own");
  const std::lock_guard<std::mutex> lock(here.mutex);
  GP_CHECK(kRuntime, !here.closed && !here.mesh, "Peers.connect: found the object ",
           here.closed ? "closed" : "connecting already");
  here.mesh = std::make_unique<PeerMesh>(here.board, std::move(here.listener.socket), decoded, here.rank, here.host_timeout);
}

bool Peers::wait_connected(double seconds) { return state().board.wait_connected(seconds); }

std::vector<int> Peers::unreached() { return state().board.unreached(); }

void Peers::enter(int64_t call) {
  State& here = state();
  GP_CHECK(kValue, call >= 1 && call <= PeerBoard::kMaxCall, "Peers.enter: call: found ", call, ", wanted 1 to ",
           PeerBoard::kMaxCall);
  here.board.enter(call);
}

void Peers::step(int64_t step) {
  State& here = state();
  GP_CHECK(kValue, step >= 0 && step <= PeerBoard::kMaxStep, "Peers.step: step: found ", step, ", wanted 0 to ",
           PeerBoard::kMaxStep);
  here.board.step(step);
}

void Peers::leave() { state().board.leave(); }

std::optional<News> Peers::verdict(int64_t call, double seconds) { return state().board.verdict(call, seconds); }

std::vector<std::optional<Position>> Peers::positions(double seconds) {
  State& here = state();
  const uint64_t id = here.board.want_positions();
  here.wake();
  return here.board.wait_positions(id, seconds);
}

void Peers::give_up(std::string_view kind, std::string_view text) {
  State& here = state();
  GP_CHECK(kValue, !kind.empty() && kind.find('\n') == std::string_view::npos, "Peers.give_up: kind: found '", kind,
           "', wanted one line");
  std::string told(cut(kind, kMaxGiveUpKind));
  told += '\n';
  told += cut(text, kMaxGiveUpText);
  here.board.give_up(told);
  if (here.wake()) here.board.wait_told(kGiveUpSeconds);
}

void Peers::close() {
  State& here = *state_;
  if (here.born != fork_count()) return;
  here.board.close();
  const std::lock_guard<std::mutex> lock(here.mutex);
  here.closed = true;
  here.mesh.reset();
  here.listener.socket.reset();
}

}  // namespace gradpack
