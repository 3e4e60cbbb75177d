// Adafactor on the GPU: statistics of rows and columns, the update's size, then the update; sums in f64 and in a fixed
// order. The mathematics is in adafactor_kernel.h. `batch` matrices of rows x columns; a vector is handled element by
// element. Parts of a matrix that is split over ranks go the same way in three ops (adafactor_part.h).
#include "cuda/bind.h"

namespace strata::cuda::adafactor_kernels {
namespace {

constexpr int kBlock = 256, kParts = 64;  // kParts: of a matrix's rows, for sums over columns

struct Settings {
  double learning_rate, clip_threshold, decay, epsilon1, epsilon2, beta1, weight_decay;
  bool scale_parameter;
  const double *step, *factor, *scale;
  STRATA_DEVICE double gradient_scale() const { return scale ? *scale : 1.0; }
  STRATA_DEVICE bool skips() const { return gradient_scale() != gradient_scale(); }
  STRATA_DEVICE double beta2() const { return 1 - pow(*step, -decay); }
};

// What is known of the whole tensor: sums of squares of the parameter and of the raw update; then what they decide.
struct Totals {
  double parameter, update;
};

STRATA_DEVICE double block_total(double x, double* scratch) {
  scratch[threadIdx.x] = x;
  __syncthreads();
  for (int width = kBlock / 2; width > 0; width /= 2) {
    if (int(threadIdx.x) < width) scratch[threadIdx.x] += scratch[threadIdx.x + width];
    __syncthreads();
  }
  const double total = scratch[0];
  __syncthreads();
  return total;
}

// A block a row: its second moment, and the squares of its parameters.
STRATA_KERNEL rows(const float* parameter, const float* gradient, float* row, double* squares, int64_t columns,
                   Settings s) {
  __shared__ double scratch[kBlock];
  if (s.skips()) return;
  const int64_t r = blockIdx.x;
  const float scale = float(s.gradient_scale());
  double sum = 0, of_parameter = 0;
  for (int64_t j = threadIdx.x; j < columns; j += kBlock) {
    const float g = gradient[r * columns + j] * scale, p = parameter[r * columns + j];
    sum += double(g * g + float(s.epsilon1));
    of_parameter += double(p) * double(p);
  }
  sum = block_total(sum, scratch);
  of_parameter = block_total(of_parameter, scratch);
  if (threadIdx.x != 0) return;
  row[r] = float(s.beta2() * double(row[r]) + (1 - s.beta2()) * sum / double(columns));
  squares[r] = of_parameter;
}

// Columns in blockIdx.x; rows of part blockIdx.y of matrix blockIdx.z.
STRATA_KERNEL column_parts(const float* gradient, double* parts, int64_t count, int64_t columns, Settings s) {
  const int64_t j = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (j >= columns || s.skips()) return;
  const int64_t begin = count * blockIdx.y / gridDim.y, end = count * (blockIdx.y + 1) / gridDim.y;
  const float scale = float(s.gradient_scale());
  double sum = 0;
  for (int64_t i = begin; i < end; ++i) {
    const float g = gradient[(blockIdx.z * count + i) * columns + j] * scale;
    sum += double(g * g + float(s.epsilon1));
  }
  parts[(int64_t(blockIdx.z) * gridDim.y + blockIdx.y) * columns + j] = sum;
}
STRATA_KERNEL columns_of_parts(const double* parts, int count, float* column, int64_t rows, int64_t columns,
                               Settings s) {
  const int64_t j = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (j >= columns || s.skips()) return;
  double sum = 0;
  for (int p = 0; p < count; ++p) sum += parts[(int64_t(blockIdx.z) * count + p) * columns + j];
  float& c = column[blockIdx.z * columns + j];
  c = float(s.beta2() * double(c) + (1 - s.beta2()) * sum / double(rows));
}

// A block a matrix: the mean of its rows' moments.
STRATA_KERNEL row_means(const float* row, double* means, int64_t count) {
  __shared__ double scratch[kBlock];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kBlock) sum += double(row[blockIdx.x * count + i]);
  sum = block_total(sum, scratch);
  if (threadIdx.x == 0) means[blockIdx.x] = sum / double(count);
}

// A block a row: the squares of its raw update, g / sqrt(row column / mean).
STRATA_KERNEL update_squares(const float* gradient, const float* row, const float* column, const double* means,
                             double* squares, int64_t rows, int64_t columns, Settings s) {
  __shared__ double scratch[kBlock];
  const int64_t r = blockIdx.x, matrix = r / rows;
  const double scale = s.gradient_scale();
  double sum = 0;
  for (int64_t j = threadIdx.x; j < columns; j += kBlock) {
    const double g = double(gradient[r * columns + j]) * scale;
    sum += g * g / double(column[matrix * columns + j]);
  }
  sum = block_total(sum, scratch) * means[matrix] / double(row[r]);
  if (threadIdx.x == 0) squares[r] = sum;
}

STRATA_KERNEL add_up(const double* parameter, const double* update, int64_t count, Totals* totals) {
  __shared__ double scratch[kBlock];
  double p = 0, u = 0;
  for (int64_t i = threadIdx.x; i < count; i += kBlock) p += parameter[i], u += update[i];
  p = block_total(p, scratch);
  u = block_total(u, scratch);
  if (threadIdx.x == 0) *totals = {p, u};
}

// Step size over clipping, and what the parameter keeps.
STRATA_DEVICE void decide(const Settings& s, const Totals& t, double count, float& scale, float& keep) {
  const double root = sqrt(t.parameter / count), relative = 1 / sqrt(*s.step);
  double rate = s.learning_rate > 0 ? s.learning_rate : relative < 1e-2 ? relative : 1e-2;
  rate *= *s.factor * (s.scale_parameter ? (root > s.epsilon2 ? root : s.epsilon2) : 1.0);
  const double beyond = sqrt(t.update / count) / s.clip_threshold;
  scale = float(rate / (beyond > 1 ? beyond : 1.0));
  keep = float(1 - s.weight_decay * rate);
}

STRATA_DEVICE void change(const Settings& s, float u, float keep, float& parameter, float* m) {
  if (m) u = *m = float(s.beta1) * *m + float(1 - s.beta1) * u;
  parameter = keep * parameter - u;
}

STRATA_KERNEL update_rows(float* parameter, const float* gradient, const float* row, const float* column,
                          const double* means, const Totals* totals, float* m, int64_t rows, int64_t columns,
                          double count, Settings s) {
  if (s.skips()) return;
  const int64_t r = blockIdx.x, matrix = r / rows;
  float scale, keep;
  decide(s, *totals, count, scale, keep);
  const float of_row = float(double(scale) * s.gradient_scale() / sqrt(double(row[r]) / means[matrix]));
  for (int64_t j = threadIdx.x; j < columns; j += kBlock) {
    const int64_t i = r * columns + j;
    change(s, of_row * gradient[i] / sqrtf(column[matrix * columns + j]), keep, parameter[i], m ? m + i : nullptr);
  }
}

// One block for a vector: its moment, then both sums.
STRATA_KERNEL vector_statistics(const float* parameter, const float* gradient, float* v, int64_t count, Totals* totals,
                                Settings s) {
  __shared__ double scratch[kBlock];
  if (s.skips()) return;
  const float scale = float(s.gradient_scale()), b = float(s.beta2()), rest = float(1 - s.beta2());
  double p = 0, u = 0;
  for (int64_t i = threadIdx.x; i < count; i += kBlock) {
    const float g = gradient[i] * scale;
    v[i] = b * v[i] + rest * (g * g + float(s.epsilon1));
    p += double(parameter[i]) * double(parameter[i]);
    u += double(g) * double(g) / double(v[i]);
  }
  p = block_total(p, scratch);
  u = block_total(u, scratch);
  if (threadIdx.x == 0) *totals = {p, u};
}
STRATA_KERNEL update_vector(float* parameter, const float* gradient, const float* v, const Totals* totals, float* m,
                            int64_t count, Settings s) {
  const int64_t i = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (i >= count || s.skips()) return;
  float scale, keep;
  decide(s, *totals, double(count), scale, keep);
  change(s, scale * float(s.gradient_scale()) * gradient[i] / sqrtf(v[i]), keep, parameter[i], m ? m + i : nullptr);
}

struct Sizes {
  int64_t batch, rows, columns;
  int parts;
  explicit Sizes(const OpView& v) {
    const Shape& shape = v.input(0).shape;
    columns = shape.back();
    rows = shape.size() > 1 ? shape[shape.size() - 2] : 1;
    batch = elements(shape) / (rows * columns);
    parts = int(std::min<int64_t>(kParts, rows));
  }
  int64_t all_rows() const { return batch * rows; }
  int64_t doubles() const { return 2 + 2 * all_rows() + batch + batch * parts * columns; }
};
bool factored(const OpView& v) { return v.inputs() == 8; }

Settings settings(const Binding& b, int step) {
  const Attributes& a = b.attributes();
  return {a.real("learning_rate"),
          a.real("clip_threshold"),
          a.real("decay"),
          a.real("epsilon1"),
          a.real("epsilon2"),
          a.real("beta1"),
          a.real("weight_decay"),
          a.integer("scale_parameter") != 0,
          b.in<double>(step),
          b.in<double>(step + 1),
          b.has_input(step + 2) ? b.in<double>(step + 2) : nullptr};
}

const Registration kind(
    "adafactor",
    [](const Binding& b) -> Launch {
      const Settings s = settings(b, 2);
      const Sizes size(b);
      const int moment = b.has_input(5);
      float *const p = b.out<float>(0), *const m = moment ? b.out<float>(1) : nullptr,
                   *const second = b.out<float>(1 + moment);
      const float* const g = b.in<float>(1);
      auto* const totals = b.workspace<Totals>();
      void* const queue = b.queue();
      if (!factored(b)) {
        const int64_t n = count(b.input(0));
        return [=] {
          launch(vector_statistics, dim3(1), kBlock, 0, queue, p, g, second, n, totals, s);
          launch(update_vector, dim3(blocks(n, kBlock)), kBlock, 0, queue, p, g, second, totals, m, n, s);
        };
      }
      float* const column = b.out<float>(2 + moment);
      double *const of_parameter = b.workspace<double>() + 2, *const of_update = of_parameter + size.all_rows(),
                    *const means = of_update + size.all_rows(), *const parts = means + size.batch;
      return [=] {
        const dim3 each_row(unsigned(size.all_rows()));
        const unsigned across = blocks(size.columns, kBlock), batch = unsigned(size.batch);
        launch(rows, each_row, kBlock, 0, queue, p, g, second, of_parameter, size.columns, s);
        launch(column_parts, dim3(across, unsigned(size.parts), batch), kBlock, 0, queue, g, parts, size.rows,
               size.columns, s);
        launch(columns_of_parts, dim3(across, 1, batch), kBlock, 0, queue, parts, size.parts, column, size.rows,
               size.columns, s);
        launch(row_means, dim3(batch), kBlock, 0, queue, second, means, size.rows);
        launch(update_squares, each_row, kBlock, 0, queue, g, second, column, means, of_update, size.rows, size.columns,
               s);
        launch(add_up, dim3(1), kBlock, 0, queue, of_parameter, of_update, size.all_rows(), totals);
        launch(update_rows, each_row, kBlock, 0, queue, p, g, second, column, means, totals, m, size.rows, size.columns,
               double(size.all_rows() * size.columns), s);
      };
    },
    [](const OpView& v, int) { return factored(v) ? Sizes(v).doubles() * 8 : int64_t(sizeof(Totals)); });

// Sums over columns of a part's rows, then of the rows' moments and of the parameter's squares.
STRATA_KERNEL sums_of_part(const double* parts, int count, const float* row, const double* squares, int64_t rows,
                           int64_t columns, double* out, Settings s) {
  __shared__ double scratch[kBlock];
  const int64_t j = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (j < columns) {
    double sum = 0;
    for (int p = 0; p < count && !s.skips(); ++p) sum += parts[int64_t(p) * columns + j];
    out[j] = sum;
  }
  if (blockIdx.x != 0) return;
  double moments = 0, of_parameter = 0;
  for (int64_t i = threadIdx.x; i < rows && !s.skips(); i += kBlock)
    moments += double(row[i]), of_parameter += squares[i];
  moments = block_total(moments, scratch);
  of_parameter = block_total(of_parameter, scratch);
  if (threadIdx.x == 0) out[columns] = moments, out[columns + 1] = of_parameter;
}
// The columns' moments from everybody's sums, and the mean of the rows'.
STRATA_KERNEL columns_of_sums(const double* sums, float* column, int64_t columns, double all_rows, double* mean,
                              Settings s) {
  const int64_t j = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (j == 0) *mean = sums[columns] / all_rows;
  if (j < columns && !s.skips())
    column[j] = float(s.beta2() * double(column[j]) + (1 - s.beta2()) * sums[j] / all_rows);
}
STRATA_KERNEL total_squares(const double* squares, int64_t rows, double* out, Settings s) {
  __shared__ double scratch[kBlock];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < rows && !s.skips(); i += kBlock) sum += squares[i];
  sum = block_total(sum, scratch);
  if (threadIdx.x == 0) *out = sum;
}
STRATA_KERNEL totals_of_sums(const double* sums, const double* squares, int64_t columns, double all_rows,
                             Totals* totals, double* mean) {
  *totals = {sums[columns + 1], *squares};
  *mean = sums[columns] / all_rows;
}

