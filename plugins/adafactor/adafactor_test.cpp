// Adafactor: the reference against values recorded from transformers, the fast kernels against the reference.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "plugins/adafactor/adafactor_kernel.cpp"  // a plugin's code is not in the engine's library
#include "plugins/adafactor/adafactor_recorded.h"
#include "plugins/adafactor/adafactor_reference.h"

namespace strata::adafactor {
namespace {

struct Matrix {
  int64_t batch, rows, columns;  // a vector: rows = 0
  int64_t elements() const { return batch * rows * columns; }
  Matrices matrices() const { return rows == 0 ? vectors_of(columns, {}) : matrices_of({batch, rows, columns}, {}); }
};

struct Case {
  const char* name;
  Matrix shape;
  Settings settings;
  bool first_moment;
  const std::vector<double>* expected;
};

const Case kCases[] = {
    {"matrix", {1, 5, 7}, {}, false, &recorded::k_matrix},
    {"vector", {1, 0, 6}, {}, false, &recorded::k_vector},
    {"batch of matrices", {2, 3, 4}, {}, false, &recorded::k_batch_of_matrices},
    {"single row", {1, 1, 5}, {}, false, &recorded::k_single_row},
    {"first moment", {1, 4, 3}, {.beta1 = 0.9}, true, &recorded::k_first_moment},
    {"fixed rate", {1, 3, 6}, {.learning_rate = 0.02, .weight_decay = 0.1}, false, &recorded::k_fixed_rate},
    {"fixed rate, unscaled",
     {1, 0, 4},
     {.learning_rate = 0.02, .scale_parameter = false, .beta1 = 0.8},
     true,
     &recorded::k_fixed_rate_unscaled},
};

template <class T>
std::vector<T> run(const Case& c, bool fast, Threads& threads) {
  const bool vector = c.shape.rows == 0;
  const size_t count = vector ? size_t(c.shape.columns) : size_t(c.shape.elements());
  std::vector<T> p(count), g(count), m(count), second(count), column(count);
  std::vector<double> workspace(4096);
  for (size_t i = 0; i < count; ++i) p[i] = T(0.3 * std::sin(double(i) + 1));
  T* moment = c.first_moment ? m.data() : nullptr;
  for (int step = 1; step <= recorded::kSteps; ++step) {
    for (size_t i = 0; i < count; ++i) g[i] = T(std::cos(0.7 * double(i) + step) / step);
    Settings settings = c.settings;
    settings.step = step;
    if constexpr (std::is_same_v<T, float>) {
      if (fast && vector)
        update_vector(threads, p.data(), g.data(), second.data(), moment, c.shape.matrices(), settings,
                      workspace.data());
      else if (fast)
        update_matrix(threads, p.data(), g.data(), second.data(), column.data(), moment, c.shape.matrices(), settings,
                      workspace.data());
      if (fast) continue;
    }
    if (vector)
      reference_vector(p.data(), g.data(), second.data(), moment, c.shape.matrices(), settings);
    else
      reference_matrix(p.data(), g.data(), second.data(), column.data(), moment, c.shape.matrices(), settings);
  }
  return p;
}

TEST(Adafactor, ReferenceReproducesTransformers) {
  Threads threads(1);
  for (const Case& c : kCases) {
    const auto p = run<double>(c, false, threads);
    ASSERT_EQ(p.size(), c.expected->size());
    // Recorded with 12 digits.
    for (size_t i = 0; i < p.size(); ++i) EXPECT_NEAR(p[i], (*c.expected)[i], 1e-11) << c.name << " " << i;
  }
}

TEST(Adafactor, KernelsReproduceTransformers) {
  Threads threads(2);
  for (const Case& c : kCases) {
    const auto p = run<float>(c, true, threads);
    // Five steps in float: each adds a few roundings of 2^-24 to values below 0.5.
    for (size_t i = 0; i < p.size(); ++i) EXPECT_NEAR(p[i], (*c.expected)[i], 5e-7) << c.name << " " << i;
  }
}

struct Random {
  std::vector<float> p, g, m, second, column;
};

Random random_arrays(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Random r;
  for (int64_t i = 0; i < count; ++i) {
    r.p.push_back(normal(random));
    r.g.push_back(1e-3f * normal(random));
    r.m.push_back(1e-3f * normal(random));
    r.second.push_back(1e-6f * std::abs(normal(random)));
    r.column.push_back(1e-6f * std::abs(normal(random)));
  }
  return r;
}

std::vector<double> wide(const std::vector<float>& values) { return {values.begin(), values.end()}; }

// The factored moments are sums of positive terms, so errors stay relative: sums of up to 6400 floats in 32 lanes and
// chunks of 100 rows lose at most about 300 roundings of 2^-24 in the worst case, square roots halve that.
constexpr double kRelative = 1e-5;

TEST(Adafactor, MatrixKernelAgreesWithReferenceInDouble) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  const Matrix shapes[] = {{1, 1, 1},   {1, 1, 33},  {1, 33, 1},    {1, 3, 31},
                           {1, 17, 32}, {2, 65, 63}, {3, 100, 129}, {1, 300, 64}};
  for (const Matrix& shape : shapes)
    for (bool first_moment : {false, true}) {
      Random r = random_arrays(shape.elements(), seed);
      auto p = wide(r.p), g = wide(r.g), m = wide(r.m), row = wide(r.second), column = wide(r.column);
      const Settings s{.step = 7, .factor = 0.5, .beta1 = 0.9, .weight_decay = 0.01, .gradient_scale = 0.4};
      Threads threads(2);
      std::vector<double> workspace(size_t(matrix_workspace(shape.matrices()) / 8));
      reference_matrix(p.data(), g.data(), row.data(), column.data(), first_moment ? m.data() : nullptr,
                       shape.matrices(), s);
      update_matrix(threads, r.p.data(), r.g.data(), r.second.data(), r.column.data(),
                    first_moment ? r.m.data() : nullptr, shape.matrices(), s, workspace.data());
      for (int64_t i = 0; i < shape.batch * shape.rows; ++i) ASSERT_NEAR(r.second[i], row[i], kRelative * row[i]);
      for (int64_t i = 0; i < shape.batch * shape.columns; ++i)
        ASSERT_NEAR(r.column[i], column[i], kRelative * column[i]);
      const double largest = 0.02;  // step size times a clipped element: bounds what can differ in an update
      for (int64_t i = 0; i < shape.elements(); ++i)
        ASSERT_NEAR(r.p[i], p[i], 1.2e-7 * std::abs(p[i]) + 10 * kRelative * largest)
            << shape.rows << "x" << shape.columns;
    }
}

TEST(Adafactor, VectorKernelAgreesWithReferenceInDouble) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  for (int64_t count : {1, 15, 16, 17, 31, 32, 33, 4095, 4097, 9000}) {
    Random r = random_arrays(count, seed);
    auto p = wide(r.p), g = wide(r.g), m = wide(r.m), v = wide(r.second);
    const Settings s{.step = 3, .gradient_scale = 2};
    Threads threads(3);
    std::vector<double> workspace(size_t(vector_workspace(count) / 8));
    reference_vector(p.data(), g.data(), v.data(), static_cast<double*>(nullptr), vectors_of(count, {}), s);
    update_vector(threads, r.p.data(), r.g.data(), r.second.data(), nullptr, vectors_of(count, {}), s,
                  workspace.data());
    for (int64_t i = 0; i < count; ++i) {
      ASSERT_NEAR(r.second[i], v[i], 1e-6 * v[i]);
      ASSERT_NEAR(r.p[i], p[i], 1.2e-7 * std::abs(p[i]) + kRelative * 0.02);
    }
  }
}

