// Plain gradient descent, for runs beside which a test computes every update by hand: plugin "test_descent", which
// begun_passes_test.cpp registers.
#pragma once
#include <cstdint>

#include "strata/optimizer.h"
#include "strata/plugin.h"

namespace strata::test {

inline constexpr float kRate = 0.5F;

// p ← p − rate · g, compiled once for the kernel and for what is computed by hand.
[[gnu::noinline]] inline void step_down(float* p, const float* g, int64_t count, float rate) {
  for (int64_t i = 0; i < count; ++i) p[i] -= rate * g[i];
}

class Descent final : public Plugin {
 public:
  Descent() {
    const auto kernel = [](const Update& u) -> Launch {
      return [u] { step_down(u.parameter<float>(), u.gradient<float>(), u.count(), float(u.scalars().rate())); };
    };
    register_update(
        {.name = "test_descent", .states = "none", .flops = 2, .cpu = {.bind = kernel}, .reference = {}});
  }
  void options(Options& o) override { o.add("rate", rate_, "step size").non_negative(); }
  Capabilities capabilities() const override { return {.provides = {"optimizer"}}; }
  void update(UpdateStage& stage) override {
    for (const Gradient& gradient : stage.gradients())
      stage.append("test_descent", gradient, {}, {{"learning_rate", rate_}, {"weight_decay", 0.0}});
  }

 private:
  double rate_ = kRate;
};

}  // namespace strata::test
