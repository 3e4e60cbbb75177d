// Adafactor's passes over memory, vectorized and threaded (adafactor_kernel.h). Work is cut into chunks that depend on
// the shape alone, and their sums are added in order, so that results are the same for any number of threads.
#include "plugins/adafactor/adafactor_kernel.h"

#include <algorithm>
#include <cmath>

#include "strata/error.h"
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

// Hands out 64-byte aligned parts of the workspace; with a null base it only counts.
class Scratch {
 public:
  explicit Scratch(void* base) : base_(static_cast<char*>(base)) {}
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

// The rows of a matrix in at most kMostChunks chunks.
struct Chunks {
  int64_t rows, count, chunk_rows;
  explicit Chunks(const Member& matrix)
      : rows(matrix.rows), count(std::min(kMostChunks, matrix.rows)), chunk_rows((matrix.rows + count - 1) / count) {}
  int64_t begin(int64_t chunk) const { return std::min(rows, chunk * chunk_rows); }
};

// Chunk c of matrix k is number k·chunks + c.
struct MatrixScratch {
  float *column_sums, *row_factor, *column_factor;
  double *parameter_squares, *update_squares;
  Decision* decisions;
  int64_t chunks, bytes;
  MatrixScratch(const Matrices& shape, void* base) {
    Scratch scratch(base);
    chunks = 0;
    for (const Member& matrix : shape.members) chunks = std::max(chunks, Chunks(matrix).count);
    column_sums = scratch.take<float>(chunks * shape.columns);
    row_factor = scratch.take<float>(shape.rows);
    column_factor = scratch.take<float>(shape.count() * shape.columns);
    parameter_squares = scratch.take<double>(shape.count() * chunks);
    update_squares = scratch.take<double>(shape.count() * chunks);
    decisions = scratch.take<Decision>(shape.count());
    bytes = scratch.used();
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

Matrices matrices_of(const Shape& shape, const std::vector<int64_t>& fused) {
  const int64_t columns = shape.back(), all = strata::elements(shape) / columns, rows = shape[shape.size() - 2];
  Matrices result{.members = {}, .rows = all, .columns = columns, .apart = !fused.empty()};
  if (fused.empty()) {
    for (int64_t first = 0; first < all; first += rows)
      result.members.push_back({.first = first, .run = rows, .period = rows, .rows = rows});
    return result;
  }
  int64_t period = 0;
  for (int64_t run : fused) period += run;
  if (shape.size() > 2 || all % period != 0)
    throw Error("a parameter " + text(shape) + " cannot hold matrices of their own in turns of " +
                std::to_string(period) + " rows; Lasting::fused must divide the rows of a matrix or a vector.");
  int64_t first = 0;
  for (int64_t run : fused) {
    result.members.push_back({.first = first, .run = run, .period = period, .rows = all / period * run});
    first += run;
  }
  return result;
}

Matrices vectors_of(int64_t count, const std::vector<int64_t>& fused) { return matrices_of({count, 1}, fused); }

int64_t matrix_workspace(const Matrices& shape) { return MatrixScratch(shape, nullptr).bytes; }

void update_matrix(Threads& threads, float* parameter, const float* gradient, float* row, float* column, float* m,
                   const Matrices& shape, const Settings& s, void* workspace) {
  const MatrixScratch scratch(shape, workspace);
  const int64_t columns = shape.columns, chunks = scratch.chunks;
  const double b = beta2(s);
  const float scale = float(s.gradient_scale);
  std::fill_n(scratch.parameter_squares, shape.count() * chunks, 0.0);
  std::fill_n(scratch.update_squares, shape.count() * chunks, 0.0);

  // First pass, matrix by matrix: second moments of rows and columns, squares of the parameter.
  for (int64_t k = 0; k < shape.count(); ++k) {
    const Member& matrix = shape.members[size_t(k)];
    const Chunks cut(matrix);
    float* matrix_column = column + k * columns;
    threads.each(cut.count, [&](int64_t chunk) {
      float* sums = scratch.column_sums + chunk * columns;
      std::fill_n(sums, columns, 0.0f);
      double squares = 0;
      for (int64_t l = cut.begin(chunk); l < cut.begin(chunk + 1); ++l) {
        const int64_t i = matrix.row(l);
        const float row_sum = square_row(gradient + i * columns, scale, float(s.epsilon1), sums, columns);
        row[i] = float(b * row[i] + (1 - b) * row_sum / double(columns));
        squares += sum_of_squares(parameter + i * columns, columns);
      }
      scratch.parameter_squares[k * chunks + chunk] = squares;
    });
    threads.split(columns, 64, [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; ++j) {
        double column_sum = 0;
        for (int64_t c = 0; c < cut.count; ++c) column_sum += scratch.column_sums[c * columns + j];
        matrix_column[j] = float(b * matrix_column[j] + (1 - b) * column_sum / double(matrix.rows));
      }
    });
    double mean = 0;
    for (int64_t l = 0; l < matrix.rows; ++l) mean += row[matrix.row(l)];
    for (int64_t l = 0; l < matrix.rows; l += matrix.run) {
      const int64_t i = matrix.row(l);
      inverse_roots(row + i, float(double(matrix.rows) / mean), scratch.row_factor + i,
                    std::min(matrix.run, matrix.rows - l));
    }
    inverse_roots(matrix_column, 1.0f, scratch.column_factor + k * columns, columns);
  }

  // Second pass: the raw update's squares. Third: apply it.
  const auto each_row = [&](auto&& body) {
    threads.each(shape.count() * chunks, [&](int64_t chunk) {
      const int64_t k = chunk / chunks;
      const Chunks cut(shape.members[size_t(k)]);
      if (chunk % chunks >= cut.count) return;
      for (int64_t l = cut.begin(chunk % chunks); l < cut.begin(chunk % chunks + 1); ++l)
        body(chunk, shape.members[size_t(k)].row(l), k);
    });
  };
  each_row([&](int64_t chunk, int64_t i, int64_t k) {
    const double factor = double(scratch.row_factor[i]) * scale;
    scratch.update_squares[chunk] +=
        factor * factor * sum_of_scaled_squares(gradient + i * columns, scratch.column_factor + k * columns, columns);
  });
  for (int64_t k = 0; k < shape.count(); ++k) {
    const int64_t first = shape.apart ? k * chunks : 0, count = shape.apart ? chunks : shape.count() * chunks;
    scratch.decisions[k] =
        k > 0 && !shape.apart
            ? scratch.decisions[0]
            : decide(s, sum(scratch.parameter_squares + first, count), sum(scratch.update_squares + first, count),
                     shape.apart ? shape.members[size_t(k)].rows * columns : shape.elements());
  }
  each_row([&](int64_t, int64_t i, int64_t k) {
    const Decision& decision = scratch.decisions[k];
    apply(parameter + i * columns, gradient + i * columns, scratch.column_factor + k * columns,
          decision.scale * scratch.row_factor[i] * scale, m ? m + i * columns : nullptr, decision.application, columns);
  });
}

int64_t vector_workspace(int64_t count) {
  Scratch scratch(nullptr);
  const int64_t chunks = (count + kVectorChunk - 1) / kVectorChunk;
  scratch.take<float>(count);
  scratch.take<double>(chunks);
  scratch.take<double>(chunks);
  return scratch.used();
}

namespace {

// Vectors that lie in one, run by run: few numbers, so one thread does them.
void update_fused(float* parameter, const float* gradient, float* v, float* m, const Matrices& shape, const Settings& s,
                  float* factor) {
  const float scale = float(s.gradient_scale), b = float(beta2(s)), rest = float(1 - beta2(s));
  for (const Member& vector : shape.members) {
    double parameter_squares = 0, update_squares = 0;
    const auto each_run = [&](auto&& body) {
      for (int64_t l = 0; l < vector.rows; l += vector.run) body(vector.row(l), std::min(vector.run, vector.rows - l));
    };
    each_run([&](int64_t at, int64_t n) {
      decay_squares(gradient + at, scale, float(s.epsilon1), b, rest, v + at, n);
      inverse_roots(v + at, 1.0f, factor + at, n);
      parameter_squares += sum_of_squares(parameter + at, n);
      update_squares += double(scale) * scale * sum_of_scaled_squares(gradient + at, factor + at, n);
    });
    const Decision decision = decide(s, parameter_squares, update_squares, vector.rows);
    each_run([&](int64_t at, int64_t n) {
      apply(parameter + at, gradient + at, factor + at, decision.scale * scale, m ? m + at : nullptr,
            decision.application, n);
    });
  }
}

}  // namespace

void update_vector(Threads& threads, float* parameter, const float* gradient, float* v, float* m, const Matrices& shape,
                   const Settings& s, void* workspace) {
  if (shape.apart) return update_fused(parameter, gradient, v, m, shape, s, static_cast<float*>(workspace));
  const int64_t count = shape.rows;
  Scratch scratch(workspace);
  const int64_t chunks = (count + kVectorChunk - 1) / kVectorChunk;
  float* factor = scratch.take<float>(count);
  double* parameter_squares = scratch.take<double>(chunks);
  double* update_squares = scratch.take<double>(chunks);
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
