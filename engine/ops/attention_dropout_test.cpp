// Dropout of attention's probabilities against what is written here by hand, on every backend: which ones are dropped
// is the draw of `dropout` by their place in the whole model, so a rank that holds some sequences and heads drops what
// one rank alone does; and on average nothing changes. Gradients: op_test.cpp, context_attention_test.cpp.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "engine/planning/memory_plan.h"
#include "engine/runtime/executor.h"
#include "strata/builder.h"
#include "strata/layout.h"
#include "strata/random.h"
#include "tests/backends.h"

namespace strata::attention_dropout_test {
namespace {

constexpr int64_t kBatch = 2, kTime = 7, kGroups = 2, kPerGroup = 2, kSize = 4, kHeads = kGroups * kPerGroup;
constexpr int64_t kGroupWidth = (kPerGroup + 2) * kSize;
constexpr double kProbability = 0.4;
constexpr int64_t kStream = 1234567890123;
using Floats = std::vector<float>;

struct Part {  // of sequences and groups
  int64_t sequence = 0, sequences = kBatch, group = 0, groups = kGroups;
};

// What attention gives of a part of qkv, which is `x` (B, T, K·(P+2)·D) as a whole.
Floats run(const std::string& backend, const Part& part, const Floats& x, double probability, double step,
           int microbatch) {
  Program program;
  Builder build(program);
  build.microbatch = microbatch;
  const TensorId qkv = build.data("qkv", {part.sequences, kTime, part.groups * kGroupWidth}, DType::f32),
                 seed = build.data("seed", {1}, DType::f64), at_step = build.data("step", {1}, DType::f64);
  const auto layout = [&](TensorId id, int64_t group_width) {
    program[id].layout = {
        {.dimension = 0, .axis = "data", .full = kBatch, .first = part.sequence},
        {.dimension = 2, .axis = "tensor", .full = kGroups * group_width, .first = part.group * group_width}};
  };
  Attributes attributes{{"head_size", kSize}, {"queries_per_group", kPerGroup}};
  std::vector<TensorId> inputs{qkv};
  if (probability > 0) {
    attributes.set("dropout", probability);
    attributes.set("stream", kStream);
    inputs.insert(inputs.end(), {TensorId{}, seed, at_step});
  }
  const TensorId out = build.emit("attention", inputs, attributes);
  layout(qkv, kGroupWidth);
  layout(out, kPerGroup * kSize);
  for (const TensorId id : {qkv, seed, at_step, out}) program[id].step_output = true;
  Threads threads(2);
  const MemoryPlan plan = plan_memory(program, backend, 2);
  Storage storage(program, plan, {}, {}, test::device_of(backend));
  Executor executor(program, plan, storage, backend, threads);
  float* to = static_cast<float*>(executor.pointer(qkv));
  const GlobalIndex global(program[qkv]);
  for (int64_t i = 0; i < elements(program[qkv].shape); ++i) to[i] = x[size_t(global(i))];
  *static_cast<double*>(executor.pointer(seed)) = 99;
  *static_cast<double*>(executor.pointer(at_step)) = step;
  executor.run();
  const float* from = static_cast<float*>(executor.pointer(out));
  return {from, from + elements(program[out].shape)};
}

Floats random_qkv() {
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  Floats x(size_t(kBatch * kTime * kGroups * kGroupWidth));
  for (float& value : x) value = normal(random);
  return x;
}

std::vector<std::string> backends() {
  std::vector<std::string> all = {"reference"};
  all.insert(all.end(), test::kBackends.begin(), test::kBackends.end());
  return all;
}

// softmax(q·k/√D) of the keys so far, each dropped or divided by 1 - p, times the values.
Floats by_hand(const Floats& x, double step, int microbatch) {
  Floats out;
  const int64_t width = kGroups * kGroupWidth, row = (kTime + 3) / 4 * 4;
  for (int64_t n = 0; n < kBatch; ++n)
    for (int64_t t = 0; t < kTime; ++t)
      for (int64_t head = 0; head < kHeads; ++head) {
        const int64_t group = head / kPerGroup * kGroupWidth, query = group + head % kPerGroup * kSize,
                      key = group + kPerGroup * kSize, value = key + kSize;
        const auto at = [&](int64_t time, int64_t column) {
          return double(x[size_t((n * kTime + time) * width + column)]);
        };
        double total = 0, sum[kSize] = {};
        for (int64_t k = 0; k <= t; ++k) {
          double product = 0;
          for (int64_t i = 0; i < kSize; ++i) product += at(t, query + i) * at(k, key + i);
          const double weight = std::exp(product / std::sqrt(double(kSize)));
          total += weight;
          const uint64_t place =
              uint64_t(((microbatch * kBatch + n) * kHeads + head) * kTime + t) * uint64_t(row) + uint64_t(k);
          const uint64_t stream = uint64_t(kStream) ^ (uint64_t(step) * 0x9E3779B97F4A7C15ull);
          if (random_block(99, stream, place / 4)[place % 4] < kProbability * 4294967296.0) continue;
          for (int64_t i = 0; i < kSize; ++i) sum[i] += weight / (1 - kProbability) * at(k, value + i);
        }
        for (const double s : sum) out.push_back(float(s / total));
      }
  return out;
}

TEST(AttentionDropout, IsWhatIsWrittenByHand) {
  STRATA_NEEDS_GPU();
  const Floats x = random_qkv();
  for (const int microbatch : {0, 3}) {
    const Floats want = by_hand(x, 5, microbatch);
    for (const std::string& backend : backends()) {
      const Floats got = run(backend, {}, x, kProbability, 5, microbatch);
      ASSERT_EQ(got.size(), want.size());
      for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-5) << backend << " " << i;
    }
  }
}

TEST(AttentionDropout, EveryRankDropsItsPart) {
  STRATA_NEEDS_GPU();
  const Floats x = random_qkv(), whole = run("reference", {}, x, kProbability, 2, 1);
  for (const std::string& backend : backends())
    for (const Part& part : {Part{.sequence = 1, .sequences = 1}, Part{.group = 1, .groups = 1},
                             Part{.sequence = 1, .sequences = 1, .group = 1, .groups = 1}}) {
      const Floats own = run(backend, part, x, kProbability, 2, 1);
      const int64_t width = part.groups * kPerGroup * kSize;
      for (size_t i = 0; i < own.size(); ++i) {
        const int64_t rows = int64_t(i) / width, column = int64_t(i) % width;
        const int64_t at = (part.sequence * kTime + rows) * kHeads * kSize + part.group * kPerGroup * kSize + column;
        ASSERT_NEAR(own[i], whole[size_t(at)], 1e-5) << backend << " " << i;
      }
    }
}

// Over many steps the mean is what there is without dropout; five standard deviations of what was seen.
TEST(AttentionDropout, OnAverageNothingChanges) {
  const Floats x = random_qkv(), want = run("cpu", {}, x, 0, 0, 0);
  constexpr int kSteps = 600;
  std::vector<double> sum(want.size()), squares(want.size());
  for (int step = 1; step <= kSteps; ++step) {
    const Floats got = run("cpu", {}, x, kProbability, step, 0);
    for (size_t i = 0; i < got.size(); ++i) sum[i] += got[i], squares[i] += double(got[i]) * got[i];
  }
  for (size_t i = 0; i < want.size(); ++i) {
    const double mean = sum[i] / kSteps, variance = squares[i] / kSteps - mean * mean;
    EXPECT_NEAR(mean, want[i], 5 * std::sqrt(variance / kSteps) + 1e-6) << i;
  }
}

}  // namespace
}  // namespace strata::attention_dropout_test
