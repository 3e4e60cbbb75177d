// PowerSGD: its arithmetic against values recorded from a NumPy program of the paper (which PyTorch's hook agrees
// with), each step of whole runs against a plain program in double, what it composes with, what it leaves in
// checkpoints, and what crosses the wire.
#include <cmath>
#include <mutex>
#include <random>

#include "engine/runtime/saver.h"
#include "plugins/powersgd/powersgd_kernel.cpp"  // a plugin's code is not in the engine's library
#include "plugins/powersgd/powersgd_recorded.h"
#include "tests/exchange_runs.h"
#include "tests/resumed_runs.h"

namespace strata::powersgd {
namespace {

using Values = std::vector<float>;

std::vector<float> summed(const std::vector<Values>& all) {
  Values sum = all[0];
  for (size_t w = 1; w < all.size(); ++w)
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += all[w][i];
  return sum;
}

// Three ranks, by hand. f32 beside f64: 1e-5 of values near 1.
TEST(PowerSgd, StepsAreThoseOfThePaper) {
  using namespace recorded;
  for (int threads_count : {1, 3}) {
    Threads threads(threads_count);
    const Sizes sizes{kRows, kColumns, kRank};
    constexpr size_t kElements = size_t(kRows) * kColumns;
    Values query(size_t(kRank) * kColumns);
    for (int k = 0; k < kRank; ++k)
      for (int j = 0; j < kColumns; ++j) query[size_t(k * kColumns + j)] = float(std::cos(1.1 * j + 2.9 * k));
    std::vector<Values> matrices(kRanks, Values(kElements)), queries(kRanks, query);
    for (int step = 0; step < kSteps; ++step) {
      std::vector<Values> lefts(kRanks, Values(size_t(kRank) * kRows)), rights(kRanks, query);
      for (size_t w = 0; w < kRanks; ++w) {
        Values gradient;
        for (int i = 0; i < kRows; ++i)
          for (int j = 0; j < kColumns; ++j)
            gradient.push_back(
                float(std::sin(1.7 * i + 2.3 * j * double(w + 1) + 0.9 * step) + 0.5 * std::cos(double(i * j + step))));
        project(threads, sizes, DType::f32, gradient.data(), queries[w].data(), matrices[w].data(), lefts[w].data());
      }
      Values basis = summed(lefts);
      orthonormalize(sizes, basis.data());
      for (size_t w = 0; w < kRanks; ++w)
        project_back(threads, sizes, basis.data(), matrices[w].data(), rights[w].data());
      const Values right = summed(rights);
      for (size_t w = 0; w < kRanks; ++w) {
        // Each rank decompresses some of the rows.
        const int64_t first = int64_t(w) * 5, count = std::min<int64_t>(5, kRows - first);
        Values share(size_t(count) * kColumns);
        finish(threads, sizes, kRanks, basis.data(), right.data(), matrices[w].data(), queries[w].data(), first, count,
               DType::f32, share.data());
        for (size_t i = 0; i < share.size(); ++i)
          EXPECT_NEAR(share[i] / kRanks, kMean[step][size_t(first) * kColumns + i], 1e-5) << "step " << step;
        for (size_t i = 0; i < kElements; ++i)
          EXPECT_NEAR(matrices[w][i], kErrors[step][w][i], 1e-5) << "step " << step << ", rank " << w;
      }
    }
  }
}

TEST(PowerSgd, VectorsThatDependOnOthersAreLeftOut) {
  Values left{3, 0, 4, 0, 6, 0, 8, 0, 0, 0, 0, 0, 1, 1, 1, 1e-9f, 0, 0, 0, 2};  // twice the first, and nothing
  orthonormalize({4, 0, 5}, left.data());
  const Values basis(left.begin(), left.end());
  for (int a = 0; a < 5; ++a)
    for (int b = 0; b <= a; ++b)
      EXPECT_NEAR(dot_in_f64(&basis[size_t(4 * a)], &basis[size_t(4 * b)], 4), a == b && a != 1 && a != 2 ? 1 : 0, 1e-6)
          << a << ", " << b;
  Values broken{1, 2, NAN, 1};
  orthonormalize({2, 0, 2}, broken.data());
  EXPECT_TRUE(std::isnan(broken[2]) && std::isnan(broken[3])) << "a gradient that is NaN is to be seen";
}

// Sizes that fill no register, no group of rows and no chunk, more products than are under way at a time, and a result
// that is written past the caches: against plain loops in double, to the rounding of f32 sums.
TEST(PowerSgd, PassesOfAnySizeAreThoseOfPlainLoops) {
  Threads threads(2);
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  struct Case {
    int64_t rows, columns, rank, first, count;
  };
  for (const auto& [rows, columns, rank, first, count] :
       {Case{1, 1, 1, 0, 1}, {6, 77, 3, 2, 3}, {5, 1061, 33, 0, 5}, {41, 31, 2, 40, 1}, {4099, 2051, 1, 0, 4099}}) {
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(columns) + ", rank " + std::to_string(rank));
    const Sizes sizes{rows, columns, rank};
    const auto drawn = [&](int64_t size) {
      Values values(static_cast<size_t>(size));
      for (size_t i = 0; i < values.size(); ++i) values[i] = i < 4093 ? normal(random) : values[i - 4093];
      return values;
    };
    const int64_t size = rows * columns;
    const size_t step = size > 1 << 20 ? 1009 : 1;  // of elements that are looked at
    const Values gradient = drawn(size), before = drawn(size), query = drawn(rank * columns),
                 basis = drawn(rank * rows);
    Values matrix = before, left(static_cast<size_t>(rank * rows)), right(query.size()), next = query,
           result(static_cast<size_t>(count * columns));
    project(threads, sizes, DType::f32, gradient.data(), query.data(), matrix.data(), left.data());
    for (size_t i = 0; i < matrix.size(); i += step) ASSERT_EQ(matrix[i], before[i] + gradient[i]);
    const auto at = [columns = columns](const Values& of, int64_t i, int64_t j) {
      return double(of[static_cast<size_t>(i * columns + j)]);
    };
    for (size_t e = 0; e < left.size(); e += step) {
      const int64_t k = int64_t(e) / rows, i = int64_t(e) % rows;
      double sum = 0;
      for (int64_t j = 0; j < columns; ++j) sum += at(matrix, i, j) * at(query, k, j);
      ASSERT_NEAR(left[e], sum, 1e-6 * double(columns)) << e;
    }
    project_back(threads, sizes, basis.data(), matrix.data(), right.data());
    for (size_t e = 0; e < right.size(); e += step) {
      const int64_t k = int64_t(e) / columns, j = int64_t(e) % columns;
      double sum = 0;
      for (int64_t i = 0; i < rows; ++i) sum += double(basis[static_cast<size_t>(k * rows + i)]) * at(matrix, i, j);
      ASSERT_NEAR(right[e], sum, 1e-6 * double(rows)) << e;
    }
    const Values error = matrix;
    finish(threads, sizes, 2, basis.data(), right.data(), matrix.data(), next.data(), first, count, DType::f32,
           result.data());
    EXPECT_EQ(next, right);
    double largest = 1;
    for (const float x : right) largest = std::max(largest, double(std::abs(x)));
    for (size_t e = 0; e < matrix.size(); e += step) {
      const int64_t i = int64_t(e) / columns, j = int64_t(e) % columns;
      double sum = 0;
      for (int64_t k = 0; k < rank; ++k) sum += double(basis[static_cast<size_t>(k * rows + i)]) * at(right, k, j);
      ASSERT_NEAR(matrix[e], double(error[e]) - sum / 2, 1e-5 * largest) << e;
      if (i >= first && i < first + count) {
        ASSERT_NEAR(at(result, i - first, j), sum, 1e-5 * largest) << e;
      }
    }
  }
}

// What is all 0 in a step leaves the query as it was, or nothing would cross from then on.
TEST(PowerSgd, AQueryOutlivesAGradientOfZeros) {
  Threads threads(1);
  const Sizes sizes{2, 3, 1};
  Values zero(6), query{1, 2, 3}, left(2), right(3), result(6), matrix(6);
  project(threads, sizes, DType::f32, zero.data(), query.data(), matrix.data(), left.data());
  orthonormalize(sizes, left.data());
  project_back(threads, sizes, left.data(), matrix.data(), right.data());
  finish(threads, sizes, 2, left.data(), right.data(), matrix.data(), query.data(), 0, 2, DType::f32, result.data());
  EXPECT_EQ(query, (Values{1, 2, 3}));
  EXPECT_EQ(result, zero);
}

using test::expect_near, test::kParallel, test::Look, test::run_losses, test::zero_stage;

std::string config(int ranks, const std::string& plugins, int micro_batch = 1, const std::string& mesh = "") {
  return test::exchange_config(32, 4, ranks, plugins, micro_batch, mesh);
}
const std::string kRankTwo = "[plugins.powersgd]\nrank = 2\nminimum_ratio = 1.0\n";

// Keeps what each rank gives to the exchange, and what it gets, readable after the step.
class FactorProbe final : public Plugin {
 public:
  void gradients(GradientStage& stage) override {
    Program& program = stage.build().program();
    for (const Op& op : program.ops) {
      if (op.kind->name == "powersgd_project") program[op.inputs[0]].step_output = true;
      if (op.kind->name == "powersgd_finish") program[op.outputs[0]].step_output = true;
    }
  }
};

struct OnRank {
  Values gradient, error, query;            // before the step; the gradient of it
  Values error_after, query_after, result;  // result: whole, put together
  Shape shape;
};

// A plain program of the paper in double, for one matrix: from what ranks had and gave to what they have and got.
void expect_step(const std::vector<OnRank>& ranks, const Values& result, int64_t rank) {
  const int64_t n = ranks[0].shape[0], m = ranks[0].shape[1], count = int64_t(ranks.size());
  std::vector<double> mean(size_t(n * m)), p(size_t(rank * n)), q(size_t(rank * m));
  double largest = 0;
  for (const OnRank& r : ranks) {
    EXPECT_EQ(r.query, ranks[0].query) << "queries differ";
    for (size_t i = 0; i < mean.size(); ++i) {
      mean[i] += (double(r.gradient[i]) + r.error[i]) / double(count);
      largest = std::max(largest, std::abs(double(r.gradient[i]) + r.error[i]));
    }
  }
  for (int64_t k = 0; k < rank; ++k)
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < m; ++j)
        p[size_t(k * n + i)] += mean[size_t(i * m + j)] * ranks[0].query[size_t(k * m + j)];
  for (int64_t k = 0; k < rank; ++k) {
    for (int64_t l = 0; l < k; ++l) {
      double along = 0;
      for (int64_t i = 0; i < n; ++i) along += p[size_t(k * n + i)] * p[size_t(l * n + i)];
      for (int64_t i = 0; i < n; ++i) p[size_t(k * n + i)] -= along * p[size_t(l * n + i)];
    }
    double square = 0;
    for (int64_t i = 0; i < n; ++i) square += p[size_t(k * n + i)] * p[size_t(k * n + i)];
    for (int64_t i = 0; i < n; ++i) p[size_t(k * n + i)] /= std::sqrt(square);
  }
  for (int64_t k = 0; k < rank; ++k)
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < m; ++j) q[size_t(k * m + j)] += p[size_t(k * n + i)] * mean[size_t(i * m + j)];
  // f32 sums of up to 71 terms, conditioned by the angle between the columns: 1e-4 of the largest element.
  const double most = 1e-4 * largest + 1e-12;
  double off_sum = 0, off_error = 0, off_query = 0, off_balance = 0;
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < m; ++j) {
      const size_t at = size_t(i * m + j);
      double approximation = 0, errors = 0;
      for (int64_t k = 0; k < rank; ++k) approximation += p[size_t(k * n + i)] * q[size_t(k * m + j)];
      off_sum = std::max(off_sum, std::abs(double(result[at]) - double(count) * approximation));
      for (const OnRank& r : ranks) {
        errors += r.error_after[at];
        off_error =
            std::max(off_error, std::abs(r.error_after[at] - (double(r.gradient[at]) + r.error[at] - approximation)));
      }
      off_balance = std::max(off_balance, std::abs(double(result[at]) + errors - double(count) * mean[at]));
    }
  for (size_t i = 0; i < q.size(); ++i)
    off_query = std::max(off_query, std::abs(double(ranks[0].query_after[i]) - double(count) * q[i]));
  EXPECT_LE(off_sum, double(count) * most);
  EXPECT_LE(off_error, most);
  EXPECT_LE(off_query, 10 * double(count) * most);  // of sums over rows
  // Nothing is lost but the roundings of each sum.
  EXPECT_LE(off_balance, 1e-6 * double(count) * largest + 1e-12);
}

