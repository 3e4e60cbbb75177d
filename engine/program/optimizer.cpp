// Rules of update ops (strata/optimizer.h).
#include "strata/optimizer.h"

#include <memory>
#include <set>

#include "strata/convert.h"

namespace strata {
namespace {

bool is_scalar(const OpView& v, int i) { return v.input(i).dtype == DType::f64 && v.input(i).shape == Shape{1}; }

bool begins_right(const UpdateView& v, bool half_gradients) {
  if (v.inputs() < UpdateView::kFirstState) return false;
  for (int i : {UpdateView::kParameter, UpdateView::kGradient, UpdateView::kStep, UpdateView::kFactor})
    if (!v.has_input(i)) return false;
  for (int i : {UpdateView::kStep, UpdateView::kFactor, UpdateView::kScale, UpdateView::kSeed})
    if (v.has_input(i) && !is_scalar(v, i)) return false;
  const DType own = v.parameter().dtype, gradient = v.gradient().dtype;
  return (own == DType::f32 || own == DType::f64) && v.gradient().shape == v.parameter().shape &&
         (gradient == own || (half_gradients && own == DType::f32 && is_half(gradient)));
}

bool like_parameter(const UpdateView& v) {
  for (int i = 0; i < v.states(); ++i)
    if (!v.state_is(i, v.parameter().shape, v.parameter().dtype)) return false;
  return true;
}

// States of 16 bits are rounded to with random numbers.
bool can_round(const UpdateView& v) {
  for (int i = 0; i < v.states(); ++i)
    if (v.has_state(i) && is_half(v.state(i).dtype) && !v.has_input(UpdateView::kSeed)) return false;
  return true;
}

bool has_half(const UpdateView& v) {
  bool half = is_half(v.gradient().dtype);
  for (int i = 0; i < v.states(); ++i) half |= v.has_state(i) && is_half(v.state(i).dtype);
  return half;
}

double bytes(const UpdateView& v) {
  double sum = 2 * double(v.parameter().bytes()) + double(v.gradient().bytes());
  for (int i = 0; i < v.states(); ++i)
    if (v.has_state(i)) sum += 2 * double(v.state(i).bytes());
  return sum;
}

Kernel kernel(const UpdateKernel& kernel, bool f32_alone, const char* expected) {
  Kernel made{.bind = [bind = kernel.bind, f32_alone, expected](const Binding& binding) -> Launch {
    const Update update(binding);
    require(f32_alone ? update.parameter().dtype == DType::f32 : !has_half(update), binding, expected);
    return [scalars = update.scalars(), launch = bind(update)] {
      if (!scalars.skips()) launch();
    };
  }};
  if (kernel.workspace)
    made.workspace = [workspace = kernel.workspace](const OpView& v, int threads) {
      return workspace(UpdateView(v), threads);
    };
  return made;
}

std::vector<TensorSpec> outputs(const UpdateView& v) {
  std::vector<TensorSpec> specs{{v.parameter().shape, v.parameter().dtype}};
  for (int i = 0; i < v.states(); ++i)
    if (v.has_state(i)) specs.push_back({v.state(i).shape, v.state(i).dtype});
  return specs;
}

std::set<std::string>& elementwise_kinds() {
  static std::set<std::string> kinds;
  return kinds;
}

}  // namespace

const OpKind& register_update(UpdateKind kind) {
  if (kind.elementwise) elementwise_kinds().insert(kind.name);
  if (!kind.fits) kind.fits = like_parameter;
  if (!kind.bytes) kind.bytes = bytes;
  OpKind made{
      .name = kind.name,
      .summary =
          "parameter, gradient, step, factor, [scale], [seed], " + kind.states + " -> parameter and states in place",
      .shape =
          [fits = kind.fits, half = kind.half_gradients, states = kind.states](const OpView& view) {
            const UpdateView v(view);
            require(begins_right(v, half) && can_round(v) && fits(v), v,
                    "parameter and gradient of one shape, the f64 (1) scalars step, factor, scale and, with states "
                    "of 16 bits, seed, then the states: " +
                        states);
            return outputs(v);
          },
      .cost =
          [flops = kind.flops, moved = kind.bytes](const OpView& view) {
            const UpdateView v(view);
            return Cost{.flops = flops * double(elements(v.parameter().shape)), .bytes = moved(v)};
          }};
  made.kernels["cpu"] = kernel(kind.cpu, true, "f32 parameters on the cpu backend");
  made.kernels["reference"] = kernel(kind.reference, false, "f32 or f64 tensors on the reference backend");
  return register_kind(std::move(made));
}

bool is_elementwise_update(const OpKind& kind) { return elementwise_kinds().contains(kind.name); }

UpdateScalars update_scalars(const Binding& b, int first) {
  const Attributes& a = b.attributes();
  return {.step_number = b.in<double>(first),
          .schedule = b.in<double>(first + 1),
          .scale = b.in<double>(first + 2),
          .seed_number = b.in<double>(first + 3),
          .learning_rate = a.real("learning_rate"),
          .weight_decay = a.real("weight_decay"),
          .own_factor = a.real("learning_rate_factor", 1)};
}

int Update::output_of(int state) const {
  int output = 1;
  for (int i = 0; i < state; ++i) output += has_state(i);
  return output;
}

uint64_t Update::stream(int i) const { return uint64_t(attributes().integer("stream." + std::to_string(i), 0)); }

}  // namespace strata
