// Measures FMA peak and triad bandwidth; see peak.h.
#include "engine/runtime/peak.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "engine/ops/vector.h"
#include "strata/threads.h"

namespace strata {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Sixteen chains hide the latency of four cycles on two units twice over; 2·16·16 operations a round.
STRATA_SIMD float fma_rounds(int64_t rounds) {
  simd::F chain[16];
  for (int i = 0; i < 16; ++i) chain[i] = simd::set(float(i));
  for (int64_t r = 0; r < rounds; ++r)
    for (auto& value : chain) value = value * 0.999f + 0.001f;
  simd::F total{};
  for (const auto& value : chain) total += value;
  return simd::sum(total);
}

STRATA_SIMD void triad(float* a, const float* b, const float* c, int64_t n) {
  simd::map(n, [&](int64_t i, int64_t k) STRATA_INLINE_LAMBDA { simd::put(a + i, simd::get(b + i, k) + simd::get(c + i, k) * 3.0f, k); });
}

}  // namespace

double measure_fma_peak(int threads) {
  Threads team(threads);
  constexpr int64_t kRounds = 200'000;
  volatile float sink = 0;
  double best = 1e9;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const double begin = now();
    team.parallel([&](int) { sink = fma_rounds(kRounds); });
    best = std::min(best, now() - begin);
  }
  return 2.0 * 16 * simd::kLanes * double(kRounds) * threads / best;
}

double measure_triad_bandwidth(int threads) {
  Threads team(threads);
  constexpr int64_t kElements = 32 << 20;
  std::vector<float> a(kElements), b(kElements, 1.0f), c(kElements, 2.0f);
  double best = 1e9;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const double begin = now();
    team.split(kElements, 4096, [&](int64_t i, int64_t e) { triad(a.data() + i, b.data() + i, c.data() + i, e - i); });
    best = std::min(best, now() - begin);
  }
  return 3.0 * 4 * double(kElements) / best;
}

}  // namespace strata