// Under ZeRO each rank gets its share, put together here; 71 and 61 rows do not divide by the ranks.
TEST(PowerSgd, EachStepOfARunIsThePapersAndLosesNothing) {
  for (const std::string& wanting : {kParallel, zero_stage(1)})
    for (int ranks : {2, 4}) {
      SCOPED_TRACE(wanting + std::to_string(ranks));
      FactorProbe probe;
      std::mutex mutex;
      std::map<std::string, std::vector<OnRank>> seen;
      std::map<std::string, Values> results;
      std::map<std::string, int> checked;
      const Look look = [&](test::Runner& runner, World& world, int step) {
        const Program& program = runner.built.program;
        world.gather("");  // all ranks have made the step
        for (const Op& op : program.ops) {
          const bool before = op.kind->name == "powersgd_project";
          if (!before && op.kind->name != "powersgd_finish") continue;
          const std::lock_guard lock(mutex);
          const Tensor& error = program[op.inputs[before ? 1 : 0]];
          const std::string query = program[op.inputs[before ? 2 : 1]].name;
          auto& all = seen[error.name];
          all.resize(size_t(ranks));
          OnRank& own = all[size_t(world.rank())];
          own.shape = error.shape;
          if (before && step >= 0) own.gradient = runner.values(op.inputs[0]);
          if (before) continue;
          own.error_after = runner.values(error.name), own.query_after = runner.values(query);
          if (step >= 0) test::put_together(program[op.outputs[0]], runner.values(op.outputs[0]), results[error.name]);
        }
        world.gather("");
        if (world.rank() == 0)
          for (auto& [name, all] : seen) {
            SCOPED_TRACE(name + ", step " + std::to_string(step));
            if (step >= 0) expect_step(all, results[name], 2), ++checked[name];
            for (OnRank& own : all) own.error = own.error_after, own.query = own.query_after;
          }
        world.gather("");
      };
      run_losses(ranks, config(ranks, wanting + kRankTwo), 3, look, &probe);
      EXPECT_EQ(checked.size(), 10u);  // 4 matrices a block, and two embeddings
      for (const auto& [name, steps] : checked) EXPECT_EQ(steps, 3) << name;
    }
}

