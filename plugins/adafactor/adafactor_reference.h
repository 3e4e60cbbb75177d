// Adafactor written plainly, for float or double: what the fast kernels are tested against. Allocates; not for
// training.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "plugins/adafactor/adafactor_kernel.h"

namespace strata::adafactor {

template <class T>
T root_mean_square(const T* values, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += double(values[i]) * double(values[i]);
  return T(std::sqrt(sum / double(count)));
}

// Clips the raw update, scales it to the step size and applies it.
template <class T>
void apply(T* parameter, T* update, T* m, int64_t count, const Settings& s) {
  const T rate = T(step_size(s, root_mean_square(parameter, count)));
  const T clip = std::max(T(1), root_mean_square(update, count) / T(s.clip_threshold));
  for (int64_t i = 0; i < count; ++i) {
    T u = update[i] / clip * rate;
    if (m) u = m[i] = T(s.beta1) * m[i] + T(1 - s.beta1) * u;
    parameter[i] = parameter[i] - T(s.weight_decay) * rate * parameter[i] - u;
  }
}

template <class T>
void reference_vector(T* parameter, const T* gradient, T* v, T* m, int64_t count, const Settings& s) {
  std::vector<T> update(static_cast<size_t>(count));
  const T b = T(beta2(s));
  for (int64_t i = 0; i < count; ++i) {
    const T g = gradient[i] * T(s.gradient_scale);
    v[i] = b * v[i] + (1 - b) * (g * g + T(s.epsilon1));
    update[i] = g / std::sqrt(v[i]);
  }
  apply(parameter, update.data(), m, count, s);
}

template <class T>
void reference_matrix(T* parameter, const T* gradient, T* row, T* column, T* m, const Matrix& shape,
                      const Settings& s) {
  std::vector<T> update(static_cast<size_t>(shape.elements()));
  const T b = T(beta2(s));
  for (int64_t k = 0; k < shape.batch; ++k) {
    const int64_t rows = shape.rows, columns = shape.columns;
    const T* g = gradient + k * rows * columns;
    T *r = row + k * rows, *c = column + k * columns;
    std::vector<double> row_sum(rows), column_sum(columns);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) {
        const T value = g[i * columns + j] * T(s.gradient_scale);
        row_sum[i] += double(value * value + T(s.epsilon1));
        column_sum[j] += double(value * value + T(s.epsilon1));
      }
    double mean = 0;
    for (int64_t i = 0; i < rows; ++i) {
      r[i] = b * r[i] + (1 - b) * T(row_sum[i] / double(columns));
      mean += double(r[i]) / double(rows);
    }
    for (int64_t j = 0; j < columns; ++j) c[j] = b * c[j] + (1 - b) * T(column_sum[j] / double(rows));
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j)
        update[(k * rows + i) * columns + j] =
            g[i * columns + j] * T(s.gradient_scale) / std::sqrt(r[i] / T(mean)) / std::sqrt(c[j]);
  }
  apply(parameter, update.data(), m, shape.elements(), s);
}

}  // namespace strata::adafactor
