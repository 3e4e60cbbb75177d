// Lion (Chen et al., arXiv 2302.06675, algorithm 2) as a plugin outside of Strata's tree: an optimizer in one file.
//
//   c ← beta1 · m + (1 − beta1) · g        p ← p − lr · (sign(c) + weight_decay · p)
//   m ← beta2 · m + (1 − beta2) · g        lr = learning_rate × the schedule's factor
//
// One state, 4 bytes a parameter, where AdamW keeps 8.
#include <strata/optimizer.h>
#include <strata/plugin.h>

namespace {

using strata::TensorId;

// For every backend of the host: T is float on "cpu", and float or double on "reference". What is returned runs in
// every step: nothing may be allocated there.
template <class T>
strata::Launch bind(const strata::Update& u) {
  return [u] {
    const T beta1 = T(u.attributes().real("beta1")), beta2 = T(u.attributes().real("beta2"));
    const T rate = T(u.scalars().rate()), decay = T(u.scalars().weight_decay), scale = T(u.scalars().gradient_scale());
    T *p = u.parameter<T>(), *m = u.state<T>(0);
    const T* gradient = u.gradient<T>();
    u.threads().split(u.count(), 4096, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T g = gradient[i] * scale, c = beta1 * m[i] + (1 - beta1) * g;
        p[i] -= rate * (T(c > 0) - T(c < 0) + decay * p[i]);
        m[i] = beta2 * m[i] + (1 - beta2) * g;
      }
    });
  };
}

class Lion final : public strata::Plugin {
 public:
  Lion() {
    strata::register_update({.name = "lion",
                             .states = "m of the parameter's shape",
                             .flops = 8,
                             .cpu = {bind<float>},
                             .reference = {strata::by_type(bind<float>, bind<double>)}});
  }

  void options(strata::Options& o) override {
    o.add("learning_rate", learning_rate_, "step size at the schedule's peak").positive();
    o.add("beta1", beta1_, "share of the momentum in the sign that is taken").range(0, 0.9999999);
    o.add("beta2", beta2_, "decay of the momentum").range(0, 0.9999999);
    o.add("weight_decay", weight_decay_, "decoupled decay of tensors with two dimensions or more").non_negative();
  }

  strata::Capabilities capabilities() const override {
    return {.provides = {"optimizer", "lowers optimizer_state"}, .effect = strata::Effect::program()};
  }

  void update(strata::UpdateStage& stage) override {
    for (const strata::Gradient& stored : stage.gradients()) {
      const strata::Gradient gradient = stage.in_f32(stored);  // where mixed precision sums gradients in bf16
      const TensorId m = stage.state(gradient, "lion.m", stage.build()[gradient.parameter].shape);
      stage.append(
          "lion", gradient, {m},
          {{"learning_rate", learning_rate_}, {"beta1", beta1_}, {"beta2", beta2_}, {"weight_decay", weight_decay_}});
    }
  }

 private:
  double learning_rate_ = 1e-4, beta1_ = 0.9, beta2_ = 0.99, weight_decay_ = 0.1;
};

}  // namespace

STRATA_PLUGIN(Lion, "lion", "1.0.0", "Lion: steps of one size, in the sign of an average of gradients")