// Of full rank, nothing is left out but rounding, in whatever way gradients are wanted.
TEST(PowerSgd, OfFullRankItIsTheSum) {
  const std::string full = "[plugins.powersgd]\nrank = 32\nminimum_ratio = 0.4\n",
                    clip = "[plugins.clip]\nmax_norm = 0.1\n";
  const auto expected = run_losses(1, config(1, clip), 5);
  for (const std::string& wanting : {kParallel, zero_stage(1), zero_stage(2), zero_stage(3)})
    expect_near(run_losses(2, config(2, wanting + clip + full), 5), expected, 1e-4);
  for (const std::string& wanting : {kParallel, zero_stage(1), zero_stage(3)})
    expect_near(run_losses(4, config(4, wanting + clip + full, 1, "replicate = 2\n"), 5), expected, 1e-4);
}

// A gradient is compressed alike whatever is wanted of it; only the rounding of sums differs.
TEST(PowerSgd, LossesDoNotDependOnWhatElseIsEnabled) {
  test::TemporaryFolder folder;
  const std::string clip = "[plugins.clip]\nmax_norm = 0.1\n";
  const std::string nvme = "[plugins.offload]\nminimum = 0\ndirectory = \"" + folder.path() +
                           "\"\noptimizer = \"nvme\"\ngradients = \"host\"\nparameters = \"host\"\n";
  const auto expected = run_losses(2, config(2, kParallel + kRankTwo + clip, 4), 6);
  const auto plain = run_losses(2, config(2, kParallel + clip, 4), 6);
  EXPECT_NE(expected, plain);
  for (const std::string& with : {zero_stage(1), zero_stage(2), zero_stage(3), kParallel + nvme,
                                  zero_stage(3) + nvme + "[plugins.recompute]\n"}) {
    SCOPED_TRACE(with);
    expect_near(run_losses(2, config(2, with + kRankTwo + clip, 4), 6), expected, 1e-5);
  }
  // With half as large microbatches gradients accumulate before they are compressed.
  expect_near(run_losses(2, config(2, zero_stage(1) + kRankTwo + clip, 2), 6), expected, 1e-5);
  const std::string half = "[plugins.mixed_precision]\ndtype = ";
  expect_near(run_losses(2, config(2, kParallel + kRankTwo + clip + half + "\"bf16\"\n", 4), 6), expected, 2e-2);
  expect_near(run_losses(2, config(2, zero_stage(1) + kRankTwo + clip + half + "\"fp16\"\n", 4), 6), expected, 1e-2);
  expect_near(run_losses(2, config(2, zero_stage(2) + kRankTwo + clip + half + "\"bf16\"\n", 1), 6), plain, 5e-2);
  expect_near(
      run_losses(4, config(2, kParallel + kRankTwo + clip + "[plugins.tensor_parallel]\n", 4, "tensor = 2\n"), 6),
      plain, 5e-2);
}