// What is fused is, bit for bit, what each matrix would be alone.
template <class T>
std::vector<T> taken(const std::vector<T>& values, const Member& member, int64_t columns) {
  std::vector<T> own;
  for (int64_t i = 0; i < member.rows; ++i)
    for (int64_t j = 0; j < columns; ++j) own.push_back(values[size_t(member.row(i) * columns + j)]);
  return own;
}

TEST(Adafactor, FusedMatricesAreMatricesOfTheirOwn) {
  const int64_t columns = 33;
  const std::vector<int64_t> fused = {6, 3, 3};
  const Matrices shape = matrices_of({60, columns}, fused);
  const Settings s{.step = 5, .beta1 = 0.9, .weight_decay = 0.01};
  Threads threads(2);
  std::vector<double> workspace(size_t(matrix_workspace(shape) / 8));
  Random all = random_arrays(60 * columns, 3);
  const Random before = all;
  update_matrix(threads, all.p.data(), all.g.data(), all.second.data(), all.column.data(), all.m.data(), shape, s,
                workspace.data());
  for (int64_t k = 0; k < shape.count(); ++k) {
    const Member& member = shape.members[size_t(k)];
    EXPECT_EQ(member.rows, 5 * fused[size_t(k)]);
    const Matrices alone = matrices_of({member.rows, columns}, {});
    auto p = taken(before.p, member, columns), g = taken(before.g, member, columns),
         m = taken(before.m, member, columns), row = taken(before.second, member, 1);
    std::vector<float> column(before.column.begin() + k * columns, before.column.begin() + (k + 1) * columns);
    update_matrix(threads, p.data(), g.data(), row.data(), column.data(), m.data(), alone, s, workspace.data());
    EXPECT_EQ(taken(all.p, member, columns), p) << k;
    EXPECT_EQ(taken(all.m, member, columns), m) << k;
    EXPECT_EQ(taken(all.second, member, 1), row) << k;
  }
}

