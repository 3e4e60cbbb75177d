// The vectorized mask against the plain one bit by bit: tensors that begin inside a block of four words, every length
// around the vector width, and global indices beyond 2^32 blocks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "engine/planning/memory_plan.h"
#include "engine/runtime/executor.h"
#include "strata/builder.h"
#include "strata/communicator.h"
#include "strata/layout.h"
#include "tests/backends.h"

namespace strata::dropout_test {
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

// x of ones, as what a rank holds of a whole tensor by `layout`, through a backend with all its memory.
std::vector<float> mask(const std::string& backend, const Shape& shape, const Layout& layout, int microbatch) {
  Program program;
  Builder build(program);
  build.microbatch = microbatch;
  const TensorId x = build.data("x", shape, DType::f32), seed = build.data("seed", {1}, DType::f64);
  program[x].layout = layout;
  const TensorId y = build.emit("dropout", {x, seed, seed}, {{"probability", 0.4}, {"stream", int64_t{5}}});
  program[y].layout = layout;
  program[y].step_output = true;
  Threads threads(2);
  const MemoryPlan plan = plan_memory(program, backend, 2);
  Storage storage(program, plan, {}, {}, test::device_of(backend));
  Executor executor(program, plan, storage, backend, threads);
  std::fill_n(static_cast<float*>(executor.pointer(x)), elements(shape), 1.0f);
  *static_cast<double*>(executor.pointer(seed)) = 3;
  executor.run();
  const float* out = static_cast<float*>(executor.pointer(y));
  return {out, out + elements(shape)};
}

// Whatever the splits, in any order and of any dimension, a rank drops what one rank alone drops of its elements.
TEST(Dropout, EveryRanksMaskIsItsPartOfTheWholeOne) {
  STRATA_NEEDS_GPU();
  const unsigned base = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(base));
  std::mt19937 random(base);
  const auto pick = [&](int64_t from, int64_t to) { return from + int64_t(random() % uint64_t(to - from + 1)); };
  std::vector<std::string> backends = {"reference"};
  backends.insert(backends.end(), test::kBackends.begin(), test::kBackends.end());
  for (int round = 0; round < 12; ++round) {
    Shape whole;
    for (int64_t d = pick(1, 4); d > 0; --d) whole.push_back(pick(1, 19));
    whole.back() *= pick(1, 9);
    const int microbatch = int(pick(0, 3));
    Layout layout;
    Shape shape = whole;
    for (const char* axis : {"tensor", "sequence", "shard"}) {
      const int dimension = int(pick(0, int64_t(whole.size()) - 1)), size = int(pick(1, 3));
      int64_t& left = shape[size_t(dimension)];
      if (left < size || pick(0, 2) == 0) continue;
      const Range share = share_of(left, int(pick(0, size - 1)), size);
      layout.push_back({.dimension = dimension, .axis = axis, .full = left, .first = share.begin});
      left = share.count();
    }
    const Tensor part{.name = "x", .shape = shape, .layout = layout};
    const GlobalIndex global(part);
    for (const std::string& backend : backends) {
      const std::vector<float> all = mask("reference", whole, {}, microbatch);
      const std::vector<float> own = mask(backend, shape, layout, microbatch);
      for (size_t i = 0; i < own.size(); ++i)
        ASSERT_FLOAT_EQ(own[i], all[size_t(global(int64_t(i)))])
            << backend << ", " << text(shape) << " of " << text(whole) << ", element " << i;
    }
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
}  // namespace strata::dropout_test
