// The three ops and what is summed between them; see adafactor_part.h. What the statistics of the whole matrix need is
// summed in double: squares by column, of the parameter, the rows' second moments, and of the raw update.
#include "plugins/adafactor/adafactor_part.h"

#include <algorithm>
#include <cmath>

#include "plugins/adafactor/adafactor_kernel.h"
#include "strata/simd.h"

namespace strata::adafactor {
namespace {

Settings settings(const Attributes& a, double step, double factor, const double* scale) {
  return {.step = step,
          .learning_rate = a.real("learning_rate"),
          .factor = factor,
          .scale_parameter = a.integer("scale_parameter") != 0,
          .clip_threshold = a.real("clip_threshold"),
          .decay = a.real("decay"),
          .epsilon1 = a.real("epsilon1"),
          .epsilon2 = a.real("epsilon2"),
          .beta1 = a.real("beta1"),
          .weight_decay = a.real("weight_decay"),
          .gradient_scale = scale ? *scale : 1.0};
}

template <class T>
Settings settings(const Binding& b, int step) {
  return settings(b.attributes(), *b.in<double>(step), *b.in<double>(step + 1), b.in<double>(step + 2));
}

TensorSpec sums(int64_t count) { return {{count}, DType::f64}; }

// parameter, gradient, row; step, factor, [scale] -> row in place; sums over this part: columns, then Σ row, Σ p².
template <class T>
Launch bind_statistics(const Binding& b) {
  return [b] {
    const Settings s = settings<T>(b, 3);
    const T *parameter = b.in<T>(0), *gradient = b.in<T>(1);
    T* row = b.out<T>(0);
    double* out = b.out<double>(1);
    const int64_t rows = b.rows(1), columns = b.columns(1);
    const double decay = beta2(s);
    std::fill_n(out, columns + 2, 0.0);
    if (std::isnan(s.gradient_scale)) return;
    double row_total = 0, squares = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const T *g = gradient + i * columns, *p = parameter + i * columns;
      double row_sum = 0, row_squares = 0;
      for (int64_t j = 0; j < columns; ++j) {
        const T scaled = g[j] * T(s.gradient_scale);
        const double square = double(scaled * scaled + T(s.epsilon1));
        row_sum += square;
        out[j] += square;
        row_squares += double(p[j]) * double(p[j]);
      }
      row[i] = T(decay * double(row[i]) + (1 - decay) * row_sum / double(columns));
      row_total += double(row[i]);
      squares += row_squares;
    }
    out[columns] = row_total;
    out[columns + 1] = squares;
  };
}

// gradient, row, column, sums; step, factor, [scale] -> column in place; Σ u² of this part.
template <class T>
Launch bind_update_squares(const Binding& b) {
  return [b] {
    const Settings s = settings<T>(b, 4);
    const T *gradient = b.in<T>(0), *row = b.in<T>(1);
    T* column = b.out<T>(0);
    const double *sum = b.in<double>(3), decay = beta2(s), all_rows = double(b.input(0).full_shape()[0]);
    const int64_t rows = b.rows(0), columns = b.columns(0);
    *b.out<double>(1) = 0;
    if (std::isnan(s.gradient_scale)) return;
    for (int64_t j = 0; j < columns; ++j) column[j] = T(decay * double(column[j]) + (1 - decay) * sum[j] / all_rows);
    const double mean = sum[columns] / all_rows;
    double squares = 0;
    for (int64_t i = 0; i < rows; ++i) {
      double of_row = 0;
      for (int64_t j = 0; j < columns; ++j) {
        const double g = double(gradient[i * columns + j]) * s.gradient_scale;
        of_row += g * g / double(column[j]);
      }
      squares += of_row * mean / double(row[i]);
    }
    *b.out<double>(1) = squares;
  };
}

// parameter, gradient, row, column, [m], sums, squares; step, factor, [scale] -> parameter, [m] in place.
template <class T>
Launch bind_apply(const Binding& b) {
  return [b] {
    const Settings s = settings<T>(b, 7);
    T *parameter = b.out<T>(0), *m = b.has_input(4) ? b.out<T>(1) : nullptr;
    const T *gradient = b.in<T>(1), *row = b.in<T>(2), *column = b.in<T>(3);
    const double* sum = b.in<double>(5);
    if (std::isnan(s.gradient_scale)) return;
    const int64_t rows = b.rows(1), columns = b.columns(1);
    const double all_rows = double(b.input(1).full_shape()[0]), count = all_rows * double(columns);
    const double rate = step_size(s, std::sqrt(sum[columns + 1] / count));
    const double clip = std::max(1.0, std::sqrt(*b.in<double>(6) / count) / s.clip_threshold);
    const double mean = sum[columns] / all_rows;
    const T keep = T(1 - s.weight_decay * rate), beta1 = T(s.beta1), rest = T(1 - s.beta1);
    b.threads().split(rows, 16, [&](int64_t i, int64_t end) {
      for (; i < end; ++i) {
        const T scale = T(rate / clip * s.gradient_scale / std::sqrt(double(row[i]) / mean));
        for (int64_t j = 0; j < columns; ++j) {
          const int64_t at = i * columns + j;
          T u = scale * gradient[at] / std::sqrt(column[j]);
          if (m) u = m[at] = beta1 * m[at] + rest * u;
          parameter[at] = keep * parameter[at] - u;
        }
      }
    });
  };
}

void add(std::string name, std::string summary, std::function<std::vector<TensorSpec>(const OpView&)> shape,
         Launch (*f32)(const Binding&), Launch (*f64)(const Binding&)) {
  OpKind kind{.name = std::move(name), .summary = std::move(summary), .shape = std::move(shape)};
  kind.kernels["cpu"] = {f32, {}};
  kind.kernels["reference"] = {[f32, f64](const Binding& b) { return (b.input(0).dtype == DType::f64 ? f64 : f32)(b); },
                               {}};
  register_kind(std::move(kind));
}

TensorSpec like(const Tensor& tensor) { return {tensor.shape, tensor.dtype}; }

}  // namespace

