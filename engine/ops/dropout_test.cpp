// The vectorized mask against the plain one bit by bit: tensors that begin inside a block of four words, every length
// around the vector width, and global indices beyond 2^32 blocks.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "strata/builder.h"

namespace strata {
namespace {

std::vector<float> run(const char* backend, int64_t count, int microbatch, double seed, double step, double probability,
                       int threads) {
  Program program;
  Builder build(program);
  build.microbatch = microbatch;
  const TensorId x = build.data("x", {count}, DType::f32), scalar = build.data("scalar", {1}, DType::f64);
  build.emit("dropout", {x, scalar, scalar}, {{"probability", probability}, {"stream", int64_t{-77}}});
  std::vector<float> in(size_t(count), 1.5f), out(size_t(count), -1);
  Threads team(threads);
  const OpView view(program, program.ops.back());
  view.op().kind->kernels.at(backend).bind(Binding(view, {in.data(), &seed, &step}, {out.data()}, nullptr, team))();
  return out;
}

TEST(Dropout, VectorAndPlainMasksAreEqual) {
  for (int64_t count : {1, 3, 4, 5, 63, 64, 65, 127, 129, 1001, 20003})
    for (int microbatch : {0, 1, 3, 1'000'000'007}) {
      const double seed = 123456789012.0, step = 42;
      EXPECT_EQ(run("cpu", count, microbatch, seed, step, 0.3, 2),
                run("reference", count, microbatch, seed, step, 0.3, 1))
          << count << " elements, microbatch " << microbatch;
    }
}

TEST(Dropout, KeptElementsAreScaledAndTheRestIsZero) {
  int64_t kept = 0;
  constexpr int64_t kCount = 100'000;
  for (float value : run("cpu", kCount, 0, 1, 1, 0.25, 2)) {
    EXPECT_TRUE(value == 0 || value == 2) << value;  // 1.5 / 0.75
    kept += value != 0;
  }
  EXPECT_NEAR(double(kept), 75'000, 5 * std::sqrt(kCount * 0.25 * 0.75));  // five standard deviations
}

TEST(Dropout, SeedAndStepChangeTheMask) {
  const auto mask = run("cpu", 1000, 0, 1, 1, 0.5, 1);
  EXPECT_NE(mask, run("cpu", 1000, 0, 2, 1, 0.5, 1));
  EXPECT_NE(mask, run("cpu", 1000, 0, 1, 2, 0.5, 1));
  EXPECT_NE(mask, run("cpu", 1000, 1, 1, 1, 0.5, 1));
}

}  // namespace
}  // namespace strata
