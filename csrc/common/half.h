// The two 16-bit floating dtypes as they lie in memory. kernels/element.h does the arithmetic.
#pragma once

#include <cstdint>

namespace gradpack {

// 1 sign, 5 exponent and 10 fraction bits.
struct Float16 {
  uint16_t bits;
};

// The upper half of a float32: 1 sign, 8 exponent and 7 fraction bits.
struct BFloat16 {
  uint16_t bits;
};

static_assert(sizeof(Float16) == 2 && sizeof(BFloat16) == 2);

}  // namespace gradpack
