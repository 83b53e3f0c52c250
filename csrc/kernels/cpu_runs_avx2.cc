// Runs for processors with AVX2 and F16C.
#include "kernels/cpu_runs.h"

#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>

#include "kernels/cpu_runs_loops.h"

namespace gradpack {
namespace {

constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT;

struct Doubles {
  __m256d low, high;
};

struct Simd {
  static constexpr int64_t kLanes = 8;
  static constexpr int64_t kBytes = 32;

  static GP_INLINE __m256 load(const Float16* from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }
  static GP_INLINE __m256 load(const BFloat16* from) {
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  }
  static GP_INLINE __m256 load(const float* from) { return _mm256_loadu_ps(from); }
  static GP_INLINE Doubles load(const double* from) { return {_mm256_loadu_pd(from), _mm256_loadu_pd(from + 4)}; }
  static GP_INLINE __m256i load_raw(const void* from) { return _mm256_loadu_si256((const __m256i*)from); }

  static GP_INLINE __m256 multiply(__m256 x, float operand) { return _mm256_mul_ps(x, _mm256_set1_ps(operand)); }
  static GP_INLINE __m256 divide(__m256 x, float operand) { return _mm256_div_ps(x, _mm256_set1_ps(operand)); }
  static GP_INLINE Doubles multiply(Doubles x, double operand) {
    return {_mm256_mul_pd(x.low, _mm256_set1_pd(operand)), _mm256_mul_pd(x.high, _mm256_set1_pd(operand))};
  }
  static GP_INLINE Doubles divide(Doubles x, double operand) {
    return {_mm256_div_pd(x.low, _mm256_set1_pd(operand)), _mm256_div_pd(x.high, _mm256_set1_pd(operand))};
  }

  static GP_INLINE __m256 add(__m256 sum, __m256 x) {
    const __m256 result = _mm256_add_ps(sum, x);
    const __m256 nan = _mm256_cmp_ps(result, result, _CMP_UNORD_Q);
    return _mm256_blendv_ps(result, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), nan);
  }
  static GP_INLINE __m256d add(__m256d sum, __m256d x) {
    const __m256d result = _mm256_add_pd(sum, x);
    const __m256d nan = _mm256_cmp_pd(result, result, _CMP_UNORD_Q);
    return _mm256_blendv_pd(result, _mm256_castsi256_pd(_mm256_set1_epi64x(0x7ff8000000000000)), nan);
  }
  static GP_INLINE Doubles add(Doubles sum, Doubles x) { return {add(sum.low, x.low), add(sum.high, x.high)}; }

  // The lower halves of four 64-bit comparison results.
  static GP_INLINE __m128i narrow_mask(__m256d mask) {
    const __m128 low = _mm_castpd_ps(_mm256_castpd256_pd128(mask));
    const __m128 high = _mm_castpd_ps(_mm256_extractf128_pd(mask, 1));
    return _mm_castps_si128(_mm_shuffle_ps(low, high, _MM_SHUFFLE(2, 0, 2, 0)));
  }
  // to_odd_float of element.h: where rounding to nearest went away from zero the number before is the truncated one (the
  // largest finite number, which is odd, where it went to inf).
  static GP_INLINE __m128 to_odd_floats(__m256d x) {
    const __m256d no_sign = _mm256_castsi256_pd(_mm256_set1_epi64x(0x7fffffffffffffff));
    const __m128 nearest = _mm256_cvtpd_ps(x);
    const __m256d back = _mm256_cvtps_pd(nearest);
    const __m256d away = _mm256_cmp_pd(_mm256_and_pd(back, no_sign), _mm256_and_pd(x, no_sign), _CMP_GT_OQ);
    const __m256d inexact = _mm256_cmp_pd(back, x, _CMP_NEQ_OQ);
    const __m128i truncated = _mm_add_epi32(_mm_castps_si128(nearest), narrow_mask(away));
    return _mm_castsi128_ps(_mm_or_si128(truncated, _mm_srli_epi32(narrow_mask(inexact), 31)));
  }
  static GP_INLINE __m256 to_odd_floats(Doubles x) { return _mm256_set_m128(to_odd_floats(x.high), to_odd_floats(x.low)); }

