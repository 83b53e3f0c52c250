// Checks that carry the Python exception class and the values that failed them.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace gradpack {

// The Python class that an Error becomes at the border (csrc/python/module.cc translates).
enum class ErrorKind { kValue, kType, kBuffer, kRuntime, kLayout, kBuild };

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

template <typename... Parts>
[[noreturn]] void raise(ErrorKind kind, const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(kind, message.str());
}

}  // namespace gradpack

// What the caller may have done wrong: GP_CHECK(kType, ok, "allreduce: grads[", i, "]: found ", a, ", wanted ", b).
#define GP_CHECK(kind, condition, ...)                                             \
  do {                                                                             \
    if (!(condition)) ::gradpack::raise(::gradpack::ErrorKind::kind, __VA_ARGS__); \
  } while (0)

// What only a bug in gradpack can cause.
#define GP_INTERNAL(condition, ...)                                                                                           \
  do {                                                                                                                        \
    if (!(condition))                                                                                                         \
      ::gradpack::raise(::gradpack::ErrorKind::kRuntime, "internal error in gradpack (please report it): ", #condition, ": ", \
                        __VA_ARGS__);                                                                                         \
  } while (0)