// Steps that overflow leave errors and queries as they were.
TEST(PowerSgd, SkippedStepsChangeNothing) {
  const std::string text =
      config(2, kParallel + kRankTwo + "[plugins.mixed_precision]\ndtype = \"fp16\"\nloss_scale = 33554432.0\n");
  int skipped = 0, made = 0;
  std::map<std::string, Values> before;
  run_losses(2, text, 6, [&](test::Runner& runner, World& world, int step) {
    if (world.rank() != 0) return;
    bool changed = false;
    for (const Tensor& tensor : runner.storage->persistent_tensors()) {
      if (tensor.name.text().find(".powersgd.") == std::string::npos) continue;
      const Values now = runner.values(tensor.name);
      for (float value : now) ASSERT_TRUE(std::isfinite(value)) << tensor.name;
      changed |= before[tensor.name] != now;
      before[tensor.name] = now;
    }
    if (step >= 0) ++(changed ? made : skipped);
  });
  EXPECT_GT(skipped, 0);
  EXPECT_GT(made, 0);
}

// 2 (n − 1) / n of what is summed: factors of what is compressed, and the rest as it is; as planned, and as sent. Of
// two ranks: more hand sums as small as these to all others at once.
TEST(PowerSgd, BytesOnTheWireFollowTheFormula) {
  const int ranks = 2;
  std::mutex mutex;
  double sent = 0, planned = 0, elements_crossing = 0;
  run_losses(ranks, config(ranks, kParallel + kRankTwo), 1, [&](test::Runner& runner, World& world, int step) {
    if (step < 0) return;
    const std::lock_guard lock(mutex);
    for (const auto& [axis, group] : runner.groups)
      if (axis != "loop") sent += double(group->bytes_sent());
    if (world.rank() != 0) return;
    const Program& program = runner.built.program;
    for (TensorId id : program.with_role(Role::parameter)) {
      const Shape shape = program[id].shape;
      const bool thin = shape.size() == 2 && shape[0] * shape[1] >= 2 * (shape[0] + shape[1]);
      elements_crossing += thin ? 2 * double(shape[0] + shape[1]) : double(elements(shape));
    }
    for (const Op& op : program.ops)
      if (op.kind->name == "all_reduce")
        for (TensorId id : op.inputs) planned += double(program[id].bytes());
  });
  EXPECT_EQ(planned, 4 * elements_crossing);
  EXPECT_EQ(sent / ranks, 2.0 * (ranks - 1) / ranks * planned);
}

