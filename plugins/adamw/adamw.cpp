// AdamW (Loshchilov and Hutter, arXiv 1711.05101), PyTorch's formula, in one pass over memory.
#include <cmath>

#include "strata/plugin.h"
#include "strata/simd.h"

namespace {

struct Coefficients {
  float beta1, beta2, decay, step_size, root_correction, epsilon, scale;
};

// p ← p·decay − step_size · m / (√v / root_correction + ε), with m, v the moments after this gradient (times scale).
STRATA_SIMD void adamw(float* __restrict p, const float* __restrict g, float* __restrict m, float* __restrict v, int64_t n, const Coefficients& k) {
  const float beta1 = k.beta1, beta2 = k.beta2, decay = k.decay, step_size = k.step_size, inverse_root = 1 / k.root_correction, epsilon = k.epsilon, scale = k.scale;
  for (int64_t i = 0; i < n; ++i) {
    const float gradient = g[i] * scale;
    const float first = beta1 * m[i] + (1 - beta1) * gradient;
    const float second = beta2 * v[i] + (1 - beta2) * gradient * gradient;
    m[i] = first;
    v[i] = second;
    p[i] = p[i] * decay - step_size * first / (std::sqrt(second) * inverse_root + epsilon);
  }
}

struct Hyper {
  double learning_rate, beta1, beta2, epsilon, decay;
  explicit Hyper(const strata::Attributes& a)
      : learning_rate(a.real("learning_rate")), beta1(a.real("beta1")), beta2(a.real("beta2")), epsilon(a.real("epsilon")), decay(a.real("weight_decay")) {}
};

strata::Launch bind_cpu(const strata::Binding& b) {
  strata::require(b.input(0).dtype == strata::DType::f32 && b.input(1).dtype == strata::DType::f32, b, "f32 tensors on the cpu backend");
  const Hyper h(b.attributes());
  return [b, h] {
    const double step = *b.in<double>(4), rate = h.learning_rate * *b.in<double>(5);
    const Coefficients k{float(h.beta1), float(h.beta2), float(1 - rate * h.decay), float(rate / (1 - std::pow(h.beta1, step))),
                         float(std::sqrt(1 - std::pow(h.beta2, step))), float(h.epsilon), b.has_input(6) ? float(*b.in<double>(6)) : 1.0f};
    b.threads().split(strata::elements(b.input(0).shape), 4096, [&](int64_t i, int64_t e) {
      adamw(b.out<float>(0) + i, b.in<float>(1) + i, b.out<float>(1) + i, b.out<float>(2) + i, e - i, k);
    });
  };
}

// Plain, in double throughout.
strata::Launch bind_reference(const strata::Binding& b) {
  const Hyper h(b.attributes());
  return [b, h] {
    const double step = *b.in<double>(4), rate = h.learning_rate * *b.in<double>(5), scale = b.has_input(6) ? *b.in<double>(6) : 1;
    float *p = b.out<float>(0), *m = b.out<float>(1), *v = b.out<float>(2);
    for (int64_t i = 0; i < strata::elements(b.input(0).shape); ++i) {
      const double g = b.in<float>(1)[i] * scale;
      m[i] = float(h.beta1 * m[i] + (1 - h.beta1) * g);
      v[i] = float(h.beta2 * v[i] + (1 - h.beta2) * g * g);
      const double first = m[i] / (1 - std::pow(h.beta1, step)), second = v[i] / (1 - std::pow(h.beta2, step));
      p[i] = float(p[i] * (1 - rate * h.decay) - rate * first / (std::sqrt(second) + h.epsilon));
    }
  };
}

class AdamW final : public strata::Plugin {
 public:
  AdamW() {
    static const bool once = [] {
      strata::register_kind(
          {.name = "adamw", .summary = "p, g, m, v (…), step, learning_rate_factor, [scale] (f64 scalars) -> p, m, v in place",
           .shape = [](const strata::OpView& v) -> std::vector<strata::TensorSpec> {
             bool right = v.inputs() == 7 && v.has_input(4) && v.has_input(5);
             for (int i = 0; right && i < 4; ++i) right = v.has_input(i) && v.input(i).shape == v.input(0).shape;
             strata::require(right, v, "p, g, m, v of one shape and the scalars step, learning_rate_factor and scale");
             return {{v.input(0).shape, v.input(0).dtype}, {v.input(2).shape, v.input(2).dtype}, {v.input(3).shape, v.input(3).dtype}};
           },
           .gradient = {},
           .cost = [](const strata::OpView& v) { return strata::Cost{0, 7.0 * double(v.input(0).bytes())}; },
           .accumulates = 0, .in_place = {}, .kernels = {{"cpu", {bind_cpu, {}}}, {"reference", {bind_reference, {}}}}});
      return true;
    }();
    (void)once;
  }

  strata::Capabilities capabilities() const override { return {.provides = {"optimizer"}, .requires_ = {}, .conflicts = {}}; }

  void options(strata::Options& o) override {
    o.add("learning_rate", learning_rate_, "step size; a schedule multiplies it").positive();
    o.add("beta1", beta1_, "decay of the first moment").range(0, 0.999999);
    o.add("beta2", beta2_, "decay of the second moment").range(0, 0.99999999);
    o.add("epsilon", epsilon_, "added to the root of the second moment").positive();
    o.add("weight_decay", weight_decay_, "decoupled decay of parameters with two dimensions or more").non_negative();
  }

  void update(strata::UpdateStage& stage) override {
    auto& build = stage.build();
    const auto step = build.scalar(strata::kStepScalar), factor = build.scalar(strata::kLearningRateFactor);
    for (const auto& gradient : stage.gradients()) {
      const strata::Shape shape = build[gradient.parameter].shape;
      const auto m = stage.state(gradient, "adamw.m", shape), v = stage.state(gradient, "adamw.v", shape);
      build.emit_all("adamw", {gradient.parameter, gradient.tensor, m, v, step, factor, gradient.scale},
                     {{"learning_rate", learning_rate_}, {"beta1", beta1_}, {"beta2", beta2_}, {"epsilon", epsilon_}, {"weight_decay", shape.size() >= 2 ? weight_decay_ : 0.0}},
                     {gradient.parameter, m, v});
    }
  }

 private:
  double learning_rate_ = 3e-4, beta1_ = 0.9, beta2_ = 0.95, epsilon_ = 1e-8, weight_decay_ = 0.1;
};

}  // namespace

STRATA_PLUGIN(AdamW, "adamw", "1.0.0", "Adam with decoupled weight decay")
