// Adafactor written plainly, for float or double: what the fast kernels are tested against. Allocates; not for
// training.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "plugins/adafactor/adafactor_kernel.h"

namespace strata::adafactor {

template <class T>
T root_mean_square(const std::vector<T>& values) {
  double sum = 0;
  for (T value : values) sum += double(value) * double(value);
  return T(std::sqrt(sum / double(values.size())));
}

// Clips the raw update of the numbers at these places, scales it to the step size and applies it.
template <class T>
void apply(T* parameter, const std::vector<T>& update, T* m, const std::vector<int64_t>& places, const Settings& s) {
  std::vector<T> before, raw;
  for (int64_t i : places) before.push_back(parameter[i]), raw.push_back(update[size_t(i)]);
  const T rate = T(step_size(s, root_mean_square(before)));
  const T clip = std::max(T(1), root_mean_square(raw) / T(s.clip_threshold));
  for (int64_t i : places) {
    T u = update[size_t(i)] / clip * rate;
    if (m) u = m[i] = T(s.beta1) * m[i] + T(1 - s.beta1) * u;
    parameter[i] = parameter[i] - T(s.weight_decay) * rate * parameter[i] - u;
  }
}

// The same for whatever decides for itself: each of the matrices, or all together.
template <class T>
void apply_each(T* parameter, const std::vector<T>& update, T* m, const Matrices& shape, const Settings& s) {
  std::vector<int64_t> places;
  for (const Member& matrix : shape.members) {
    for (int64_t l = 0; l < matrix.rows; ++l)
      for (int64_t j = 0; j < shape.columns; ++j) places.push_back(matrix.row(l) * shape.columns + j);
    if (!shape.apart) continue;
    apply(parameter, update, m, places, s);
    places.clear();
  }
  if (!shape.apart) apply(parameter, update, m, places, s);
}

template <class T>
void reference_vector(T* parameter, const T* gradient, T* v, T* m, const Matrices& shape, const Settings& s) {
  std::vector<T> update(static_cast<size_t>(shape.rows));
  const T b = T(beta2(s));
  for (int64_t i = 0; i < shape.rows; ++i) {
    const T g = gradient[i] * T(s.gradient_scale);
    v[i] = b * v[i] + (1 - b) * (g * g + T(s.epsilon1));
    update[size_t(i)] = g / std::sqrt(v[i]);
  }
  apply_each(parameter, update, m, shape, s);
}

template <class T>
void reference_matrix(T* parameter, const T* gradient, T* row, T* column, T* m, const Matrices& shape,
                      const Settings& s) {
  std::vector<T> update(static_cast<size_t>(shape.elements()));
  const int64_t columns = shape.columns;
  const T b = T(beta2(s));
  const auto square = [&](int64_t i, int64_t j) {
    const T value = gradient[i * columns + j] * T(s.gradient_scale);
    return double(value * value + T(s.epsilon1));
  };
  for (int64_t k = 0; k < shape.count(); ++k) {
    const Member& matrix = shape.members[size_t(k)];
    T* c = column + k * columns;
    double mean = 0;
    for (int64_t l = 0; l < matrix.rows; ++l) {
      T& r = row[matrix.row(l)];
      double sum = 0;
      for (int64_t j = 0; j < columns; ++j) sum += square(matrix.row(l), j);
      r = b * r + (1 - b) * T(sum / double(columns));
      mean += double(r) / double(matrix.rows);
    }
    for (int64_t j = 0; j < columns; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < matrix.rows; ++l) sum += square(matrix.row(l), j);
      c[j] = b * c[j] + (1 - b) * T(sum / double(matrix.rows));
    }
    for (int64_t l = 0; l < matrix.rows; ++l)
      for (int64_t i = matrix.row(l), j = 0; j < columns; ++j)
        update[size_t(i * columns + j)] =
            gradient[i * columns + j] * T(s.gradient_scale) / std::sqrt(row[i] / T(mean)) / std::sqrt(c[j]);
  }
  apply_each(parameter, update, m, shape, s);
}

}  // namespace strata::adafactor
