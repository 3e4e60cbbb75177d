// What tests share that draw their cases by chance. STRATA_SEED and STRATA_CASES choose what is drawn, to repeat a case
// or to look for longer.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <random>

namespace strata::test {

using Random = std::mt19937_64;

// From least to most, both included.
inline int64_t draw(Random& random, int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(random);
}

inline uint64_t first_seed() {
  const char* given = std::getenv("STRATA_SEED");
  return given ? std::strtoull(given, nullptr, 10) : 1;
}

// How many; under sanitizers a fifth of `otherwise`.
inline int cases(int otherwise) {
  const char* given = std::getenv("STRATA_CASES");
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  otherwise = (otherwise + 4) / 5;
#endif
  return given ? std::atoi(given) : otherwise;
}

}  // namespace strata::test
