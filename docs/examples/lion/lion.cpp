// Lion (Chen et al., arXiv 2302.06675, algorithm 2) as a plugin outside of Strata's tree: an optimizer in one file.
//
//   c ← beta1 · m + (1 − beta1) · g        p ← p − lr · (sign(c) + weight_decay · p)
//   m ← beta2 · m + (1 − beta2) · g        lr = learning_rate × the schedule's factor
//
// One state, 4 bytes a parameter, where AdamW keeps 8.
#include <strata/plugin.h>

#include <cmath>

namespace {

using strata::Binding;
using strata::OpView;
using strata::TensorId;
using strata::TensorSpec;

// Inputs: parameter, gradient, m (one shape), learning_rate_factor, [gradient scale] (f64 {1}). Outputs: parameter and
// m, in place.
std::vector<TensorSpec> shape(const OpView& view) {
  const auto& p = view.input(0);
  bool right = view.inputs() == 5 && view.has_input(3);
  for (int i = 1; right && i < 3; ++i) right = view.input(i).shape == p.shape && view.input(i).dtype == p.dtype;
  require(right, view, "parameter, gradient and m of one shape and type, then the scalars factor and scale");
  return {{p.shape, p.dtype}, {p.shape, p.dtype}};
}

// One update for every backend of the host: T is float on "cpu", and float or double on "reference".
template <class T>
strata::Launch bind(const Binding& b) {
  return [b] {  // runs every step: pointers stay valid, nothing may be allocated
    const double scale = b.in<double>(4) ? *b.in<double>(4) : 1.0;
    if (std::isnan(scale)) return;  // the step overflowed (loss scaling): change nothing
    const T beta1 = T(b.attributes().real("beta1")), beta2 = T(b.attributes().real("beta2"));
    const T rate = T(b.attributes().real("learning_rate") * *b.in<double>(3));
    const T decay = T(b.attributes().real("weight_decay"));
    T *p = b.out<T>(0), *m = b.out<T>(1);
    const T* gradient = b.in<T>(1);
    b.threads().split(strata::elements(b.input(0).shape), 4096, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T g = gradient[i] * T(scale), c = beta1 * m[i] + (1 - beta1) * g;
        p[i] -= rate * (T(c > 0) - T(c < 0) + decay * p[i]);
        m[i] = beta2 * m[i] + (1 - beta2) * g;
      }
    });
  };
}

// In the constructor of the plugin, not when the library is loaded: the engine checks in between that it fits.
void register_once() {
  static const bool once = [] {
    strata::OpKind kind;
    kind.name = "lion";
    kind.summary = "parameter, gradient, m, factor, [scale] -> parameter, m";
    kind.shape = shape;
    kind.cost = [](const OpView& v) {  // reads three tensors and writes two
      return strata::Cost{.flops = 8 * double(strata::elements(v.input(0).shape)),
                          .bytes = 5 * double(v.input(0).bytes())};
    };
    kind.kernels["cpu"] = {bind<float>};
    kind.kernels["reference"] = {
        [](const Binding& b) { return b.input(0).dtype == strata::DType::f64 ? bind<double>(b) : bind<float>(b); }};
    register_kind(std::move(kind));
    return true;
  }();
  (void)once;
}

class Lion final : public strata::Plugin {
 public:
  Lion() { register_once(); }

  void options(strata::Options& o) override {
    o.add("learning_rate", learning_rate_, "step size at the schedule's peak").positive();
    o.add("beta1", beta1_, "share of the momentum in the sign that is taken").range(0, 0.9999999);
    o.add("beta2", beta2_, "decay of the momentum").range(0, 0.9999999);
    o.add("weight_decay", weight_decay_, "decoupled decay of tensors with two dimensions or more").non_negative();
  }

  strata::Capabilities capabilities() const override { return {.provides = {"optimizer", "lowers optimizer_state"}}; }

  void update(strata::UpdateStage& stage) override {
    strata::Builder& build = stage.build();
    const TensorId factor = build.scalar(strata::kLearningRateFactor);
    for (const strata::Gradient& stored : stage.gradients()) {
      const strata::Gradient gradient = stage.in_f32(stored);       // where mixed precision sums gradients in bf16
      const strata::Shape shape = build[gradient.parameter].shape;  // a copy: adding a state moves the list
      const TensorId m = stage.state(gradient, "lion.m", shape);
      build.emit_all("lion", {gradient.parameter, gradient.tensor, m, factor, gradient.scale},
                     {{"learning_rate", learning_rate_},
                      {"beta1", beta1_},
                      {"beta2", beta2_},
                      {"weight_decay", shape.size() >= 2 ? weight_decay_ : 0.0}},
                     {gradient.parameter, m});
    }
  }

 private:
  double learning_rate_ = 1e-4, beta1_ = 0.9, beta2_ = 0.99, weight_decay_ = 0.1;
};

}  // namespace

STRATA_PLUGIN(Lion, "lion", "1.0.0", "Lion: steps of one size, in the sign of an average of gradients")
