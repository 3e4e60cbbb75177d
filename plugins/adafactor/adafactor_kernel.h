// Adafactor's update over plain arrays (Shazeer and Stern, arXiv 1804.04235), in the form of transformers' Adafactor.
// Not the plugin, and no allocation of states.
#pragma once
#include <cstdint>
#include <vector>

#include "strata/tensor.h"
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

// One of the matrices (or vectors: rows of one element) that a tensor's rows are: runs of `run` rows, `period` rows
// from one's begin to the next's.
struct Member {
  int64_t first = 0, run = 1, period = 1, rows = 1;
  int64_t row(int64_t i) const { return first + i / run * period + i % run; }  // of the tensor, of its own row i
};

// Which matrices those are: a tensor of more than two dimensions is several, one after the other, and one step size is
// decided for all; what is `fused` (Lasting::fused) lies row by row in between, and each decides for itself.
struct Matrices {
  std::vector<Member> members;
  int64_t rows = 1, columns = 1;  // of all
  bool apart = false;
  int64_t elements() const { return rows * columns; }
  int64_t count() const { return int64_t(members.size()); }
};
Matrices matrices_of(const Shape& shape, const std::vector<int64_t>& fused);
// Those of a vector: rows of one element.
Matrices vectors_of(int64_t count, const std::vector<int64_t>& fused);

// Scratch bytes that an update needs, 64-byte aligned.
int64_t matrix_workspace(const Matrices& shape);
int64_t vector_workspace(int64_t count);

// parameter, gradient, m: (rows, columns), m may be null; row: (rows) and column: (matrices, columns), the factored
// second moment. All but the gradient are updated. The result does not depend on the number of threads.
// Reads the gradient three times and the parameter twice: the update's RMS must be known before it is applied.
void update_matrix(Threads& threads, float* parameter, const float* gradient, float* row, float* column, float* m,
                   const Matrices& shape, const Settings& settings, void* workspace);

// parameter, gradient, v (second moment), m (may be null): as many elements each as `shape` has rows.
void update_vector(Threads& threads, float* parameter, const float* gradient, float* v, float* m, const Matrices& shape,
                   const Settings& settings, void* workspace);

}  // namespace strata::adafactor
