// Are the measured peaks possible? They are held against this machine's clock and memory, measured in other ways.
#include "engine/runtime/peak.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

namespace strata::peak_test {
namespace {

double seconds_of(auto&& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

#if defined(__x86_64__) && defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// One integer addition that waits for the one before takes one cycle.
double clock_hertz() {
  constexpr int64_t kAdditions = 2'000'000;
  double best = 0;
  for (int slice = 0; slice < 40; ++slice) {
    uint64_t value = 0;
    const double seconds = seconds_of([&] {
      for (int64_t i = 0; i < kAdditions; ++i) asm volatile("add $1, %0" : "+r"(value));
    });
    best = std::max(best, double(kAdditions) / seconds);
  }
  return best;
}

TEST(Peak, FmaIsWhatTwoUnitsOfThisWidthCanDo) {
  const double lanes = __builtin_cpu_supports("avx512f") ? 16 : __builtin_cpu_supports("avx2") ? 8 : 4;
  double limit = 0, best = 0;
  for (int i = 0; i < 5; ++i) best = std::max(best, measure_fma_peak(1));
  // Two units, two FLOPs a lane; no x86-64 machine has more. The clock is measured until nothing else runs beside.
  for (int i = 0; i < 100 && best >= 1.05 * limit; ++i) limit = std::max(limit, 2 * 2 * lanes * clock_hertz());
  // Above the limit by more than the clock's wander (2% here), FLOPs are counted that do not run: one chain of twelve
  // dropped by the compiler would show as 1.09. Below a fifth (one unit of half the width would reach a quarter), the
  // loop is not vectorized.
  EXPECT_LT(best, 1.05 * limit);
  EXPECT_GT(best, 0.2 * limit);
  // Two units at most, 64 FLOPs an instruction, of bf16.
  if (__builtin_cpu_supports("avx512bf16")) {
    const double half = measure_bf16_peak(1);
    EXPECT_LT(half, 1.05 * 2 * limit);
    EXPECT_GT(half, 0.1 * limit);
  } else {
    EXPECT_EQ(measure_bf16_peak(1), 0);
  }
}
#endif

TEST(Peak, TriadIsNearWhatCopyingMoves) {
  std::vector<char> from(128 << 20, 1), to(128 << 20, 2);
  double copy = 0;  // read and written bytes a second
  for (int pass = 0; pass < 5; ++pass)
    copy =
        std::max(copy, 2.0 * double(from.size()) / seconds_of([&] { std::memcpy(to.data(), from.data(), to.size()); }));
  const double triad = measure_triad_bandwidth(1);
  // STREAM's copy and triad lie within tens of per cent of each other on any machine; a factor of 3 either way leaves
  // room for a busy one and still catches a wrong unit, a wrong count of arrays or arrays that stay in a cache.
#if !defined(__SANITIZE_THREAD__)  // which looks at every access of the triad's, and at memcpy once
  EXPECT_GT(triad, copy / 3);
#endif
  EXPECT_LT(triad, copy * 3);
}

}  // namespace
}  // namespace strata::peak_test
