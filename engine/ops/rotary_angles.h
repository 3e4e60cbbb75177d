// Angles of rotary positions (Su et al., arXiv 2104.09864), on host and device: at position t the pair i of a head's
// first R numbers is turned by t·f(i), f(i) = base^(-2i/R), and grows by `amplitude`. What lets a model see further
// than it was first trained to slows some pairs down by `factor`: f(i)·(keep + (1 - keep)/factor), where keep, cut to
// [0, 1], is keep + keep_by_frequency·f(i) + keep_by_index·i. So position interpolation (arXiv 2306.15595), YaRN
// (2309.00071) and Llama 3.1's scaling are one form. LongRoPE (2402.13753) instead divides each f(i) by a number of its
// own.
#pragma once
#include <charconv>
#include <cmath>
#include <compare>
#include <string>

#include "strata/error.h"
#include "strata/layout.h"
#include "strata/op_kind.h"

namespace strata {

struct RotaryAngles {
  double base = 10000, factor = 1, keep = 0, keep_by_frequency = 0, keep_by_index = 0, amplitude = 1;
  int64_t rotated = 0;  // R, even
  static constexpr int64_t kMostDivisors = 128;
  int64_t divided = 0;  // how many divisors there are: R/2, or none
  double divisors[kMostDivisors] = {};

  RotaryAngles() = default;
  // Attributes base, and at most rotated (head_size otherwise), factor, keep, keep_by_frequency, keep_by_index,
  // amplitude, and divisors: R/2 numbers with commas between them. Throws Error where they are not.
  explicit RotaryAngles(const Attributes& a)
      : base(a.real("base")),
        factor(a.real("factor", 1.0)),
        keep(a.real("keep", 0.0)),
        keep_by_frequency(a.real("keep_by_frequency", 0.0)),
        keep_by_index(a.real("keep_by_index", 0.0)),
        amplitude(a.real("amplitude", 1.0)),
        rotated(a.integer("rotated", a.integer("head_size"))) {
    if (a.has("divisors")) read_divisors(a.string("divisors"));
  }

  STRATA_EVERYWHERE double frequency(int64_t i) const {
    const double f = pow(base, -2.0 * double(i) / double(rotated));
    if (divided > 0) return f / divisors[i];
    if (factor == 1) return f;
    const double kept = keep + keep_by_frequency * f + keep_by_index * double(i);
    const double share = kept < 0 ? 0 : kept > 1 ? 1 : kept;
    return f * (share + (1 - share) / factor);
  }
  auto operator<=>(const RotaryAngles&) const = default;

 private:
  void read_divisors(const std::string& text) {
    const char *at = text.data(), *const end = at + text.size();
    while (at < end && divided < kMostDivisors) {
      const auto [next, error] = std::from_chars(at, end, divisors[divided]);
      if (error != std::errc() || !(divisors[divided] > 0)) break;
      ++divided;
      at = next < end && *next == ',' ? next + 1 : next;
    }
    if (at != end || 2 * divided != rotated)
      throw Error("rotary positions of " + std::to_string(rotated) + " numbers are divided by \"" + text +
                  "\"; expected half as many positive numbers, of which " + std::to_string(kMostDivisors) +
                  " are the most.");
  }
};

}  // namespace strata
