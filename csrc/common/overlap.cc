// Words: a *term* is coefficient * x with 0 <= x <= bound. Both questions become one: does a sum of terms reach a number?
//
// One array: dims j with strides s_j overlap themselves where index differences d_j, |d_j| < size_j, not all 0, give
// sum(s_j * d_j) = 0. Two arrays: where (byte of one) - (byte of the other) = 0. Shifted so that every variable starts at 0,
// both are bounded linear Diophantine equations. They are NP-hard in general and easy for memory as programs lay it out:
// terms that form one run merge into one, two terms are solved in closed form, and of the further ones, largest first, only
// the one or two values are tried that leave a rest within reach of the smaller terms.
#include "common/overlap.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <numeric>

namespace gradpack {
namespace {

using Wide = __int128;  // sums of products of sizes and strides of anything that fits the address space

struct Term {
  Wide coefficient;  // > 0
  Wide bound;        // >= 0
};

Wide gcd(Wide a, Wide b) {
  while (b != 0) std::swap(a %= b, b);
  return a;
}

// x with a * x = 1 (mod modulus); a and modulus have no common factor.
Wide inverse(Wide a, Wide modulus) {
  Wide r0 = modulus, r1 = a % modulus, t0 = 0, t1 = 1;
  while (r1 != 0) {
    const Wide quotient = r0 / r1;
    std::swap(r0 -= quotient * r1, r1);
    std::swap(t0 -= quotient * t1, t1);
  }
  return t0 < 0 ? t0 + modulus : t0;
}

class Equation {
 public:
  void add(Wide coefficient, Wide bound) {
    if (bound > 0) terms_[static_cast<size_t>(num_terms_++)] = {coefficient, bound};
  }

  bool reaches(Wide target) {
    merge();
    reach_[0] = 0;
    divisor_[0] = 0;
    for (int i = 0; i < num_terms_; ++i) {
      const Term& term = terms_[static_cast<size_t>(i)];
      reach_[static_cast<size_t>(i) + 1] = reach_[static_cast<size_t>(i)] + term.coefficient * term.bound;
      divisor_[static_cast<size_t>(i) + 1] = gcd(term.coefficient, divisor_[static_cast<size_t>(i)]);
    }
    return search(num_terms_, target);
  }

 private:
  // c * {0..u} + k * c * {0..v} is c * {0..u + k * v} where k <= u + 1.
  void merge() {
    std::sort(terms_.begin(), terms_.begin() + num_terms_,
              [](const Term& a, const Term& b) { return a.coefficient < b.coefficient; });
    int kept = 0;
    for (int i = 0; i < num_terms_; ++i) {
      const Term term = terms_[static_cast<size_t>(i)];
      if (kept > 0) {
        Term& last = terms_[static_cast<size_t>(kept) - 1];
        const Wide factor = term.coefficient / last.coefficient;
        if (term.coefficient % last.coefficient == 0 && factor <= last.bound + 1) {
          last.bound += factor * term.bound;
          continue;
        }
      }
      terms_[static_cast<size_t>(kept++)] = term;
    }
    num_terms_ = kept;
  }

  // Whether the first n terms reach the target.
  bool search(int n, Wide target) {
    const auto level = static_cast<size_t>(n);
    if (target < 0 || target > reach_[level]) return false;
    if (n == 0) return true;
    if (target % divisor_[level] != 0) return false;
    if (n == 1) return true;
    const Term& term = terms_[level - 1];
    // The rest must be a multiple of the smaller terms' divisor: x runs through one residue class of `step`.
    const Wide step = divisor_[level - 1] / divisor_[level];
    const Wide residue = target / divisor_[level] % step * inverse(term.coefficient / divisor_[level], step) % step;
    const Wide shortfall = target - reach_[level - 1];
    const Wide lowest = shortfall <= 0 ? 0 : (shortfall + term.coefficient - 1) / term.coefficient;
    const Wide highest = std::min(term.bound, target / term.coefficient);
    for (Wide x = lowest + ((residue - lowest) % step + step) % step; x <= highest; x += step) {
      // Only strides made to be hard get here. "Yes" refuses them, which is safe.
      if (--tries_left_ < 0) return true;
      if (search(n - 1, target - term.coefficient * x)) return true;
    }
    return false;
  }

