// SM3 in one pass over memory; see sm3_kernel.h. Largest numbers do not depend on the order they are compared in, so
// the result is the same for any number of threads.
#include "plugins/sm3/sm3_kernel.h"

#include "strata/simd.h"

namespace strata::sm3 {
namespace {

struct Factors {
  float gradient_scale, momentum, weight, epsilon, decay, learning_rate;
};

Factors factors(const Settings& s, bool has_momentum) {
  return {
      float(s.gradient_scale), has_momentum ? float(s.momentum) : 0,        has_momentum ? float(1 - s.momentum) : 1,
      float(s.epsilon),        float(1 - s.learning_rate * s.weight_decay), float(s.learning_rate)};
}

// One row: `bound` is its number, `column` those of its columns, `largest` gathers the new ones. Returns the row's.
template <bool kMomentum>
STRATA_INLINE float row_step(float* p, const float* gradient, float bound, const float* column, float* momentum,
                             int64_t count, const Factors& f, float* largest) {
  float top = 0;
#pragma GCC ivdep
  for (int64_t j = 0; j < count; ++j) {
    const float g = gradient[j] * f.gradient_scale;
    const float nu = std::min(bound, column[j]) + g * g;
    float u = nu > 0 ? g / std::sqrt(nu + f.epsilon) : 0.0f;
    if (kMomentum) u = momentum[j] = f.momentum * momentum[j] + f.weight * u;
    p[j] = p[j] * f.decay - f.learning_rate * u;
    top = std::max(top, nu);
    largest[j] = std::max(largest[j], nu);
  }
  return top;
}
STRATA_SIMD float row_with(float* p, const float* g, float bound, const float* column, float* m, int64_t n,
                           const Factors& f, float* largest) {
  return row_step<true>(p, g, bound, column, m, n, f, largest);
}
STRATA_SIMD float row_without(float* p, const float* g, float bound, const float* column, float* m, int64_t n,
                              const Factors& f, float* largest) {
  return row_step<false>(p, g, bound, column, m, n, f, largest);
}

template <bool kMomentum>
STRATA_INLINE void vector_step(float* p, const float* gradient, float* accumulator, float* momentum, int64_t count,
                               const Factors& f) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const float g = gradient[i] * f.gradient_scale;
    const float nu = accumulator[i] + g * g;
    float u = nu > 0 ? g / std::sqrt(nu + f.epsilon) : 0.0f;
    if (kMomentum) u = momentum[i] = f.momentum * momentum[i] + f.weight * u;
    p[i] = p[i] * f.decay - f.learning_rate * u;
    accumulator[i] = nu;
  }
}
STRATA_SIMD void vector_with(float* p, const float* g, float* a, float* m, int64_t n, const Factors& f) {
  vector_step<true>(p, g, a, m, n, f);
}
STRATA_SIMD void vector_without(float* p, const float* g, float* a, float* m, int64_t n, const Factors& f) {
  vector_step<false>(p, g, a, m, n, f);
}

STRATA_SIMD void largest_of(float* into, const float* values, int64_t count) {
  for (int64_t j = 0; j < count; ++j) into[j] = std::max(into[j], values[j]);
}

}  // namespace

void update_matrix(Threads& threads, float* parameter, const float* gradient, float* row, float* column,
                   float* momentum, int64_t rows, int64_t columns, const Settings& settings, float* workspace) {
  const Factors f = factors(settings, momentum);
  const int count = threads.count();
  std::fill_n(workspace, count * columns, 0.0f);
  threads.parallel([&](int thread) {
    float* largest = workspace + thread * columns;
    const int64_t begin = rows * thread / count, end = rows * (thread + 1) / count;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t at = i * columns;
      row[i] = momentum ? row_with(parameter + at, gradient + at, row[i], column, momentum + at, columns, f, largest)
                        : row_without(parameter + at, gradient + at, row[i], column, nullptr, columns, f, largest);
    }
  });
  for (int thread = 1; thread < count; ++thread) largest_of(workspace, workspace + thread * columns, columns);
  std::copy_n(workspace, columns, column);
}

void update_vector(Threads& threads, float* parameter, const float* gradient, float* accumulator, float* momentum,
                   int64_t count, const Settings& settings) {
  const Factors f = factors(settings, momentum);
  threads.split(count, 4096, [&](int64_t i, int64_t e) {
    if (momentum)
      vector_with(parameter + i, gradient + i, accumulator + i, momentum + i, e - i, f);
    else
      vector_without(parameter + i, gradient + i, accumulator + i, nullptr, e - i, f);
  });
}

}  // namespace strata::sm3