TEST(Adafactor, FusedVectorsAreVectorsOfTheirOwn) {
  const Matrices shape = vectors_of(40, {4, 2, 2});
  const Settings s{.step = 5};
  Threads threads(2);
  std::vector<double> workspace(size_t(vector_workspace(40) / 8));
  Random all = random_arrays(40, 4);
  const Random before = all;
  update_vector(threads, all.p.data(), all.g.data(), all.second.data(), nullptr, shape, s, workspace.data());
  for (const Member& member : shape.members) {
    auto p = taken(before.p, member, 1), g = taken(before.g, member, 1), v = taken(before.second, member, 1);
    reference_vector(p.data(), g.data(), v.data(), static_cast<float*>(nullptr), vectors_of(member.rows, {}), s);
    const auto now = taken(all.p, member, 1);
    for (size_t i = 0; i < p.size(); ++i) EXPECT_NEAR(now[i], p[i], 1e-6 * std::abs(p[i]) + 1e-7);
  }
}

TEST(Adafactor, SameBitsForAnyNumberOfThreads) {
  const Matrix shape{1, 203, 130};
  Random one = random_arrays(shape.elements(), 1), three = one;
  std::vector<double> workspace(size_t(matrix_workspace(shape.matrices()) / 8));
  const auto run = [&](int threads, Random& r) {
    Threads team(threads);
    update_matrix(team, r.p.data(), r.g.data(), r.second.data(), r.column.data(), nullptr, shape.matrices(), {},
                  workspace.data());
  };
  run(1, one);
  run(3, three);
  EXPECT_EQ(one.p, three.p);
  EXPECT_EQ(one.second, three.second);
  EXPECT_EQ(one.column, three.column);
}

TEST(Adafactor, AZeroGradientChangesNothing) {
  const Matrix shape{1, 3, 4};
  Random r = random_arrays(12, 1);
  r.g.assign(12, 0);
  r.second.assign(12, 0);
  r.column.assign(12, 0);
  const auto before = r.p;
  std::vector<double> workspace(size_t(matrix_workspace(shape.matrices()) / 8));
  Threads threads(1);
  update_matrix(threads, r.p.data(), r.g.data(), r.second.data(), r.column.data(), nullptr, shape.matrices(), {},
                workspace.data());
  EXPECT_EQ(r.p, before);
}

}  // namespace
}  // namespace strata::adafactor
