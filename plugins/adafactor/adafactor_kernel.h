// Adafactor's update over plain arrays (Shazeer and Stern, arXiv 1804.04235), in the form of transformers' Adafactor.
// Not the plugin, and no allocation of states.
#pragma once
#include <cstdint>

#include "strata/threads.h"

namespace strata::adafactor {

struct Settings {
  double step = 1;              // counts from 1
  double learning_rate = 0;     // 0: relative step size min(1e-2, 1/√step)
  double factor = 1;            // the schedule's, multiplies the learning rate
  bool scale_parameter = true;  // multiply the learning rate by max(epsilon2, RMS(parameter))
  double clip_threshold = 1;    // d: the update's RMS is brought down to this
  double decay = 0.8;           // β2 of step t is 1 − t^−decay
  double epsilon1 = 1e-30;      // added to squared gradients
  double epsilon2 = 1e-3;       // least parameter scale
  double beta1 = 0;             // of the first moment; used only when there is one
  double weight_decay = 0;
  double gradient_scale = 1;  // multiplies the gradient as it is read
};

double beta2(const Settings& s);
// Step size from RMS(parameter) before the update.
double step_size(const Settings& s, double parameter_rms);

// `batch` matrices of `rows` x `columns`, one after the other.
struct Matrix {
  int64_t batch = 1, rows = 1, columns = 1;
  int64_t elements() const { return batch * rows * columns; }
};

// Scratch bytes that an update needs, 64-byte aligned.
int64_t matrix_workspace(const Matrix& shape);
int64_t vector_workspace(int64_t count);

// parameter, gradient, m: (batch, rows, columns), m may be null; row: (batch, rows) and column: (batch, columns), the
// factored second moment. All but the gradient are updated. The result does not depend on the number of threads.
// Reads the gradient three times and the parameter twice: the update's RMS must be known before it is applied.
void update_matrix(Threads& threads, float* parameter, const float* gradient, float* row, float* column, float* m,
                   const Matrix& shape, const Settings& settings, void* workspace);

// parameter, gradient, v (second moment), m (may be null): `count` elements each.
void update_vector(Threads& threads, float* parameter, const float* gradient, float* v, float* m, int64_t count,
                   const Settings& settings, void* workspace);

}  // namespace strata::adafactor
