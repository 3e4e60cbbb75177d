// The two kinds of loss scaling; see loss_scale.h. No value leaves the device: the factor of a step that overflowed is
// NaN, which update kernels read as "change nothing".
#include "plugins/mixed_precision/loss_scale.h"

#include <atomic>
#include <cmath>
#include <limits>

#include "strata/convert.h"
#include "strata/op_kind.h"

namespace strata::mixed_precision {
namespace {

bool is_scalar(const OpView& v, int i) {
  return v.has_input(i) && v.input(i).dtype == DType::f64 && v.input(i).shape == Shape{1};
}

Launch bind_overflowed(const Binding& b) {
  require(b.input(0).dtype != DType::f64, b, "gradients of f32, bf16 or f16");
  return [b] {
    std::atomic<bool> found{false};
    b.threads().split(elements(b.input(0).shape), 4096, [&](int64_t begin, int64_t end) {
      float largest = 0;
      bool nan = false;
      over_f32<1, 0>(b, begin, end, [&](const auto& in, const auto&, int64_t count, int64_t) {
        for (int64_t i = 0; i < count; ++i) {
          largest = std::fabs(in[0][i]) > largest ? std::fabs(in[0][i]) : largest;
          nan |= in[0][i] != in[0][i];
        }
      });
      if (nan || largest > std::numeric_limits<float>::max()) found = true;
    });
    *b.out<double>(0) = found ? 1 : 0;
  };
}

// Inputs: overflows of this step (any number, f64 {1} each), then scale and good steps in a row, in place.
Launch bind_next(const Binding& b) {
  const int flags = b.inputs() - 2;
  return [=] {
    bool overflow = false;
    for (int i = 0; i < flags; ++i) overflow |= *b.in<double>(i) != 0;
    double &scale = *b.out<double>(1), &good = *b.out<double>(2);
    *b.out<double>(0) = overflow ? std::numeric_limits<double>::quiet_NaN() : 1 / scale;
    const double window = b.attributes().real("window");
    if (window == 0) return;
    good = overflow ? 0 : good + 1;
    if (overflow) scale = std::max(1.0, scale / 2);
    if (good == window) scale = std::min(0x1p40, scale * 2), good = 0;
  };
}

}  // namespace

void register_loss_scale_kinds() {
  static const bool once = [] {
    const Kernel overflowed{bind_overflowed, {}}, next{bind_next, {}};
    register_kind({.name = "overflowed",
                   .summary = "x (…) -> f64 (1): 1 where an element is infinite or NaN, else 0",
                   .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                     require(v.inputs() == 1 && v.has_input(0), v, "one tensor");
                     return {{{1}, DType::f64}};
                   },
                   .half = true,
                   .kernels = {{"cpu", overflowed}, {"reference", overflowed}}});
    const Kernel any{[](const Binding& b) -> Launch {
                       return [b] {
                         double& flag = *b.out<double>(0) = 0;
                         for (int i = 0; i < b.inputs(); ++i) flag = std::max(flag, *b.in<double>(i));
                       };
                     },
                     {}};
    register_kind({.name = "any_overflowed",
                   .summary = "flags f64 (1), … -> the largest",
                   .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                     bool right = v.inputs() > 0;
                     for (int i = 0; right && i < v.inputs(); ++i) right = is_scalar(v, i);
                     require(right, v, "f64 (1) scalars");
                     return {{{1}, DType::f64}};
                   },
                   .kernels = {{"cpu", any}, {"reference", any}}});
    register_kind({.name = "next_loss_scale",
                   .summary = "overflows …, scale, good -> 1/scale or NaN, scale, good; attribute window",
                   .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                     bool right = v.inputs() >= 3 && v.attributes().has("window");
                     for (int i = 0; right && i < v.inputs(); ++i) right = is_scalar(v, i);
                     require(right, v, "f64 (1) scalars and an attribute window");
                     return {{{1}, DType::f64}, {{1}, DType::f64}, {{1}, DType::f64}};
                   },
                   .kernels = {{"cpu", next}, {"reference", next}}});
    return true;
  }();
  (void)once;
}

}  // namespace strata::mixed_precision
