// Normal values from Philox by Box-Muller (strata/random.h).
#include "strata/random.h"

#include <cmath>
#include <numbers>

namespace strata {

void fill_normal(float* values, int64_t first, int64_t count, double standard_deviation, uint64_t seed,
                 uint64_t stream) {
  // Words 0, 1 of a block give values 0, 1 of a group of four, words 2, 3 the other two.
  for (int64_t i = first; i < first + count;) {
    const auto words = random_block(seed, stream, uint64_t(i / 4));
    double group[4];
    for (int pair = 0; pair < 2; ++pair) {
      const double u = (double(words[2 * pair]) + 0.5) / 4294967296.0;
      const double angle = 2 * std::numbers::pi * (double(words[2 * pair + 1]) + 0.5) / 4294967296.0;
      const double radius = standard_deviation * std::sqrt(-2 * std::log(u));
      group[2 * pair] = radius * std::cos(angle);
      group[2 * pair + 1] = radius * std::sin(angle);
    }
    for (int64_t end = i / 4 * 4 + 4; i < end && i < first + count; ++i) values[i - first] = float(group[i % 4]);
  }
}

}  // namespace strata