  template <bool stream>
  static GP_INLINE __m256i store_half(void* to, __m128i bits) {
    if constexpr (stream) {
      _mm_stream_si128((__m128i*)to, bits);
    } else {
      _mm_storeu_si128((__m128i*)to, bits);
    }
    return _mm256_zextsi128_si256(bits);
  }
  template <bool stream>
  static GP_INLINE __m256i store_raw(void* to, __m256i bits) {
    if constexpr (stream) {
      _mm256_stream_si256((__m256i*)to, bits);
    } else {
      _mm256_storeu_si256((__m256i*)to, bits);
    }
    return bits;
  }
  template <bool stream>
  static GP_INLINE __m256i store(Float16* to, __m256 x) {
    return store_half<stream>(to, _mm256_cvtps_ph(x, kNearest));
  }
  template <bool stream>
  static GP_INLINE __m256i store(BFloat16* to, __m256 x) {
    asm("" : "+x"(x));  // or GCC loads x once for each use, and loads that cross cache lines are what this loop is made of
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i upper = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    const __m256i rounded = _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), quiet, nan);
    return store_half<stream>(to, _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1)));
  }
  template <bool stream>
  static GP_INLINE __m256i store(float* to, __m256 x) {
    return store_raw<stream>(to, _mm256_castps_si256(x));
  }
  template <bool stream>
  static GP_INLINE Doubles store(double* to, __m256 x) {
    return store<stream>(to, Doubles{_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))});
  }
  template <bool stream>
  static GP_INLINE Doubles store(double* to, Doubles x) {
    store_raw<stream>(to, _mm256_castpd_si256(x.low));
    store_raw<stream>(to + 4, _mm256_castpd_si256(x.high));
    return x;
  }
  template <bool stream, typename To>
  static GP_INLINE __m256i store(To* to, Doubles x) {
    return store<stream>(to, to_odd_floats(x));
  }

  // The largest exponent field so far, in lanes of 16 bits for 16-bit dtypes and of 32 bits for the others (the upper half of
  // a float64 holds its exponent; the lower is masked away).
  struct Seen {
    __m256i largest = _mm256_setzero_si256();

    template <typename T>
    static GP_INLINE __m256i mask() {
      if constexpr (sizeof(T) == 2) return _mm256_set1_epi16(static_cast<int16_t>(kExponentBits<T>));
      if constexpr (sizeof(T) == 4) return _mm256_set1_epi32(static_cast<int32_t>(kExponentBits<T>));
      return _mm256_set1_epi64x(static_cast<int64_t>(kExponentBits<T>));
    }
    template <typename T>
    GP_INLINE void note(__m256i bits) {
      const __m256i exponents = _mm256_and_si256(bits, mask<T>());
      largest = sizeof(T) == 2 ? _mm256_max_epu16(largest, exponents) : _mm256_max_epu32(largest, exponents);
    }
    template <typename T>
    GP_INLINE void note(Doubles x) {
      note<T>(_mm256_castpd_si256(x.low));
      note<T>(_mm256_castpd_si256(x.high));
    }
    template <typename T>
    GP_INLINE bool any() const {
      __m256i equal;
      if constexpr (sizeof(T) == 2) {
        equal = _mm256_cmpeq_epi16(largest, mask<T>());
      } else if constexpr (sizeof(T) == 4) {
        equal = _mm256_cmpeq_epi32(largest, mask<T>());
      } else {
        equal = _mm256_cmpeq_epi64(largest, mask<T>());
      }
      return _mm256_movemask_epi8(equal) != 0;
    }
  };
};

constexpr CpuRuns kRuns = make_runs<Simd>("avx2");

}  // namespace

const CpuRuns* const kCpuRunsAvx2 = &kRuns;

}  // namespace gradpack

#else

namespace gradpack {
const CpuRuns* const kCpuRunsAvx2 = nullptr;
}  // namespace gradpack

#endif
