// Runs for processors with AVX-512 F, BW, DQ and VL.
#include "kernels/cpu_runs.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC's own headers (its bug 105593)
#endif
#include <immintrin.h>

#include "kernels/cpu_runs_loops.h"

namespace gradpack {
namespace {

constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
constexpr int kTowardZero = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;

struct Doubles {
  __m512d low, high;
};

struct Simd {
  static constexpr int64_t kLanes = 16;
  static constexpr int64_t kBytes = 64;

  static GP_INLINE __m512 load(const Float16* from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
  static GP_INLINE __m512 load(const BFloat16* from) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  }
  static GP_INLINE __m512 load(const float* from) { return _mm512_castsi512_ps(load_raw(from)); }
  static GP_INLINE Doubles load(const double* from) { return {_mm512_loadu_pd(from), _mm512_loadu_pd(from + 8)}; }
  static GP_INLINE __m512i load_raw(const void* from) { return _mm512_loadu_si512(from); }

  static GP_INLINE __m512 multiply(__m512 x, float operand) { return _mm512_mul_ps(x, _mm512_set1_ps(operand)); }
  static GP_INLINE __m512 divide(__m512 x, float operand) { return _mm512_div_ps(x, _mm512_set1_ps(operand)); }
  static GP_INLINE Doubles multiply(Doubles x, double operand) {
    return {_mm512_mul_pd(x.low, _mm512_set1_pd(operand)), _mm512_mul_pd(x.high, _mm512_set1_pd(operand))};
  }
  static GP_INLINE Doubles divide(Doubles x, double operand) {
    return {_mm512_div_pd(x.low, _mm512_set1_pd(operand)), _mm512_div_pd(x.high, _mm512_set1_pd(operand))};
  }

  static GP_INLINE __m512 add(__m512 sum, __m512 x) {
    const __m512 result = _mm512_add_ps(sum, x);
    const __mmask16 nan = _mm512_cmp_ps_mask(result, result, _CMP_UNORD_Q);
    return _mm512_mask_mov_ps(result, nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
  }
  static GP_INLINE __m512d add(__m512d sum, __m512d x) {
    const __m512d result = _mm512_add_pd(sum, x);
    const __mmask8 nan = _mm512_cmp_pd_mask(result, result, _CMP_UNORD_Q);
    return _mm512_mask_mov_pd(result, nan, _mm512_castsi512_pd(_mm512_set1_epi64(0x7ff8000000000000)));
  }
  static GP_INLINE Doubles add(Doubles sum, Doubles x) { return {add(sum.low, x.low), add(sum.high, x.high)}; }

  // to_odd_float of element.h. Rounding toward zero leaves the largest finite number, which is odd, for what is too large.
  static GP_INLINE __m256 to_odd_floats(__m512d x) {
    const __m256 truncated = _mm512_cvt_roundpd_ps(x, kTowardZero);
    const __mmask8 inexact = _mm512_cmp_pd_mask(_mm512_cvtps_pd(truncated), x, _CMP_NEQ_OQ);
    const __m256i bits = _mm256_castps_si256(truncated);
    return _mm256_castsi256_ps(_mm256_mask_or_epi32(bits, inexact, bits, _mm256_set1_epi32(1)));
  }
  static GP_INLINE __m512 to_odd_floats(Doubles x) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(to_odd_floats(x.low)), to_odd_floats(x.high), 1);
  }

  static GP_INLINE __m512i upper_halves() {
    return _mm512_castsi256_si512(_mm256_setr_epi16(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31));
  }

