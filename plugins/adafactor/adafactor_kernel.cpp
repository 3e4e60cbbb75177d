// Adafactor's passes over memory, vectorized and threaded (adafactor_kernel.h). Work is cut into chunks that depend on
// the shape alone, and their sums are added in order, so that results are the same for any number of threads.
#include "plugins/adafactor/adafactor_kernel.h"

#include <algorithm>
#include <cmath>

#include "strata/simd.h"

namespace strata::adafactor {
namespace {

constexpr int kLanes = 32;              // independent sums, so that additions vectorize
constexpr int64_t kMostChunks = 64;     // of a matrix's rows: bounds the partial column sums
constexpr int64_t kVectorChunk = 4096;  // elements

STRATA_INLINE float total(const float (&lanes)[kLanes]) {
  float sum = 0;
  for (int l = 0; l < kLanes; ++l) sum += lanes[l];
  return sum;
}

STRATA_SIMD float sum_of_squares(const float* x, int64_t count) {
  float lanes[kLanes] = {}, rest = 0;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] += x[i + l] * x[i + l];
  for (; i < count; ++i) rest += x[i] * x[i];
  return total(lanes) + rest;
}

// One row: adds (scale·g)² + epsilon to the column sums and returns the sum over the row.
STRATA_SIMD float square_row(const float* g, float scale, float epsilon, float* column_sums, int64_t columns) {
  float lanes[kLanes] = {}, rest = 0;
  int64_t j = 0;
  for (; j + kLanes <= columns; j += kLanes) {
    float squares[kLanes];
    for (int l = 0; l < kLanes; ++l) squares[l] = (scale * g[j + l]) * (scale * g[j + l]) + epsilon;
    for (int l = 0; l < kLanes; ++l) lanes[l] += squares[l];
    for (int l = 0; l < kLanes; ++l) column_sums[j + l] += squares[l];
  }
  for (; j < columns; ++j) {
    const float square = (scale * g[j]) * (scale * g[j]) + epsilon;
    rest += square;
    column_sums[j] += square;
  }
  return total(lanes) + rest;
}

// Σ (g·factor)²
STRATA_SIMD float sum_of_scaled_squares(const float* g, const float* factor, int64_t count) {
  float lanes[kLanes] = {}, rest = 0;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] += (g[i + l] * factor[i + l]) * (g[i + l] * factor[i + l]);
  for (; i < count; ++i) rest += (g[i] * factor[i]) * (g[i] * factor[i]);
  return total(lanes) + rest;
}

// v ← b·v + (1 − b)·(x + epsilon), where x is (scale·g)².
STRATA_SIMD void decay_squares(const float* g, float scale, float epsilon, float b, float rest, float* v,
                               int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) v[i] = b * v[i] + rest * ((scale * g[i]) * (scale * g[i]) + epsilon);
}

// factor ← 1/√(x·scale)
STRATA_SIMD void inverse_roots(const float* x, float scale, float* factor, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) factor[i] = 1.0f / std::sqrt(x[i] * scale);
}

struct Application {
  float keep;  // 1 − weight decay · step size
  float beta1, rest;
};

// parameter ← keep·parameter − update, update = scale·factor·g, through the first moment when there is one.
STRATA_SIMD void apply_plain(float* parameter, const float* g, const float* factor, float scale, float keep,
                             int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) parameter[i] = keep * parameter[i] - scale * factor[i] * g[i];
}
STRATA_SIMD void apply_moment(float* parameter, const float* g, const float* factor, float scale, float* m, float keep,
                              float beta1, float rest, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const float moment = beta1 * m[i] + rest * (scale * factor[i] * g[i]);
    m[i] = moment;
    parameter[i] = keep * parameter[i] - moment;
  }
}
void apply(float* parameter, const float* g, const float* factor, float scale, float* m, const Application& a,
           int64_t count) {
  if (m)
    apply_moment(parameter, g, factor, scale, m, a.keep, a.beta1, a.rest, count);
  else
    apply_plain(parameter, g, factor, scale, a.keep, count);
}

// What the sums of squares of parameter and raw update decide.
struct Decision {
  float scale;  // of the raw update: step size over clipping
  Application application;
};
Decision decide(const Settings& s, double parameter_squares, double update_squares, int64_t count) {
  const double rate = step_size(s, std::sqrt(parameter_squares / double(count)));
  const double clip = std::max(1.0, std::sqrt(update_squares / double(count)) / s.clip_threshold);
  return {float(rate / clip), {float(1 - s.weight_decay * rate), float(s.beta1), float(1 - s.beta1)}};
}

