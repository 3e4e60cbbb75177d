// Adafactor for a vector of which ranks hold parts; see adafactor_part.h. Second moments are a number an element, so
// what ranks have to tell each other is two sums of squares: of the parameter, and of the raw update.
#include "plugins/adafactor/adafactor_sums.h"

namespace strata::adafactor {
namespace {

// Sums of vector k: the parameter's squares, then, behind those of all vectors, the raw update's.
int64_t update_squares(const Part& part, int64_t k) { return part.matrices() + k; }

// parameter, gradient, v; step, factor, [scale] -> v in place; sums over this part. Workspace: two doubles an element.
template <class T>
Launch bind_vector_statistics(const Binding& b) {
  return [b, part = Part(b, b.input(1))] {
    const Settings s = settings(b, 3);
    const T *parameter = b.in<T>(0), *gradient = b.in<T>(1);
    T* v = b.out<T>(0);
    const Sums sums{b.out<double>(1), part.digits};
    double *of_parameter = b.workspace<double>(), *of_update = of_parameter + part.rows;
    sums.clear(0, 2 * part.matrices());
    if (std::isnan(s.gradient_scale)) return;
    const T decay = T(beta2(s)), rest = T(1 - beta2(s)), scale = T(s.gradient_scale);
    b.threads().split(part.rows, 4096, [&](int64_t i, int64_t end) {
      for (; i < end; ++i) {
        const T g = gradient[i] * scale;
        v[i] = decay * v[i] + rest * (g * g + T(s.epsilon1));
        of_parameter[i] = double(parameter[i]) * double(parameter[i]);
        of_update[i] = double(g) * double(g) / double(v[i]);
      }
    });
    for (int64_t i = 0; i < part.rows; ++i) {
      const int64_t k = part.matrix_of(i);
      sums.add(k, of_parameter[i]);
      sums.add(update_squares(part, k), of_update[i]);
      if ((i + 1) % kNumbers == 0 || i + 1 == part.rows) sums.carry_all(0, 2 * part.matrices());
    }
  };
}

// parameter, gradient, v, [m], sums; step, factor, [scale] -> parameter, [m] in place.
template <class T>
Launch bind_vector_apply(const Binding& b) {
  return [b, part = Part(b, b.input(1))] {
    const Settings s = settings(b, 5);
    const T *gradient = b.in<T>(1), *v = b.in<T>(2);
    const double* sums = b.in<double>(4);
    T *parameter = b.out<T>(0), *m = b.has_input(3) ? b.out<T>(1) : nullptr;
    if (std::isnan(s.gradient_scale)) return;
    for (int64_t k = 0; k < part.matrices(); ++k) {
      const double count = part.rows_of(k);
      const double rate = step_size(s, std::sqrt(part.value(sums, k) / count));
      const double clip =
          std::max(1.0, std::sqrt(part.value(sums, update_squares(part, k)) / count) / s.clip_threshold);
      const T scale = T(rate / clip * s.gradient_scale), keep = T(1 - s.weight_decay * rate);
      const T beta1 = T(s.beta1), rest = T(1 - s.beta1);
      b.threads().split(part.rows, 4096, [&](int64_t i, int64_t end) {
        for (; i < end; ++i) {
          if (part.matrix_of(i) != k) continue;
          T u = scale * gradient[i] / std::sqrt(v[i]);
          if (m) u = m[i] = beta1 * m[i] + rest * u;
          parameter[i] = keep * parameter[i] - u;
        }
      });
    }
  };
}

}  // namespace

void register_vector_kinds() {
  add_part_kind(
      "adafactor_vector_statistics", "parameter, gradient, v, step, factor, [scale] -> v, sums of this part",
      [](const OpView& v) -> std::vector<TensorSpec> {
        const Part part(v, v.input(1));
        return {like(v.input(2)), sums(2 * part.matrices(), part)};
      },
      bind_vector_statistics<float>, bind_vector_statistics<double>,
      [](const OpView& v, int) { return 2 * elements(v.input(1).shape) * 8; });
  add_part_kind(
      "adafactor_vector_apply", "parameter, gradient, v, [m], sums, step, factor, [scale] -> parameter, [m]",
      [](const OpView& v) -> std::vector<TensorSpec> {
        std::vector<TensorSpec> specs{like(v.input(0))};
        if (v.has_input(3)) specs.push_back(like(v.input(3)));
        return specs;
      },
      bind_vector_apply<float>, bind_vector_apply<double>);
}

void update_vectors(UpdateStage& stage, const std::vector<VectorPart>& vectors) {
  Builder& build = stage.build();
  const TensorId step = build.scalar(kStepScalar), factor = build.scalar(kLearningRateFactor);
  std::vector<Gradient> gradients;
  std::vector<TensorId> sums;
  for (const VectorPart& vector : vectors) {
    const Gradient& gradient = vector.gradient;
    const TensorId v = vector.states[1];
    gradients.push_back(gradient);
    sums.push_back(build.emit_all("adafactor_vector_statistics",
                                  {gradient.parameter, gradient.tensor, v, step, factor, gradient.scale},
                                  vector.attributes, {v, {}})[1]);
  }
  sums = stage.sum_over_parts(gradients, std::move(sums));
  for (size_t i = 0; i < vectors.size(); ++i) {
    const Gradient& gradient = vectors[i].gradient;
    const TensorId m = vectors[i].states[0], v = vectors[i].states[1];
    std::vector<TensorId> outputs{gradient.parameter};
    if (m) outputs.push_back(m);
    build.emit_all("adafactor_vector_apply",
                   {gradient.parameter, gradient.tensor, v, m, sums[i], step, factor, gradient.scale},
                   vectors[i].attributes, outputs);
  }
}

}  // namespace strata::adafactor