// Each matrix crosses in the rank of the first pattern that fits it.
TEST(PowerSgd, RanksByPattern) {
  const std::string ranks = "matrix_ranks = [\"embedding.*: 0\", \"block.0.*: 1\", \"block.*: 3\"]\n";
  run_losses(2, config(2, kParallel + kRankTwo + ranks), 1, [&](test::Runner& runner, World& world, int step) {
    if (step < 0 || world.rank() != 0) return;
    const Program& program = runner.built.program;
    double planned = 0, expected = 0;
    int compressed = 0;
    for (TensorId id : program.with_role(Role::parameter)) {
      const std::string name = program[id].name;
      const Shape shape = program[id].shape;
      const int64_t rank = name.starts_with("embedding.") ? 0
                           : name.starts_with("block.0.") ? 1
                           : name.starts_with("block.")   ? 3
                                                          : 2;
      const bool thin = rank > 0 && shape.size() == 2 && shape[0] * shape[1] >= rank * (shape[0] + shape[1]);
      expected += 4 * (thin ? double(rank * (shape[0] + shape[1])) : double(elements(shape)));
      compressed += thin;
    }
    for (const Op& op : program.ops)
      if (op.kind->name == "all_reduce")
        for (TensorId id : op.inputs) planned += double(program[id].bytes());
    EXPECT_EQ(planned, expected);
    EXPECT_GT(compressed, 6);
  });
  const auto refused = [](const std::string& entry) {
    return test::usage_error_of(config(2, kParallel + kRankTwo + "matrix_ranks = [" + entry + "]\n"));
  };
  for (const std::string entry : {"\"block.*\"", "\"block.*: x\"", "\": 3\"", "\"block.*: -1\""})
    EXPECT_NE(refused(entry).find("expected \"PATTERN: RANK\""), std::string::npos) << refused(entry);
  EXPECT_NE(refused("\"blok.*: 3\"").find("is the first pattern of no matrix"), std::string::npos);
  EXPECT_NE(refused("\"*: 3\", \"block.*: 1\"").find("is the first pattern of no matrix"), std::string::npos);
}

