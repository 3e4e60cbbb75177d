// Adafactor on the GPU: statistics of rows and columns, the update's size, then the update; sums in f64 and in a fixed
// order, or exactly. The mathematics is in adafactor_kernel.h. One or more matrices (Cut); a vector is rows of one
// element. Parts of what is split over ranks go the same way in three ops, those of a vector in two (adafactor_part.h).
#include <sstream>

#include "cuda/bind.h"
#include "strata/exact_sum.h"
#include "strata/optimizer.h"

namespace strata::cuda::adafactor_kernels {
namespace {

constexpr int kBlock = 256, kParts = 64;  // kParts: of a matrix's rows, for sums over columns
constexpr int kMostFused = 8;

// Which rows are here, and which matrix each belongs to (Matrices in adafactor_kernel.h).
struct Cut {
  int64_t first, rows, all_rows;   // here: `rows` from `first` on, of all
  int64_t period;                  // rows from a matrix's run to its next
  int64_t starts[kMostFused + 1];  // of runs in a period, where matrices are fused
  int64_t each;                    // of a run, where they are not
  int matrices;
  bool apart;  // fused: each decides for itself
  STRATA_DEVICE int64_t start(int k) const { return apart ? starts[k] : k * each; }
  STRATA_DEVICE int64_t run(int k) const { return apart ? starts[k + 1] - starts[k] : each; }
  STRATA_DEVICE double rows_of(int k) const { return double(all_rows / period * run(k)); }
  STRATA_DEVICE int matrix_of(int64_t row) const {  // of a row that is here
    const int64_t at = (first + row) % period;
    if (!apart) return int(at / each);
    int k = matrices - 1;
    while (starts[k] > at) --k;
    return k;
  }
  // Rows of matrix k before a row of all.
  STRATA_DEVICE int64_t below(int k, int64_t row) const {
    int64_t rest = row % period - start(k);
    rest = rest < 0 ? 0 : rest < run(k) ? rest : run(k);
    return row / period * run(k) + rest;
  }
  STRATA_DEVICE int64_t count_of(int k) const { return below(k, first + rows) - below(k, first); }
  // Where here the i-th of a matrix's rows that are here is.
  STRATA_DEVICE int64_t row_of(int k, int64_t i) const {
    const int64_t own = below(k, first) + i;
    return own / run(k) * period + start(k) + own % run(k) - first;
  }
  // Sums that decide together: of one matrix, or of all.
  int units() const { return apart ? matrices : 1; }
};

// What sums over ranks are: doubles, or exact sums of kExactSum doubles each.
STRATA_DEVICE double value_at(const double* sums, int64_t i, bool exact) {
  return exact ? value_of_sum(sums + i * kExactSum) : sums[i];
}

struct Settings : UpdateScalars {
  double clip_threshold, decay, epsilon1, epsilon2, beta1;
  bool scale_parameter;
  STRATA_DEVICE double beta2() const { return 1 - pow(step(), -decay); }
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

// The same where ranks have other columns of the rows: sums of the gradient's squares and of the parameter's, then what
// the sums over all of them say.
STRATA_KERNEL row_sums(const float* parameter, const float* gradient, double* sums, int64_t columns, int64_t most_rows,
                       Settings s) {
  __shared__ double scratch[kBlock];
  const int64_t r = blockIdx.x;
  const float scale = float(s.gradient_scale());
  double sum = 0, of_parameter = 0;
  for (int64_t j = threadIdx.x; j < columns && !s.skips(); j += kBlock) {
    const float g = gradient[r * columns + j] * scale, p = parameter[r * columns + j];
    sum += double(g * g + float(s.epsilon1));
    of_parameter += double(p) * double(p);
  }
  sum = block_total(sum, scratch);
  of_parameter = block_total(of_parameter, scratch);
  if (threadIdx.x == 0) sums[r] = sum, sums[most_rows + r] = of_parameter;
}
STRATA_KERNEL rows_of_sums(const double* sums, float* row, double* squares, int64_t rows, int64_t most_rows,
                           int64_t whole_columns, Settings s) {
  const int64_t r = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (r >= rows || s.skips()) return;
  row[r] = float(s.beta2() * double(row[r]) + (1 - s.beta2()) * sums[r] / double(whole_columns));
  squares[r] = sums[most_rows + r];
}

// Columns in blockIdx.x; rows of part blockIdx.y of matrix blockIdx.z.
STRATA_KERNEL column_parts(const float* gradient, double* parts, int64_t columns, Cut cut, Settings s) {
  const int64_t j = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (j >= columns || s.skips()) return;
  const int k = int(blockIdx.z);
  const int64_t count = cut.count_of(k);
  const int64_t begin = count * blockIdx.y / gridDim.y, end = count * (blockIdx.y + 1) / gridDim.y;
  const float scale = float(s.gradient_scale());
  double sum = 0;
  for (int64_t i = begin; i < end; ++i) {
    const float g = gradient[cut.row_of(k, i) * columns + j] * scale;
    sum += double(g * g + float(s.epsilon1));
  }
  parts[(int64_t(blockIdx.z) * gridDim.y + blockIdx.y) * columns + j] = sum;
}
STRATA_KERNEL columns_of_parts(const double* parts, int count, float* column, int64_t columns, Cut cut, Settings s) {
  const int64_t j = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (j >= columns || s.skips()) return;
  double sum = 0;
  for (int p = 0; p < count; ++p) sum += parts[(int64_t(blockIdx.z) * count + p) * columns + j];
  float& c = column[blockIdx.z * columns + j];
  c = float(s.beta2() * double(c) + (1 - s.beta2()) * sum / cut.rows_of(int(blockIdx.z)));
}

// A block a matrix: the mean of its rows' moments.
STRATA_KERNEL row_means(const float* row, double* means, Cut cut) {
  __shared__ double scratch[kBlock];
  const int k = int(blockIdx.x);
  double sum = 0;
  for (int64_t i = threadIdx.x; i < cut.count_of(k); i += kBlock) sum += double(row[cut.row_of(k, i)]);
  sum = block_total(sum, scratch);
  if (threadIdx.x == 0) means[k] = sum / cut.rows_of(k);
}

// A block a row: the squares of its raw update, g / sqrt(row column / mean).
STRATA_KERNEL update_squares(const float* gradient, const float* row, const float* column, const double* means,
                             double* squares, int64_t columns, Cut cut, Settings s) {
  __shared__ double scratch[kBlock];
  const int64_t r = blockIdx.x, matrix = cut.matrix_of(r);
  const double scale = s.gradient_scale();
  double sum = 0;
  for (int64_t j = threadIdx.x; j < columns; j += kBlock) {
    const double g = double(gradient[r * columns + j]) * scale;
    sum += g * g / double(column[matrix * columns + j]);
  }
  sum = block_total(sum, scratch) * means[matrix] / double(row[r]);
  if (threadIdx.x == 0) squares[r] = sum;
}

// A block a unit: a matrix that decides for itself, or all rows.
STRATA_KERNEL add_up(const double* parameter, const double* update, Cut cut, Totals* totals) {
  __shared__ double scratch[kBlock];
  const int k = int(blockIdx.x);
  double p = 0, u = 0;
  for (int64_t i = threadIdx.x; i < (cut.apart ? cut.count_of(k) : cut.rows); i += kBlock) {
    const int64_t r = cut.apart ? cut.row_of(k, i) : i;
    p += parameter[r], u += update[r];
  }
  p = block_total(p, scratch);
  u = block_total(u, scratch);
  if (threadIdx.x == 0) totals[k] = {p, u};
}

// Step size over clipping, and what the parameter keeps.
STRATA_DEVICE void decide(const Settings& s, const Totals& t, double count, float& scale, float& keep) {
  const double root = sqrt(t.parameter / count), relative = 1 / sqrt(s.step());
  double rate = s.learning_rate > 0 ? s.learning_rate : relative < 1e-2 ? relative : 1e-2;
  rate *= s.factor() * (s.scale_parameter ? (root > s.epsilon2 ? root : s.epsilon2) : 1.0);
  const double beyond = sqrt(t.update / count) / s.clip_threshold;
  scale = float(rate / (beyond > 1 ? beyond : 1.0));
  keep = float(1 - s.weight_decay * rate);
}

STRATA_DEVICE void change(const Settings& s, float u, float keep, float& parameter, float* m) {
  if (m) u = *m = float(s.beta1) * *m + float(1 - s.beta1) * u;
  parameter = keep * parameter - u;
}

STRATA_KERNEL update_rows(float* parameter, const float* gradient, const float* row, const float* column,
                          const double* means, const Totals* totals, float* m, int64_t columns, int64_t whole_columns,
                          Cut cut, Settings s) {
  if (s.skips()) return;
  const int64_t r = blockIdx.x, matrix = cut.matrix_of(r);
  float scale, keep;
  decide(s, totals[cut.apart ? matrix : 0],
         (cut.apart ? cut.rows_of(int(matrix)) : double(cut.all_rows)) * double(whole_columns), scale, keep);
  const float of_row = float(double(scale) * s.gradient_scale() / sqrt(double(row[r]) / means[matrix]));
  for (int64_t j = threadIdx.x; j < columns; j += kBlock) {
    const int64_t i = r * columns + j;
    change(s, of_row * gradient[i] / sqrtf(column[matrix * columns + j]), keep, parameter[i], m ? m + i : nullptr);
  }
}

// A block a vector: its moment, then both sums.
STRATA_KERNEL vector_statistics(const float* parameter, const float* gradient, float* v, Cut cut, Totals* totals,
                                Settings s) {
  __shared__ double scratch[kBlock];
  if (s.skips()) return;
  const int k = int(blockIdx.x);
  const float scale = float(s.gradient_scale()), b = float(s.beta2()), rest = float(1 - s.beta2());
  double p = 0, u = 0;
  for (int64_t l = threadIdx.x; l < cut.count_of(k); l += kBlock) {
    const int64_t i = cut.row_of(k, l);
    const float g = gradient[i] * scale;
    v[i] = b * v[i] + rest * (g * g + float(s.epsilon1));
    p += double(parameter[i]) * double(parameter[i]);
    u += double(g) * double(g) / double(v[i]);
  }
  p = block_total(p, scratch);
  u = block_total(u, scratch);
  if (threadIdx.x == 0) totals[k] = {p, u};
}
STRATA_KERNEL update_vector(float* parameter, const float* gradient, const float* v, const Totals* totals, float* m,
                            Cut cut, Settings s) {
  const int64_t i = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (i >= cut.rows || s.skips()) return;
  const int k = cut.matrix_of(i);
  float scale, keep;
  decide(s, totals[k], cut.rows_of(k), scale, keep);
  change(s, scale * float(s.gradient_scale()) * gradient[i] / sqrtf(v[i]), keep, parameter[i], m ? m + i : nullptr);
}

// The rows of `tensor`, each of `columns` numbers, of which `rows_of_one` are a matrix where none are fused.
Cut cut_of(const OpView& v, const Tensor& tensor, int64_t columns, int64_t rows_of_one) {
  Cut cut{};
  cut.rows = elements(tensor.shape) / columns;
  const Shape whole = tensor.full_shape();
  cut.all_rows = elements(whole) / (whole.size() > 1 ? whole.back() : 1);
  cut.first = box_of(tensor).offset[0];
  cut.each = rows_of_one > 0 ? rows_of_one : cut.all_rows;
  cut.matrices = int(cut.all_rows / cut.each);
  cut.period = cut.all_rows;
  if (!v.attributes().has("fused")) return cut;
  std::istringstream text(v.attributes().string("fused"));
  cut.apart = true;
  cut.matrices = 0;
  for (int64_t run; text >> run; ++cut.matrices) {
    require(cut.matrices < kMostFused, v, "at most 8 matrices fused in one on the cuda backend");
    cut.starts[cut.matrices + 1] = cut.starts[cut.matrices] + run;
  }
  cut.period = cut.starts[cut.matrices];
  return cut;
}
bool factored(const UpdateView& v) { return v.has_state(2); }
int parts_of(int64_t rows) { return int(std::min<int64_t>(kParts, rows)); }

struct Sizes {
  int64_t columns;
  Cut cut;
  int parts;
  explicit Sizes(const UpdateView& v) {
    const Shape& shape = v.parameter().shape;
    columns = factored(v) ? shape.back() : 1;
    cut = cut_of(v, v.parameter(), columns, factored(v) ? shape[shape.size() - 2] : 0);
    parts = parts_of(cut.rows / cut.matrices);
  }
  int64_t totals() const { return 2 * cut.units(); }  // doubles
  int64_t doubles() const { return totals() + 2 * cut.rows + cut.matrices + cut.matrices * int64_t(parts) * columns; }
};

// `step`: the first of the op's scalars among its inputs.
Settings settings(const Binding& b, int step) {
  const Attributes& a = b.attributes();
  return {update_scalars(b, step),
          a.real("clip_threshold"),
          a.real("decay"),
          a.real("epsilon1"),
          a.real("epsilon2"),
          a.real("beta1"),
          a.integer("scale_parameter") != 0};
}

const Registration kind(
    "adafactor",
    [](const Binding& b) -> Launch {
      const Update u(b);
      const Settings s = settings(b, Update::kStep);
      const Sizes size(u);
      const Cut cut = size.cut;
      float *const p = u.parameter<float>(), *const m = u.state<float>(0), *const second = u.state<float>(1);
      const float* const g = u.gradient<float>();
      auto* const totals = u.workspace<Totals>();
      void* const queue = u.queue();
      if (!factored(u))
        return [=] {
          launch(vector_statistics, dim3(unsigned(cut.units())), kBlock, 0, queue, p, g, second, cut, totals, s);
          launch(update_vector, dim3(blocks(cut.rows, kBlock)), kBlock, 0, queue, p, g, second, totals, m, cut, s);
        };
      float* const column = u.state<float>(2);
      double *const of_parameter = b.workspace<double>() + size.totals(), *const of_update = of_parameter + cut.rows,
                    *const means = of_update + cut.rows, *const parts = means + cut.matrices;
      return [=] {
        const dim3 each_row(unsigned(cut.rows));
        const unsigned across = blocks(size.columns, kBlock), batch = unsigned(cut.matrices);
        launch(rows, each_row, kBlock, 0, queue, p, g, second, of_parameter, size.columns, s);
        launch(column_parts, dim3(across, unsigned(size.parts), batch), kBlock, 0, queue, g, parts, size.columns, cut,
               s);
        launch(columns_of_parts, dim3(across, 1, batch), kBlock, 0, queue, parts, size.parts, column, size.columns, cut,
               s);
        launch(row_means, dim3(batch), kBlock, 0, queue, second, means, cut);
        launch(update_squares, each_row, kBlock, 0, queue, g, second, column, means, of_update, size.columns, cut, s);
        launch(add_up, dim3(unsigned(cut.units())), kBlock, 0, queue, of_parameter, of_update, cut, totals);
        launch(update_rows, each_row, kBlock, 0, queue, p, g, second, column, means, totals, m, size.columns,
               size.columns, cut, s);
      };
    },
    [](const OpView& view, int) {
      const UpdateView v(view);
      return factored(v) ? Sizes(v).doubles() * 8 : Sizes(v).totals() * 8;
    });

// Where a part's sums are (Part in adafactor_part.cpp).
struct Sums {
  int64_t columns, whole_columns;
  Cut cut;
  int64_t most_rows, most_columns;
  bool exact;
  // `like`: a tensor (rows, columns), or a vector, with the part's layout.
  Sums(const OpView& v, const Tensor& like)
      : columns(like.shape.size() > 1 ? like.shape.back() : 1),
        whole_columns(like.shape.size() > 1 ? like.full_shape().back() : 1),
        cut(cut_of(v, like, columns, 0)),
        most_rows(v.attributes().integer("most_rows", cut.rows)),
        most_columns(v.attributes().integer("most_columns", columns)),
        exact(v.attributes().integer("exact", 0) != 0) {}
  int64_t moments() const { return cut.matrices * most_columns; }  // of the first matrix, the others' after it
  int64_t squares() const { return cut.matrices * (most_columns + 1); }
  int64_t digits() const { return exact ? kExactSum : 1; }
  int parts() const { return parts_of(cut.rows); }
};

// Plainly: from the parts' sums over columns; and from the rows' numbers, a block a matrix.
STRATA_KERNEL columns_of_part(const double* parts, int count, int64_t columns, int64_t most_columns, double* out,
                              Settings s) {
  const int64_t j = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (j >= columns) return;
  double sum = 0;
  for (int p = 0; p < count && !s.skips(); ++p) sum += parts[(int64_t(blockIdx.y) * count + p) * columns + j];
  out[blockIdx.y * most_columns + j] = sum;
}
template <class T>
STRATA_KERNEL sum_of_rows(const T* values, double* out, Cut cut, Settings s) {
  __shared__ double scratch[kBlock];
  const int k = int(blockIdx.x);
  double sum = 0;
  for (int64_t i = threadIdx.x; i < cut.count_of(k) && !s.skips(); i += kBlock) sum += double(values[cut.row_of(k, i)]);
  sum = block_total(sum, scratch);
  if (threadIdx.x == 0) out[k] = sum;
}
// Exactly, so that it does not matter who has which rows: a thread a column of a matrix, and a thread a matrix.
constexpr int64_t kNumbers = int64_t(1) << 20;  // between two carries
STRATA_KERNEL exact_columns(const float* gradient, int64_t columns, double* out, Cut cut, Settings s) {
  const int64_t j = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (j >= columns) return;
  const int k = int(blockIdx.y);
  double* const sum = out + (k * columns + j) * kExactSum;
  for (int d = 0; d < kExactSum; ++d) sum[d] = 0;
  const float scale = float(s.gradient_scale());
  const int64_t count = s.skips() ? 0 : cut.count_of(k);
  for (int64_t i = 0; i < count; ++i) {
    const float g = gradient[cut.row_of(k, i) * columns + j] * scale;
    add_exactly(sum, double(g * g + float(s.epsilon1)));
    if ((i + 1) % kNumbers == 0) carry(sum);
  }
  carry(sum);
}
template <class T>
STRATA_KERNEL exact_sum_of_rows(const T* values, double* out, Cut cut, Settings s) {
  const int k = int(blockIdx.x);
  double* const sum = out + k * kExactSum;
  for (int d = 0; d < kExactSum; ++d) sum[d] = 0;
  const int64_t count = s.skips() ? 0 : cut.count_of(k);
  for (int64_t i = 0; i < count; ++i) {
    add_exactly(sum, double(values[cut.row_of(k, i)]));
    if ((i + 1) % kNumbers == 0) carry(sum);
  }
  carry(sum);
}
template <class T>
void sum_rows(void* queue, const T* values, double* out, const Sums& sums, const Settings& s) {
  const dim3 each(unsigned(sums.cut.matrices));
  if (sums.exact)
    launch(exact_sum_of_rows<T>, each, 1, 0, queue, values, out, sums.cut, s);
  else
    launch(sum_of_rows<T>, each, kBlock, 0, queue, values, out, sums.cut, s);
}

// The columns' moments from everybody's sums, and the mean of the rows'; a matrix in blockIdx.y.
STRATA_KERNEL columns_of_sums(const double* sums, float* column, int64_t columns, int64_t most_columns, double* means,
                              Cut cut, bool exact, Settings s) {
  const int64_t j = int64_t(blockIdx.x) * kBlock + threadIdx.x, k = blockIdx.y;
  if (j == 0) means[k] = value_at(sums, cut.matrices * most_columns + k, exact) / cut.rows_of(int(k));
  if (j < columns && !s.skips()) {
    float& c = column[k * columns + j];
    const double sum = value_at(sums, k * most_columns + j, exact);
    c = float(s.beta2() * double(c) + (1 - s.beta2()) * sum / cut.rows_of(int(k)));
  }
}
STRATA_KERNEL totals_of_sums(const double* sums, const double* squares, int64_t most_columns, Totals* totals,
                             double* means, Cut cut, bool exact) {
  const int64_t k = blockIdx.x;
  totals[k] = {value_at(sums, cut.matrices * (most_columns + 1) + k, exact), value_at(squares, k, exact)};
  means[k] = value_at(sums, cut.matrices * most_columns + k, exact) / cut.rows_of(int(k));
}

// Of a part of a vector: its moment, and the squares of its parameters and of its raw update.
STRATA_KERNEL vector_squares(const float* parameter, const float* gradient, float* v, double* squares, int64_t count,
                             Settings s) {
  const int64_t i = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (i >= count || s.skips()) return;
  const float g = gradient[i] * float(s.gradient_scale());
  v[i] = float(s.beta2()) * v[i] + float(1 - s.beta2()) * (g * g + float(s.epsilon1));
  squares[i] = double(parameter[i]) * double(parameter[i]);
  squares[count + i] = double(g) * double(g) / double(v[i]);
}
STRATA_KERNEL totals_of_vector(const double* sums, Totals* totals, int matrices, bool exact) {
  const int64_t k = blockIdx.x;
  totals[k] = {value_at(sums, k, exact), value_at(sums, matrices + k, exact)};
}

const Registration part_kinds[] = {
    {"adafactor_row_sums",
     [](const Binding& b) -> Launch {
       const Settings s = settings(b, 2);
       const Sums sums(b, b.input(1));
       return [=, p = b.in<float>(0), g = b.in<float>(1), out = b.out<double>(0), queue = b.queue()] {
         launch(row_sums, dim3(unsigned(sums.cut.rows)), kBlock, 0, queue, p, g, out, sums.columns, sums.most_rows, s);
       };
     }},
    {"adafactor_statistics",
     [](const Binding& b) -> Launch {
       const Settings s = settings(b, 4);
       const Sums sums(b, b.input(1));
       double *const squares = b.workspace<double>(), *const parts = squares + sums.cut.rows;
       return [=, p = b.in<float>(0), g = b.in<float>(1), of_rows = b.in<double>(3), row = b.out<float>(0),
               out = b.out<double>(1), queue = b.queue()] {
         const unsigned across = blocks(sums.columns, kBlock), matrices = unsigned(sums.cut.matrices);
         if (of_rows)
           launch(rows_of_sums, dim3(blocks(sums.cut.rows, kBlock)), kBlock, 0, queue, of_rows, row, squares,
                  sums.cut.rows, sums.most_rows, sums.whole_columns, s);
         else
           launch(rows, dim3(unsigned(sums.cut.rows)), kBlock, 0, queue, p, g, row, squares, sums.columns, s);
         if (sums.exact) {
           launch(exact_columns, dim3(across, matrices), kBlock, 0, queue, g, sums.columns, out, sums.cut, s);
         } else {
           launch(column_parts, dim3(across, unsigned(sums.parts()), matrices), kBlock, 0, queue, g, parts,
                  sums.columns, sums.cut, s);
           launch(columns_of_part, dim3(across, matrices), kBlock, 0, queue, parts, sums.parts(), sums.columns,
                  sums.most_columns, out, s);
         }
         sum_rows(queue, static_cast<const float*>(row), out + sums.moments() * sums.digits(), sums, s);
         sum_rows(queue, static_cast<const double*>(squares), out + sums.squares() * sums.digits(), sums, s);
       };
     },
     [](const OpView& v, int) {
       const Sums sums(v, v.input(1));
       return (sums.cut.rows + (sums.exact ? 0 : sums.cut.matrices * sums.parts() * sums.columns)) * 8;
     }},
    {"adafactor_update_squares",
     [](const Binding& b) -> Launch {
       const Settings s = settings(b, 4);
       const Sums where(b, b.input(0));
       double *const means = b.workspace<double>(), *const squares = means + where.cut.matrices;
       return [=, g = b.in<float>(0), row = b.in<float>(1), column = b.out<float>(0), sums = b.in<double>(3),
               out = b.out<double>(1), queue = b.queue()] {
         launch(columns_of_sums, dim3(blocks(where.columns, kBlock), unsigned(where.cut.matrices)), kBlock, 0, queue,
                sums, column, where.columns, where.most_columns, means, where.cut, where.exact, s);
         launch(update_squares, dim3(unsigned(where.cut.rows)), kBlock, 0, queue, g, row, column, means, squares,
                where.columns, where.cut, s);
         sum_rows(queue, static_cast<const double*>(squares), out, where, s);
       };
     },
     [](const OpView& v, int) {
       const Cut cut = Sums(v, v.input(0)).cut;
       return (cut.rows + cut.matrices) * 8;
     }},
    {"adafactor_apply",
     [](const Binding& b) -> Launch {
       const Settings s = settings(b, 7);
       const Sums where(b, b.input(1));
       auto* const totals = b.workspace<Totals>();
       auto* const means = reinterpret_cast<double*>(totals + where.cut.matrices);
       return [=, p = b.out<float>(0), g = b.in<float>(1), row = b.in<float>(2), column = b.in<float>(3),
               m = b.has_input(4) ? b.out<float>(1) : nullptr, sums = b.in<double>(5), squares = b.in<double>(6),
               queue = b.queue()] {
         launch(totals_of_sums, dim3(unsigned(where.cut.matrices)), 1, 0, queue, sums, squares, where.most_columns,
                totals, means, where.cut, where.exact);
         launch(update_rows, dim3(unsigned(where.cut.rows)), kBlock, 0, queue, p, g, row, column, means, totals, m,
                where.columns, where.whole_columns, where.cut, s);
       };
     },
     [](const OpView& v, int) { return Sums(v, v.input(1)).cut.matrices * int64_t(sizeof(Totals) + 8); }},
    {"adafactor_vector_statistics",
     [](const Binding& b) -> Launch {
       const Settings s = settings(b, 3);
       const Sums sums(b, b.input(1));
       return [=, p = b.in<float>(0), g = b.in<float>(1), v = b.out<float>(0), out = b.out<double>(1),
               squares = b.workspace<double>(), count = sums.cut.rows, queue = b.queue()] {
         launch(vector_squares, dim3(blocks(count, kBlock)), kBlock, 0, queue, p, g, v, squares, count, s);
         const double* const all = squares;
         sum_rows(queue, all, out, sums, s);
         sum_rows(queue, all + count, out + sums.cut.matrices * sums.digits(), sums, s);
       };
     },
     [](const OpView& v, int) { return 2 * Sums(v, v.input(1)).cut.rows * 8; }},
    {"adafactor_vector_apply",
     [](const Binding& b) -> Launch {
       const Settings s = settings(b, 5);
       const Sums where(b, b.input(1));
       return [=, p = b.out<float>(0), g = b.in<float>(1), v = b.in<float>(2),
               m = b.has_input(3) ? b.out<float>(1) : nullptr, sums = b.in<double>(4), totals = b.workspace<Totals>(),
               queue = b.queue()] {
         launch(totals_of_vector, dim3(unsigned(where.cut.matrices)), 1, 0, queue, sums, totals, where.cut.matrices,
                where.exact);
         launch(update_vector, dim3(blocks(where.cut.rows, kBlock)), kBlock, 0, queue, p, g, v, totals, m, where.cut,
                s);
       };
     },
     [](const OpView& v, int) { return Sums(v, v.input(1)).cut.matrices * int64_t(sizeof(Totals)); }}};

}  // namespace
}  // namespace strata::cuda::adafactor_kernels
