// SM3: the paper's algorithm on a case worked by hand, fast kernels against the reference, and the size of its states.
#include <gtest/gtest.h>

#include <random>

#include "plugins/sm3/sm3_kernel.cpp"  // a plugin's code is not in the engine's library
#include "tests/harness.h"

namespace strata::sm3 {
namespace {

// Two steps on a 2 × 2 matrix, from algorithm 2 with learning rate 1, no momentum and epsilon 0:
// step 1, g = [1 2; 3 0]: nu = g², update = sign; rows 4, 9, columns 9, 4.
// step 2, g = [2 0; 0 1]: nu = [4+4, 4; 9, 4+1], update = [2/√8, 0; 0, 1/√5]; rows 8, 9, columns 9, 5.
TEST(Sm3, FollowsThePaper) {
  const Settings settings{.learning_rate = 1, .momentum = 0, .epsilon = 0};
  double p[4] = {}, row[2] = {}, column[2] = {}, largest[2];
  const double first[4] = {1, 2, 3, 0}, second[4] = {2, 0, 0, 1};
  reference_update<double>(p, first, row, column, nullptr, 2, 2, settings, largest);
  const double after_first[4] = {-1, -1, -1, 0};
  for (int i = 0; i < 4; ++i) EXPECT_DOUBLE_EQ(p[i], after_first[i]);
  EXPECT_EQ(row[0], 4);
  EXPECT_EQ(row[1], 9);
  EXPECT_EQ(column[0], 9);
  EXPECT_EQ(column[1], 4);
  reference_update<double>(p, second, row, column, nullptr, 2, 2, settings, largest);
  const double after_second[4] = {-1 - 2 / std::sqrt(8.0), -1, -1, -1 / std::sqrt(5.0)};
  for (int i = 0; i < 4; ++i) EXPECT_DOUBLE_EQ(p[i], after_second[i]);
  EXPECT_EQ(row[0], 8);
  EXPECT_EQ(row[1], 9);
  EXPECT_EQ(column[0], 9);
  EXPECT_EQ(column[1], 5);
}

TEST(Sm3, FastAgreesWithReference) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  for (int threads : {1, 2, 3})
    for (auto [rows, columns] : {std::pair<int64_t, int64_t>{1, 1}, {3, 17}, {64, 33}, {257, 100}, {5000, 0}, {7, 0}})
      for (double momentum : {0.0, 0.9}) {
        Threads team(threads);
        const Settings settings{.learning_rate = 0.1, .momentum = momentum, .weight_decay = 0.1, .gradient_scale = 0.5};
        const size_t count = size_t(rows * std::max<int64_t>(1, columns));
        std::vector<float> p(count), m(count), row(static_cast<size_t>(rows)), column(static_cast<size_t>(columns)),
            work(size_t(columns) * 3);
        for (float& value : p) value = normal(random);
        std::vector<float> q = p, n = m, row2 = row, column2 = column, largest = column;
        for (int step = 0; step < 3; ++step) {
          std::vector<float> g(count);
          for (float& value : g) value = random() % 5 ? normal(random) : 0;
          float* moment = momentum > 0 ? m.data() : nullptr;
          if (columns > 0)
            update_matrix(team, p.data(), g.data(), row.data(), column.data(), moment, rows, columns, settings,
                          work.data());
          else
            update_vector(team, p.data(), g.data(), row.data(), moment, rows, settings);
          reference_update<float>(q.data(), g.data(), row2.data(), column2.data(), momentum > 0 ? n.data() : nullptr,
                                  rows, columns, settings, largest.data());
        }
        // A few roundings apart at most: multiplications and additions may be fused.
        for (size_t i = 0; i < count; ++i)
          ASSERT_NEAR(p[i], q[i], 2e-6 * (1 + std::abs(q[i]))) << rows << "x" << columns;
        for (size_t i = 0; i < row.size(); ++i) ASSERT_NEAR(row[i], row2[i], 1e-6 * row2[i]);
        for (size_t i = 0; i < column.size(); ++i) ASSERT_NEAR(column[i], column2[i], 1e-6 * column2[i]);
      }
}

std::string toml(const std::string& optimizer) {
  return "[model]\nplugin = \"gpt\"\nlayers = 2\nhidden = 32\nheads = 4\nvocabulary = 64\ncontext = 16\n"
         "[data]\ntrain = [\"none\"]\nsequence_length = 16\nglobal_batch = 4\nmicro_batch = 4\n" +
         optimizer;
}

TEST(Sm3, StatesAreRowsPlusColumns) {
  const test::Runner runner(toml("[plugins.sm3]\nmomentum = 0.0\n"));
  int64_t expected = 0;
  const Program& program = runner.built.program;
  for (TensorId id : program.with_role(Role::parameter)) {
    const Shape& shape = program[id].shape;
    expected += 4 * (shape.size() == 2 ? shape[0] + shape[1] : shape[0]);
  }
  int64_t bytes = 0;
  for (TensorId id : program.with_role(Role::optimizer_state)) bytes += program[id].bytes();
  EXPECT_EQ(bytes, expected);
}

TEST(Sm3, Learns) {
  test::Runner runner(toml("[plugins.sm3]\nlearning_rate = 0.05\n"));
  std::mt19937 random(3);
  std::vector<int32_t> tokens(64);
  for (int32_t& token : tokens) token = int32_t(random() % 64);
  const std::vector<int32_t> targets(tokens.rbegin(), tokens.rend());
  const double first = runner.run_step(tokens.data(), targets.data());
  double last = first;
  for (int step = 0; step < 60; ++step) last = runner.run_step(tokens.data(), targets.data());
  EXPECT_LT(last, 0.3 * first);
}

}  // namespace
}  // namespace strata::sm3