using PowerSgdRuns = test::ResumedRuns;
TEST_F(PowerSgdRuns, ResumeOnceAStep) { expect_resumes(config(2, kParallel + kRankTwo + "start = 1\n", 2), 2, 3, 2); }
TEST_F(PowerSgdRuns, ResumeOfEachMicrobatch) { expect_resumes(config(2, zero_stage(2) + kRankTwo, 2), 2, 3, 2); }

// From 2 ranks to as many under another strategy: all of it. To others, and from runs without it: it begins anew.
TEST(PowerSgd, CheckpointsOfOtherRanksBeginAnew) {
  test::TemporaryFolder folder;
  const auto run = [&](int ranks, const std::string& plugins, const std::string& from, const std::string& to,
                       std::vector<std::string>* anew) {
    std::map<std::string, Values> whole;
    std::mutex mutex;
    run_losses(ranks, config(ranks, plugins), from.empty() ? 2 : 0, [&](test::Runner& runner, World& world, int step) {
      if (step != (from.empty() ? 1 : -1)) return;
      Threads threads(1);
      const Mesh mesh(world.rank(), {{"replicate", 1}, {"shard", ranks}});
      if (!to.empty()) std::filesystem::create_directories(to);
      world.gather("");
      Saver saver(*runner.storage, mesh, world, threads, to.empty() ? from : to, 1, false);
      if (!from.empty()) {
        const Saver::Loaded loaded = saver.load(find_checkpoint(from, ""), true, 1);
        if (world.rank() == 0 && anew) *anew = loaded.begun_anew;
      }
      if (!to.empty()) {
        EXPECT_EQ(saver.save({2, 16, {}, "text"}), "");
      }
      for (const Tensor& tensor : runner.storage->persistent_tensors())
        if (tensor.name.text().find(".powersgd.") != std::string::npos) {
          const Values values = runner.values(tensor.name);
          const std::lock_guard lock(mutex);
          test::put_together(tensor, values, whole[tensor.name]);
        }
      world.gather("");
    });
    return whole;
  };
  const auto saved = run(2, kParallel + kRankTwo, "", folder / "two", nullptr);
  EXPECT_EQ(saved.size(), 20u);
  std::vector<std::string> anew;
  EXPECT_EQ(run(2, kParallel + kRankTwo, folder / "two", "", &anew), saved);
  EXPECT_TRUE(anew.empty());
  const auto four = run(4, kParallel + kRankTwo, folder / "two", "", &anew);
  EXPECT_EQ(anew.size(), 10u);
  for (const auto& [name, values] : four)
    if (name.find(".error.") != std::string::npos)
      EXPECT_EQ(values, Values(saved.at(name).size() * 2)) << name;
    else
      EXPECT_EQ(values, saved.at(name)) << name;
  run(2, kParallel, "", folder / "plain", nullptr);
  const auto first = run(2, kParallel + kRankTwo, folder / "plain", "", &anew);
  EXPECT_EQ(anew.size(), 20u);
  for (const auto& [name, values] : first)
    if (name.find(".query.") != std::string::npos) {
      EXPECT_NE(values, Values(values.size())) << name;
    }
}