// Hands out 64-byte aligned pieces of the workspace; with a null base it only counts.
class Pieces {
 public:
  explicit Pieces(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    T* piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// The rows of each matrix in at most kMostChunks chunks.
struct Chunks {
  int64_t rows, per_matrix, chunk_rows;
  explicit Chunks(const Matrix& shape)
      : rows(shape.rows),
        per_matrix(std::min(kMostChunks, shape.rows)),
        chunk_rows((shape.rows + per_matrix - 1) / per_matrix) {}
  int64_t begin(int64_t chunk) const { return std::min(rows, chunk * chunk_rows); }
};

struct MatrixScratch {
  float *column_sums, *row_factor, *column_factor;
  double *parameter_squares, *update_squares;
  int64_t bytes;
  MatrixScratch(const Matrix& shape, void* base) {
    Pieces pieces(base);
    const int64_t chunks = Chunks(shape).per_matrix;
    column_sums = pieces.take<float>(chunks * shape.columns);
    row_factor = pieces.take<float>(shape.batch * shape.rows);
    column_factor = pieces.take<float>(shape.batch * shape.columns);
    parameter_squares = pieces.take<double>(shape.batch * chunks);
    update_squares = pieces.take<double>(shape.batch * chunks);
    bytes = pieces.used();
  }
};

double sum(const double* values, int64_t count) {
  double result = 0;
  for (int64_t i = 0; i < count; ++i) result += values[i];
  return result;
}

}  // namespace

double beta2(const Settings& s) { return 1 - std::pow(s.step, -s.decay); }

double step_size(const Settings& s, double parameter_rms) {
  const double rate = s.learning_rate > 0 ? s.learning_rate : std::min(1e-2, 1 / std::sqrt(s.step));
  return rate * s.factor * (s.scale_parameter ? std::max(s.epsilon2, parameter_rms) : 1.0);
}

int64_t matrix_workspace(const Matrix& shape) { return MatrixScratch(shape, nullptr).bytes; }

void update_matrix(Threads& threads, float* parameter, const float* gradient, float* row, float* column, float* m,
                   const Matrix& shape, const Settings& s, void* workspace) {
  const MatrixScratch scratch(shape, workspace);
  const Chunks chunks(shape);
  const int64_t rows = shape.rows, columns = shape.columns, count = shape.batch * chunks.per_matrix;
  const double b = beta2(s);
  const float scale = float(s.gradient_scale);

  // First pass, matrix by matrix: second moments of rows and columns, squares of the parameter.
  for (int64_t k = 0; k < shape.batch; ++k) {
    float *matrix_row = row + k * rows, *matrix_column = column + k * columns;
    threads.each(chunks.per_matrix, [&](int64_t chunk) {
      float* sums = scratch.column_sums + chunk * columns;
      std::fill_n(sums, columns, 0.0f);
      double squares = 0;
      for (int64_t i = chunks.begin(chunk); i < chunks.begin(chunk + 1); ++i) {
        const int64_t at = (k * rows + i) * columns;
        const float row_sum = square_row(gradient + at, scale, float(s.epsilon1), sums, columns);
        matrix_row[i] = float(b * matrix_row[i] + (1 - b) * row_sum / double(columns));
        squares += sum_of_squares(parameter + at, columns);
      }
      scratch.parameter_squares[k * chunks.per_matrix + chunk] = squares;
    });
    threads.split(columns, 64, [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; ++j) {
        double column_sum = 0;
        for (int64_t c = 0; c < chunks.per_matrix; ++c) column_sum += scratch.column_sums[c * columns + j];
        matrix_column[j] = float(b * matrix_column[j] + (1 - b) * column_sum / double(rows));
      }
    });
    double mean = 0;
    for (int64_t i = 0; i < rows; ++i) mean += matrix_row[i];
    inverse_roots(matrix_row, float(double(rows) / mean), scratch.row_factor + k * rows, rows);
    inverse_roots(matrix_column, 1.0f, scratch.column_factor + k * columns, columns);
  }

  // Second pass: the raw update's squares. Third: apply it.
  const auto each_row = [&](auto&& body) {
    threads.each(count, [&](int64_t chunk) {
      const int64_t k = chunk / chunks.per_matrix, first = chunk % chunks.per_matrix;
      for (int64_t i = chunks.begin(first); i < chunks.begin(first + 1); ++i) body(chunk, k * rows + i, k);
    });
  };
  std::fill_n(scratch.update_squares, count, 0.0);
  each_row([&](int64_t chunk, int64_t i, int64_t k) {
    const double factor = double(scratch.row_factor[i]) * scale;
    scratch.update_squares[chunk] +=
        factor * factor * sum_of_scaled_squares(gradient + i * columns, scratch.column_factor + k * columns, columns);
  });
  const Decision decision =
      decide(s, sum(scratch.parameter_squares, count), sum(scratch.update_squares, count), shape.elements());
  each_row([&](int64_t, int64_t i, int64_t k) {
    apply(parameter + i * columns, gradient + i * columns, scratch.column_factor + k * columns,
          decision.scale * scratch.row_factor[i] * scale, m ? m + i * columns : nullptr, decision.application, columns);
  });
}

int64_t vector_workspace(int64_t count) {
  Pieces pieces(nullptr);
  const int64_t chunks = (count + kVectorChunk - 1) / kVectorChunk;
  pieces.take<float>(count);
  pieces.take<double>(chunks);
  pieces.take<double>(chunks);
  return pieces.used();
}

void update_vector(Threads& threads, float* parameter, const float* gradient, float* v, float* m, int64_t count,
                   const Settings& s, void* workspace) {
  Pieces pieces(workspace);
  const int64_t chunks = (count + kVectorChunk - 1) / kVectorChunk;
  float* factor = pieces.take<float>(count);
  double* parameter_squares = pieces.take<double>(chunks);
  double* update_squares = pieces.take<double>(chunks);
  const double b = beta2(s), scale = s.gradient_scale;
  const auto size = [&](int64_t chunk) { return std::min(kVectorChunk, count - chunk * kVectorChunk); };
  threads.each(chunks, [&](int64_t chunk) {
    const int64_t at = chunk * kVectorChunk, n = size(chunk);
    decay_squares(gradient + at, float(scale), float(s.epsilon1), float(b), float(1 - b), v + at, n);
    inverse_roots(v + at, 1.0f, factor + at, n);
    parameter_squares[chunk] = sum_of_squares(parameter + at, n);
    update_squares[chunk] = scale * scale * sum_of_scaled_squares(gradient + at, factor + at, n);
  });
  const Decision decision = decide(s, sum(parameter_squares, chunks), sum(update_squares, chunks), count);
  threads.each(chunks, [&](int64_t chunk) {
    const int64_t at = chunk * kVectorChunk;
    apply(parameter + at, gradient + at, factor + at, float(decision.scale * scale), m ? m + at : nullptr,
          decision.application, size(chunk));
  });
}

}  // namespace strata::adafactor