  std::array<Term, 2 * kMaxDims + 2> terms_;
  std::array<Wide, 2 * kMaxDims + 3> reach_;    // the largest sum of the first n terms
  std::array<Wide, 2 * kMaxDims + 3> divisor_;  // the greatest common divisor of their coefficients
  int num_terms_ = 0;
  int64_t tries_left_ = 4'000'000;
};

// The bytes of one array: [begin, end) bounds them; they come in runs of `run` bytes whose distances from the first run are
// multiples of `pitch` (0: there is one run).
struct Footprint {
  uint64_t begin;
  uint64_t end;
  uint64_t run;
  uint64_t pitch;
  size_t index;
};

Footprint footprint(const ArrayView& view, size_t index) {
  const auto item = static_cast<uint64_t>(itemsize(view.dtype));
  const auto data = reinterpret_cast<uint64_t>(view.data);
  if (view.dense()) {
    const uint64_t nbytes = static_cast<uint64_t>(view.numel) * item;
    return {data, data + nbytes, nbytes, 0, index};
  }
  Footprint result{data, data + item, item, 0, index};
  for (int d = 0; d < view.ndim; ++d) {
    const Dim& dim = view.dims[d];
    const uint64_t stride = static_cast<uint64_t>(std::abs(dim.stride)) * item;
    const uint64_t extent = stride * static_cast<uint64_t>(dim.size - 1);
    (dim.stride < 0 ? result.begin -= extent : result.end += extent);
    if (stride == item) {
      result.run = item * static_cast<uint64_t>(dim.size);
    } else {
      result.pitch = std::gcd(result.pitch, stride);
    }
  }
  return result;
}

bool share_memory(const Footprint& a, const Footprint& b, const std::vector<ArrayView>& views) {
  if (a.pitch == 0 && b.pitch == 0) return true;  // two runs, and their bounds meet
  // Interleaved columns, the usual case: the runs of b stay between those of a.
  const uint64_t pitch = a.pitch == b.pitch ? a.pitch : std::gcd(a.pitch, b.pitch);
  const uint64_t distance = (b.begin - a.begin) % pitch;  // b begins at or after a
  if (distance >= a.run && distance + b.run <= pitch) return false;
  Equation equation;
  for (const Footprint* part : {&a, &b}) {
    const ArrayView& view = views[part->index];
    const int64_t item = itemsize(view.dtype);
    for (int d = 0; d < view.ndim; ++d) {
      equation.add(static_cast<Wide>(std::abs(view.dims[d].stride)) * item, view.dims[d].size - 1);
    }
    equation.add(1, item - 1);
  }
  // (byte of a) - a.begin + (b.end - 1) - (byte of b): every summand starts at 0, and the bytes are one where this is reached.
  return equation.reaches(static_cast<Wide>(b.end) - 1 - a.begin);
}

}  // namespace

bool overlaps_itself(const Dim* dims, int ndim) {
  std::array<Dim, kMaxDims> sorted;
  int count = 0;
  for (int d = 0; d < ndim; ++d) {
    if (dims[d].size <= 1) continue;
    if (dims[d].stride == 0) return true;
    sorted[static_cast<size_t>(count++)] = {dims[d].size, std::abs(dims[d].stride)};
  }
  std::sort(sorted.begin(), sorted.begin() + count, [](const Dim& a, const Dim& b) { return a.stride < b.stride; });
  // k is the dim of the largest stride whose indices differ, by 1 + y. The smaller dims have to make up for it.
  Wide reach = 0;
  for (int k = 0; k < count; ++k) {
    const Dim& dim = sorted[static_cast<size_t>(k)];
    if (dim.stride <= reach) {
      Equation equation;
      for (int j = 0; j < k; ++j) {
        const Dim& smaller = sorted[static_cast<size_t>(j)];
        equation.add(smaller.stride, 2 * (static_cast<Wide>(smaller.size) - 1));
      }
      equation.add(dim.stride, dim.size - 2);
      if (equation.reaches(reach - dim.stride)) return true;
    }
    reach += static_cast<Wide>(dim.size - 1) * dim.stride;
  }
  return false;
}

std::optional<std::pair<size_t, size_t>> find_overlap(const std::vector<ArrayView>& views) {
  std::vector<Footprint> sorted;
  sorted.reserve(views.size());
  for (size_t i = 0; i < views.size(); ++i) {
    if (views[i].data != nullptr && views[i].numel > 0) sorted.push_back(footprint(views[i], i));
  }
  std::sort(sorted.begin(), sorted.end(), [](const Footprint& a, const Footprint& b) { return a.begin < b.begin; });
  std::vector<const Footprint*> open;  // those whose bounds may reach the next one; mostly only the last
  for (const Footprint& next : sorted) {
    open.erase(std::remove_if(open.begin(), open.end(), [&](const Footprint* part) { return part->end <= next.begin; }),
               open.end());
    for (const Footprint* part : open) {
      if (share_memory(*part, next, views)) return std::minmax(part->index, next.index);
    }
    open.push_back(&next);
  }
  return std::nullopt;
}

}  // namespace gradpack