// Before its start a run is one without it.
TEST(PowerSgd, StartsWhenItIsTo) {
  const auto plain = run_losses(2, config(2, kParallel), 5);
  const auto later = run_losses(2, config(2, kParallel + kRankTwo + "start = 2\n"), 5);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(later[i], plain[i]) << i;  // a loss is that before the step's update
  EXPECT_NE(later[3], plain[3]);
}

TEST(PowerSgd, WhatCannotBeIsRefused) {
  const auto with = [](const std::string& options) { return "[plugins.powersgd]\n" + options; };
  std::string found = test::usage_error_of(config(2, kParallel + with("rank = 17\nminimum_ratio = 0.0\n")));
  EXPECT_NE(found.find("rank 17 is above the size of the gradient of "), std::string::npos) << found;
  EXPECT_NE(found.find("(16, 32)"), std::string::npos) << found;
  found = test::usage_error_of(config(2, kParallel + with("rank = 100\n")));
  EXPECT_NE(found.find("of rank 100, which can be up to 32 here; lower rank or minimum_ratio."), std::string::npos)
      << found;
  std::string text = config(2, kParallel + kRankTwo);
  found = test::usage_error_of("[run]\nreproducible = true\n" + text);
  EXPECT_NE(found.find("\"powersgd\" cannot work with run.reproducible, because "), std::string::npos) << found;
  found = test::usage_error_of(config(2, kParallel + with("rank = 0\n")));
  EXPECT_NE(found.find("rank"), std::string::npos) << found;
  found = test::usage_error_of(config(2, zero_stage(2) + kRankTwo + "[plugins.mixed_precision]\ndtype = \"fp16\"\n"));
  EXPECT_NE(found.find("the form \"powersgd\" of plugin \"powersgd\" needs finite gradients"), std::string::npos)
      << found;
}

}  // namespace
}  // namespace strata::powersgd
