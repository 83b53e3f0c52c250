#include "transports/shm_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>
#include <new>
#include <system_error>

#include "common/check.h"

namespace gradpack {
namespace {

constexpr int64_t kPage = 4096;
constexpr uint64_t kMagic = 0x31306d6873647067;  // "gpdshm01"
constexpr int64_t kProgressKinds = 3;
constexpr int64_t kMaxRanks = 1024;
constexpr int64_t kMaxLanes = 1024;
constexpr int64_t kMaxSlots = 64;
constexpr int64_t kMaxSlotBytes = int64_t{1} << 30;

struct Identity {
  uint64_t magic;
  ShmShape shape;
  std::array<char, ShmSegment::kNonceBytes> nonce;
};
static_assert(sizeof(Identity) <= kPage);

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

int64_t counter_bytes(const ShmShape& shape) { return shape.lanes * kProgressKinds * static_cast<int64_t>(sizeof(ShmCounter)); }

// Of one rank: counters, mailboxes, rings.
int64_t control_bytes(const ShmShape& shape) { return round_up(counter_bytes(shape) + 2 * ShmSegment::kMailboxBytes, kPage); }
int64_t ring_bytes(const ShmShape& shape) { return shape.slots * shape.slot_bytes; }
int64_t rank_bytes(const ShmShape& shape) { return control_bytes(shape) + shape.lanes * ring_bytes(shape); }

Identity identity_of(const ShmShape& shape, const std::string& nonce) {
  Identity identity{kMagic, shape, {}};
  nonce.copy(identity.nonce.data(), identity.nonce.size());
  return identity;
}

}  // namespace

void ShmShape::check() const {
  const auto within = [](const char* what, int64_t found, int64_t most) {
    GP_CHECK(kValue, found >= 1 && found <= most, "ShmShape: ", what, ": found ", found, ", wanted 1 to ", most);
  };
  within("ranks", ranks, kMaxRanks);
  within("lanes", lanes, kMaxLanes);
  within("slots", slots, kMaxSlots);
  within("slot_bytes", slot_bytes, kMaxSlotBytes);
  GP_CHECK(kValue, slot_bytes % kPage == 0, "ShmShape: slot_bytes: found ", slot_bytes, ", wanted a multiple of ", kPage);
}

int64_t ShmShape::bytes() const { return kPage + ranks * rank_bytes(*this); }

ShmSegment::ShmSegment(const ShmShape& shape, Descriptor descriptor, std::string location, std::string nonce)
    : shape_(shape), descriptor_(std::move(descriptor)), location_(std::move(location)), nonce_(std::move(nonce)) {
  const auto bytes = static_cast<size_t>(shape.bytes());
  void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_.number(), 0);
  if (mapped == MAP_FAILED) throw_errno("mmap");
  data_ = static_cast<char*>(mapped);
  // A forked child that runs a copy of this object must fail at once, not take part.
  if (madvise(data_, bytes, MADV_DONTFORK) != 0) {
    const int error = errno;
    munmap(data_, bytes);
    errno = error;
    throw_errno("madvise");
  }
}

std::unique_ptr<ShmSegment> ShmSegment::create(const ShmShape& shape, const std::string& path) {
  shape.check();
  std::string nonce(kNonceBytes, '\0');
  if (getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size())) throw_errno("getrandom");
  Descriptor made = path.empty()
                        ? Descriptor::from([] { return memfd_create("gradpack", MFD_CLOEXEC | MFD_ALLOW_SEALING); })
                        : Descriptor::from([&] { return open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600); });
  if (!made) throw_errno(path.empty() ? "memfd_create" : "open");
  const int number = made.number();
  const std::string location = path.empty() ? "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(number) : path;
  try {
    // All of the memory at once: one that is not there would be a SIGBUS in the middle of a call.
    const int error = posix_fallocate(number, 0, shape.bytes());
    if (error != 0) throw std::system_error(error, std::generic_category(), "posix_fallocate");
    if (path.empty() && fcntl(number, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) throw_errno("F_ADD_SEALS");
    std::unique_ptr<ShmSegment> segment(new ShmSegment(shape, std::move(made), location, nonce));
    segment->owns_name_ = !path.empty();
    const Identity identity = identity_of(shape, nonce);
    std::memcpy(segment->data_, &identity, sizeof(identity));
    return segment;
  } catch (...) {
    if (!path.empty()) unlink(path.c_str());
    throw;
  }
}

std::unique_ptr<ShmSegment> ShmSegment::attach(const ShmShape& shape, const std::string& location, const std::string& nonce) {
  shape.check();
  // Not to wait for a pipe nor to become a terminal's process, should the number belong to such a thing by now.
  Descriptor opened = Descriptor::from([&] { return open(location.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); });
  if (!opened) throw_errno("open");
  struct stat status;
  if (fstat(opened.number(), &status) != 0) throw_errno("fstat");
  GP_CHECK(kValue, S_ISREG(status.st_mode) && status.st_size == shape.bytes(), "ShmSegment: ", location, ": found ",
           status.st_size, " bytes, wanted ", shape.bytes());
  std::unique_ptr<ShmSegment> segment(new ShmSegment(shape, std::move(opened), location, nonce));
  const Identity identity = identity_of(shape, nonce);
  GP_CHECK(kValue, std::memcmp(segment->data_, &identity, sizeof(identity)) == 0, "ShmSegment: ", location,
           ": found another segment than the one that was offered");
  return segment;
}

ShmSegment::~ShmSegment() {
  // Whatever lies at that address in a forked child is not ours, and the name is the parent's.
  if (!is_mine()) return;
  hide();
  if (data_) munmap(data_, static_cast<size_t>(shape_.bytes()));
}

void ShmSegment::hide() {
  descriptor_.reset();
  if (owns_name_) unlink(location_.c_str());
  owns_name_ = false;
}

ShmCounter& ShmSegment::counter(int64_t rank, int64_t lane, ShmProgress which) const {
  char* const counters = data_ + kPage + rank * rank_bytes(shape_);
  return reinterpret_cast<ShmCounter*>(counters)[lane * kProgressKinds + static_cast<int64_t>(which)];
}

char* ShmSegment::mailbox(int64_t rank, int64_t parity) const {
  return data_ + kPage + rank * rank_bytes(shape_) + counter_bytes(shape_) + parity * kMailboxBytes;
}

char* ShmSegment::slot(int64_t rank, int64_t lane, int64_t index) const {
  return data_ + kPage + rank * rank_bytes(shape_) + control_bytes(shape_) + lane * ring_bytes(shape_) +
         index * shape_.slot_bytes;
}

}  // namespace gradpack