void register_part_kinds() {
  add(
      "adafactor_statistics", "parameter, gradient, row, step, factor, [scale] -> row, sums of this part",
      [](const OpView& v) -> std::vector<TensorSpec> {
        return {like(v.input(2)), sums(v.columns(1) + 2)};
      },
      bind_statistics<float>, bind_statistics<double>);
  add(
      "adafactor_update_squares", "gradient, row, column, sums, step, factor, [scale] -> column, squares of this part",
      [](const OpView& v) -> std::vector<TensorSpec> {
        return {like(v.input(2)), sums(1)};
      },
      bind_update_squares<float>, bind_update_squares<double>);
  add(
      "adafactor_apply",
      "parameter, gradient, row, column, [m], sums, squares, step, factor, [scale] -> parameter, [m]",
      [](const OpView& v) -> std::vector<TensorSpec> {
        std::vector<TensorSpec> specs{like(v.input(0))};
        if (v.has_input(4)) specs.push_back(like(v.input(4)));
        return specs;
      },
      bind_apply<float>, bind_apply<double>);
}

void update_part(UpdateStage& stage, const Gradient& gradient, const std::vector<TensorId>& inputs,
                 Attributes attributes) {
  Builder& build = stage.build();
  const TensorId parameter = inputs[0], g = inputs[1], step = inputs[2], factor = inputs[3], scale = inputs[4],
                 m = inputs[5], row = inputs[6], column = inputs[7];
  const auto statistics =
      build.emit_all("adafactor_statistics", {parameter, g, row, step, factor, scale}, attributes, {row, {}});
  const TensorId sums = stage.sum_over_parts(gradient, statistics[1]);
  const auto squares =
      build.emit_all("adafactor_update_squares", {g, row, column, sums, step, factor, scale}, attributes, {column, {}});
  const TensorId all = stage.sum_over_parts(gradient, squares[1]);
  std::vector<TensorId> outputs{parameter};
  if (m) outputs.push_back(m);
  build.emit_all("adafactor_apply", {parameter, g, row, column, m, sums, all, step, factor, scale}, attributes,
                 outputs);
}

}  // namespace strata::adafactor