  template <bool stream>
  static GP_INLINE __m512i store_half(void* to, __m256i bits) {
    if constexpr (stream) {
      _mm256_stream_si256((__m256i*)to, bits);
    } else {
      _mm256_storeu_si256((__m256i*)to, bits);
    }
    return _mm512_zextsi256_si512(bits);
  }
  template <bool stream>
  static GP_INLINE __m512i store_raw(void* to, __m512i bits) {
    if constexpr (stream) {
      _mm512_stream_si512((__m512i*)to, bits);
    } else {
      _mm512_storeu_si512(to, bits);
    }
    return bits;
  }
  template <bool stream>
  static GP_INLINE __m512i store(Float16* to, __m512 x) {
    return store_half<stream>(to, _mm512_cvtps_ph(x, kNearest));
  }
  template <bool stream>
  static GP_INLINE __m512i store(BFloat16* to, __m512 x) {
    asm("" : "+v"(x));  // or GCC loads x once for each use, and loads that cross cache lines are what this loop is made of
    const __m512i bits = _mm512_castps_si512(x);
    const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i half = _mm512_mask_mov_epi32(_mm512_set1_epi32(0x7fff), odd, _mm512_set1_epi32(0x8000));
    const __m512i sum = _mm512_mask_or_epi32(_mm512_add_epi32(bits, half), nan, bits, _mm512_set1_epi32(0x400000));
    // The upper halves of the lanes side by side: one permutation in place of a shift and a narrowing.
    const __m512i upper = _mm512_permutexvar_epi16(upper_halves(), sum);
    return store_half<stream>(to, _mm512_castsi512_si256(upper));
  }
  template <bool stream>
  static GP_INLINE __m512i store(float* to, __m512 x) {
    return store_raw<stream>(to, _mm512_castps_si512(x));
  }
  template <bool stream>
  static GP_INLINE Doubles store(double* to, __m512 x) {
    return store<stream>(to, Doubles{_mm512_cvtps_pd(_mm512_castps512_ps256(x)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1))});
  }
  template <bool stream>
  static GP_INLINE Doubles store(double* to, Doubles x) {
    store_raw<stream>(to, _mm512_castpd_si512(x.low));
    store_raw<stream>(to + 8, _mm512_castpd_si512(x.high));
    return x;
  }
  template <bool stream, typename To>
  static GP_INLINE __m512i store(To* to, Doubles x) {
    return store<stream>(to, to_odd_floats(x));
  }

  // The largest exponent field so far, in lanes of 16 bits for 16-bit dtypes and of 32 bits for the others (the upper half of
  // a float64 holds its exponent; the lower is masked away).
  struct Seen {
    __m512i largest = _mm512_setzero_si512();

    template <typename T>
    static GP_INLINE __m512i mask() {
      if constexpr (sizeof(T) == 2) return _mm512_set1_epi16(static_cast<int16_t>(kExponentBits<T>));
      if constexpr (sizeof(T) == 4) return _mm512_set1_epi32(static_cast<int32_t>(kExponentBits<T>));
      return _mm512_set1_epi64(static_cast<int64_t>(kExponentBits<T>));
    }
    template <typename T>
    GP_INLINE void note(__m512i bits) {
      const __m512i exponents = _mm512_and_si512(bits, mask<T>());
      largest = sizeof(T) == 2 ? _mm512_max_epu16(largest, exponents) : _mm512_max_epu32(largest, exponents);
    }
    template <typename T>
    GP_INLINE void note(Doubles x) {
      note<T>(_mm512_castpd_si512(x.low));
      note<T>(_mm512_castpd_si512(x.high));
    }
    template <typename T>
    GP_INLINE bool any() const {
      if constexpr (sizeof(T) == 2) return _mm512_cmpeq_epi16_mask(largest, mask<T>()) != 0;
      if constexpr (sizeof(T) == 4) return _mm512_cmpeq_epi32_mask(largest, mask<T>()) != 0;
      return _mm512_cmpeq_epi64_mask(largest, mask<T>()) != 0;
    }
  };
};

constexpr CpuRuns kRuns = make_runs<Simd>("avx512");

}  // namespace

const CpuRuns* const kCpuRunsAvx512 = &kRuns;

}  // namespace gradpack

#else

namespace gradpack {
const CpuRuns* const kCpuRunsAvx512 = nullptr;
}  // namespace gradpack

#endif