int parts_of(int64_t rows) { return int(std::min<int64_t>(kParts, rows)); }

const Registration part_kinds[] = {
    {"adafactor_statistics",
     [](const Binding& b) -> Launch {
       const Settings s = settings(b, 3);
       const int64_t n = b.rows(1), columns = b.columns(1);
       double *const squares = b.workspace<double>(), *const parts = squares + n;
       return [=, p = b.in<float>(0), g = b.in<float>(1), row = b.out<float>(0), out = b.out<double>(1),
               queue = b.queue()] {
         const unsigned across = blocks(columns, kBlock);
         launch(rows, dim3(unsigned(n)), kBlock, 0, queue, p, g, row, squares, columns, s);
         launch(column_parts, dim3(across, unsigned(parts_of(n))), kBlock, 0, queue, g, parts, n, columns, s);
         launch(sums_of_part, dim3(across), kBlock, 0, queue, parts, parts_of(n), row, squares, n, columns, out, s);
       };
     },
     [](const OpView& v, int) { return (v.rows(1) + parts_of(v.rows(1)) * v.columns(1)) * 8; }},
    {"adafactor_update_squares",
     [](const Binding& b) -> Launch {
       const Settings s = settings(b, 4);
       const int64_t n = b.rows(0), columns = b.columns(0);
       double *const mean = b.workspace<double>(), *const squares = mean + 1;
       return [=, g = b.in<float>(0), row = b.in<float>(1), column = b.out<float>(0), sums = b.in<double>(3),
               out = b.out<double>(1), all_rows = double(b.input(0).full_shape()[0]), queue = b.queue()] {
         launch(columns_of_sums, dim3(blocks(columns, kBlock)), kBlock, 0, queue, sums, column, columns, all_rows, mean,
                s);
         launch(update_squares, dim3(unsigned(n)), kBlock, 0, queue, g, row, column, mean, squares, n, columns, s);
         launch(total_squares, dim3(1), kBlock, 0, queue, squares, n, out, s);
       };
     },
     [](const OpView& v, int) { return (v.rows(0) + 1) * 8; }},
    {"adafactor_apply",
     [](const Binding& b) -> Launch {
       const Settings s = settings(b, 7);
       const int64_t n = b.rows(1), columns = b.columns(1);
       const double all_rows = double(b.input(1).full_shape()[0]);
       auto* const totals = b.workspace<Totals>();
       auto* const mean = reinterpret_cast<double*>(totals + 1);
       return [=, p = b.out<float>(0), g = b.in<float>(1), row = b.in<float>(2), column = b.in<float>(3),
               m = b.has_input(4) ? b.out<float>(1) : nullptr, sums = b.in<double>(5), squares = b.in<double>(6),
               queue = b.queue()] {
         launch(totals_of_sums, dim3(1), 1, 0, queue, sums, squares, columns, all_rows, totals, mean);
         launch(update_rows, dim3(unsigned(n)), kBlock, 0, queue, p, g, row, column, mean, totals, m, n, columns,
                all_rows * double(columns), s);
       };
     },
     [](const OpView&, int) { return int64_t(sizeof(Totals) + 8); }}};

}  // namespace
}  // namespace strata::cuda::adafactor_kernels
