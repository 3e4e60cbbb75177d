// The ops and what is summed between them; see adafactor_part.h. What the statistics of the whole matrix need is
// summed in double, or exactly: squares by column, of the parameter, the rows' second moments, and of the raw update.
#include "plugins/adafactor/adafactor_part.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "plugins/adafactor/adafactor_sums.h"

namespace strata::adafactor {
namespace {

// parameter, gradient; step, factor, [scale] -> sums over the columns that are here, by row.
template <class T>
Launch bind_row_sums(const Binding& b) {
  return [b, part = Part(b, b.input(1))] {
    const Settings s = settings(b, 2);
    const T *parameter = b.in<T>(0), *gradient = b.in<T>(1);
    double* sums = b.out<double>(0);
    std::fill_n(sums, part.row_sums(), 0.0);
    if (std::isnan(s.gradient_scale)) return;
    b.threads().split(part.rows, 4, [&](int64_t i, int64_t end) {
      for (; i < end; ++i)
        for (int64_t at = i * part.columns; at < (i + 1) * part.columns; ++at) {
          const T scaled = gradient[at] * T(s.gradient_scale);
          const double p = double(parameter[at]);
          sums[i] += double(scaled * scaled + T(s.epsilon1));
          sums[part.row_squares(i)] += p * p;
        }
    });
  };
}

// parameter, gradient, row, [sums of whole rows]; step, factor, [scale] -> row in place; sums over this part's columns,
// of moments and squares over its rows. Workspace: a double a row.
template <class T>
Launch bind_part_statistics(const Binding& b) {
  return [b, part = Part(b, b.input(1))] {
    const Settings s = settings(b, 4);
    const T *parameter = b.in<T>(0), *gradient = b.in<T>(1);
    T* row = b.out<T>(0);
    const double* of_rows = b.in<double>(3);
    const Sums sums{b.out<double>(1), part.digits};
    double* squares = b.workspace<double>();
    const int64_t columns = part.columns;
    const double decay = beta2(s);
    sums.clear(0, part.sums());
    if (std::isnan(s.gradient_scale)) return;
    const auto square = [&](int64_t i, int64_t j) {
      const T scaled = gradient[i * columns + j] * T(s.gradient_scale);
      return double(scaled * scaled + T(s.epsilon1));
    };
    b.threads().split(part.rows, 4, [&](int64_t i, int64_t end) {
      for (; i < end; ++i) {
        double row_sum = of_rows ? of_rows[i] : 0, row_squares = of_rows ? of_rows[part.row_squares(i)] : 0;
        for (int64_t j = 0; !of_rows && j < columns; ++j) {
          const double p = double(parameter[i * columns + j]);
          row_sum += square(i, j);
          row_squares += p * p;
        }
        row[i] = T(decay * double(row[i]) + (1 - decay) * row_sum / double(part.whole.columns));
        squares[i] = row_squares;
      }
    });
    // A thread has some columns of all rows, so that their order is the same for any number of threads.
    constexpr int64_t kWidth = 32;
    b.threads().split(columns, kWidth, [&](int64_t first, int64_t last) {
      for (int64_t j = first; j < last; j += kWidth) {
        const int64_t end = std::min(j + kWidth, last);
        for (int64_t i = 0; i < part.rows; ++i) {
          const int64_t at = part.column(part.matrix_of(i));
          for (int64_t c = j; c < end; ++c) sums.add(at + c, square(i, c));
          if ((i + 1) % kNumbers == 0 || i + 1 == part.rows)
            for (int64_t k = 0; k < part.matrices(); ++k) sums.carry_all(part.column(k) + j, end - j);
        }
      }
    });
    for (int64_t i = 0; i < part.rows; ++i) {
      const int64_t k = part.matrix_of(i);
      sums.add(part.moments(k), double(row[i]));
      sums.add(part.squares(k), squares[i]);
      if ((i + 1) % kNumbers == 0 || i + 1 == part.rows) sums.carry_all(part.moments(0), 2 * part.matrices());
    }
  };
}

// gradient, row, column, sums; step, factor, [scale] -> column in place; Σ u² of this part, for each matrix.
// Workspace: a double a row.
template <class T>
Launch bind_update_squares(const Binding& b) {
  return [b, part = Part(b, b.input(0))] {
    const Settings s = settings(b, 4);
    const T *gradient = b.in<T>(0), *row = b.in<T>(1);
    T* column = b.out<T>(0);
    const double *sum = b.in<double>(3), decay = beta2(s);
    const Sums out{b.out<double>(1), part.digits};
    double* squares = b.workspace<double>();
    const int64_t columns = part.columns;
    out.clear(0, part.matrices());
    if (std::isnan(s.gradient_scale)) return;
    for (int64_t k = 0; k < part.matrices(); ++k)
      b.threads().split(columns, 64, [&](int64_t j, int64_t end) {
        for (T* c = column + k * columns; j < end; ++j)
          c[j] = T(decay * double(c[j]) + (1 - decay) * part.value(sum, part.column(k) + j) / part.rows_of(k));
      });
    b.threads().split(part.rows, 4, [&](int64_t i, int64_t end) {
      for (; i < end; ++i) {
        const int64_t k = part.matrix_of(i);
        const T* c = column + k * columns;
        double of_row = 0;
        for (int64_t j = 0; j < columns; ++j) {
          const double g = double(gradient[i * columns + j]) * s.gradient_scale;
          of_row += g * g / double(c[j]);
        }
        squares[i] = of_row * (part.value(sum, part.moments(k)) / part.rows_of(k)) / double(row[i]);
      }
    });
    for (int64_t i = 0; i < part.rows; ++i) {
      out.add(part.matrix_of(i), squares[i]);
      if ((i + 1) % kNumbers == 0 || i + 1 == part.rows) out.carry_all(0, part.matrices());
    }
  };
}

// What the sums decide for one matrix: step size over clipping, what the parameter keeps, the mean of the rows'
// moments.
struct PartDecision {
  double scale, keep, mean;
  PartDecision(const Part& part, const Settings& s, const double* sums, const double* updates, int64_t k) {
    const double count = part.rows_of(k) * double(part.whole.columns);
    const double rate = step_size(s, std::sqrt(part.value(sums, part.squares(k)) / count));
    const double clip = std::max(1.0, std::sqrt(part.value(updates, k) / count) / s.clip_threshold);
    scale = rate / clip;
    keep = 1 - s.weight_decay * rate;
    mean = part.value(sums, part.moments(k)) / part.rows_of(k);
  }
};

// parameter, gradient, row, column, [m], sums, squares; step, factor, [scale] -> parameter, [m] in place.
template <class T>
Launch bind_part_apply(const Binding& b) {
  return [b, part = Part(b, b.input(1))] {
    const Settings s = settings(b, 7);
    T *parameter = b.out<T>(0), *m = b.has_input(4) ? b.out<T>(1) : nullptr;
    const T *gradient = b.in<T>(1), *row = b.in<T>(2), *column = b.in<T>(3);
    if (std::isnan(s.gradient_scale)) return;
    const int64_t columns = part.columns;
    const T beta1 = T(s.beta1), rest = T(1 - s.beta1);
    b.threads().split(part.rows, 16, [&](int64_t i, int64_t end) {
      for (; i < end; ++i) {
        const int64_t k = part.matrix_of(i);
        const PartDecision decision(part, s, b.in<double>(5), b.in<double>(6), k);
        const T scale = T(decision.scale * s.gradient_scale / std::sqrt(double(row[i]) / decision.mean)),
                keep = T(decision.keep);
        for (int64_t j = 0; j < columns; ++j) {
          const int64_t at = i * columns + j;
          T u = scale * gradient[at] / std::sqrt(column[k * columns + j]);
          if (m) u = m[at] = beta1 * m[at] + rest * u;
          parameter[at] = keep * parameter[at] - u;
        }
      }
    });
  };
}

}  // namespace

Settings settings_of(const Attributes& a, const UpdateScalars& scalars) {
  return {.step = scalars.step(),
          .learning_rate = scalars.learning_rate,
          .factor = scalars.factor(),
          .scale_parameter = a.integer("scale_parameter") != 0,
          .clip_threshold = a.real("clip_threshold"),
          .decay = a.real("decay"),
          .epsilon1 = a.real("epsilon1"),
          .epsilon2 = a.real("epsilon2"),
          .beta1 = a.real("beta1"),
          .weight_decay = scalars.weight_decay,
          .gradient_scale = scalars.gradient_scale()};
}

void add_part_kind(std::string name, std::string summary, std::function<std::vector<TensorSpec>(const OpView&)> shape,
                   Launch (*f32)(const Binding&), Launch (*f64)(const Binding&),
                   std::function<int64_t(const OpView&, int)> workspace) {
  OpKind kind{.name = std::move(name), .summary = std::move(summary), .shape = std::move(shape)};
  kind.kernels["cpu"] = {f32, workspace};
  kind.kernels["reference"] = {[f32, f64](const Binding& b) { return (b.input(0).dtype == DType::f64 ? f64 : f32)(b); },
                               workspace};
  register_kind(std::move(kind));
}

std::string text_of(const std::vector<int64_t>& fused) {
  std::string text;
  for (int64_t rows : fused) text += (text.empty() ? "" : " ") + std::to_string(rows);
  return text;
}
std::vector<int64_t> fused_of(const Attributes& attributes) {
  std::vector<int64_t> fused;
  if (!attributes.has("fused")) return fused;
  std::istringstream text(attributes.string("fused"));
  for (int64_t rows; text >> rows;) fused.push_back(rows);
  return fused;
}

void register_part_kinds() {
  add_part_kind(
      "adafactor_row_sums", "parameter, gradient, step, factor, [scale] -> sums of this part by row",
      [](const OpView& v) -> std::vector<TensorSpec> {
        return {{{Part(v, v.input(1)).row_sums()}, DType::f64}};
      },
      bind_row_sums<float>, bind_row_sums<double>);
  add_part_kind(
      "adafactor_statistics",
      "parameter, gradient, row, [sums of whole rows], step, factor, [scale] -> row, sums of this part",
      [](const OpView& v) -> std::vector<TensorSpec> {
        const Part part(v, v.input(1));
        return {like(v.input(2)), sums(part.sums(), part)};
      },
      bind_part_statistics<float>, bind_part_statistics<double>, [](const OpView& v, int) { return v.rows(1) * 8; });
  add_part_kind(
      "adafactor_update_squares", "gradient, row, column, sums, step, factor, [scale] -> column, squares of this part",
      [](const OpView& v) -> std::vector<TensorSpec> {
        const Part part(v, v.input(0));
        return {like(v.input(2)), sums(part.matrices(), part)};
      },
      bind_update_squares<float>, bind_update_squares<double>, [](const OpView& v, int) { return v.rows(0) * 8; });
  add_part_kind(
      "adafactor_apply",
      "parameter, gradient, row, column, [m], sums, squares, step, factor, [scale] -> parameter, [m]",
      [](const OpView& v) -> std::vector<TensorSpec> {
        std::vector<TensorSpec> specs{like(v.input(0))};
        if (v.has_input(4)) specs.push_back(like(v.input(4)));
        return specs;
      },
      bind_part_apply<float>, bind_part_apply<double>);
  register_vector_kinds();
}

void update_part(UpdateStage& stage, const Gradient& gradient, const std::vector<TensorId>& states,
                 Attributes attributes) {
  Builder& build = stage.build();
  const TensorId parameter = gradient.parameter, g = gradient.tensor, scale = gradient.scale,
                 step = build.scalar(kStepScalar), factor = build.scalar(kLearningRateFactor);
  const TensorId m = states[0], row = states[1], column = states[2];
  TensorId of_rows;
  const Tensor& part = build[parameter];
  const bool columns_are_split =
      std::any_of(part.layout.begin(), part.layout.end(), [](const Split& split) { return split.dimension == 1; });
  if (columns_are_split) {
    attributes.set("most_rows", part.shape[0]);
    attributes.set("most_columns", part.shape[1]);
    of_rows = build.emit("adafactor_row_sums", {parameter, g, step, factor, scale}, attributes);
    of_rows = stage.sum_over_parts(gradient, of_rows, 1);
  }
  const auto statistics =
      build.emit_all("adafactor_statistics", {parameter, g, row, of_rows, step, factor, scale}, attributes, {row, {}});
  const TensorId sums = stage.sum_over_parts(gradient, statistics[1], 0);
  const auto squares =
      build.emit_all("adafactor_update_squares", {g, row, column, sums, step, factor, scale}, attributes, {column, {}});
  const TensorId all = stage.sum_over_parts(gradient, squares[1]);
  std::vector<TensorId> outputs{parameter};
  if (m) outputs.push_back(m);
  build.emit_all("adafactor_apply", {parameter, g, row, column, m, sums, all, step, factor, scale}, attributes,
                 outputs);
}

}  // namespace strata::adafactor
