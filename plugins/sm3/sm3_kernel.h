// SM3-II's update over plain arrays (Anil, Gupta, Koren and Singer, "Memory-efficient adaptive optimization", arXiv
// 1901.11150, algorithm 2), with the cover of a matrix by its rows and columns. Not the plugin.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "strata/threads.h"

namespace strata::sm3 {

struct Settings {
  double learning_rate = 0.01;  // of this step, with the schedule's factor in it
  double momentum = 0.9;
  double epsilon = 1e-8;
  double weight_decay = 0;
  double gradient_scale = 1;
};

// For each element: nu = min(row, column) + g², u = g / sqrt(nu + epsilon) (0 where nu is 0), m ← momentum m +
// (1 - momentum) u, p ← p (1 - learning_rate weight_decay) - learning_rate m; then each row's and each column's number
// becomes the largest nu in it. `momentum` may be null: m is u then. `workspace` holds threads × columns floats.
void update_matrix(Threads& threads, float* parameter, const float* gradient, float* row, float* column,
                   float* momentum, int64_t rows, int64_t columns, const Settings& settings, float* workspace);

// A vector has a number an element: nu = accumulator + g², as Adagrad.
void update_vector(Threads& threads, float* parameter, const float* gradient, float* accumulator, float* momentum,
                   int64_t count, const Settings& settings);

// Plain loops in float or double; `columns` 0 means a vector, with its accumulator in `row`.
template <class T>
void reference_update(T* parameter, const T* gradient, T* row, T* column, T* momentum, int64_t rows, int64_t columns,
                      const Settings& s, T* largest) {
  const int64_t width = columns > 0 ? columns : 1;
  for (int64_t j = 0; j < columns; ++j) largest[j] = 0;
  for (int64_t i = 0; i < rows; ++i) {
    T top = 0;
    for (int64_t j = 0; j < width; ++j) {
      const int64_t at = i * width + j;
      const T g = gradient[at] * T(s.gradient_scale);
      const T nu = (columns > 0 ? std::min(row[i], column[j]) : row[i]) + g * g;
      T u = nu > 0 ? g / std::sqrt(nu + T(s.epsilon)) : T(0);
      if (momentum) u = momentum[at] = T(s.momentum) * momentum[at] + T(1 - s.momentum) * u;
      parameter[at] = parameter[at] * T(1 - s.learning_rate * s.weight_decay) - T(s.learning_rate) * u;
      top = std::max(top, nu);
      if (columns > 0) largest[j] = std::max(largest[j], nu);
    }
    row[i] = top;
  }
  for (int64_t j = 0; j < columns; ++j) column[j] = largest[j];
}

}  // namespace strata::sm3
