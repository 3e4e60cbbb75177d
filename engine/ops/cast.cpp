// cast: the same numbers in another floating-point type, rounded to nearest.
#include "engine/ops/registration.h"

namespace strata {
namespace {

DType target(const OpView& v) {
  const std::string name = v.attributes().string("dtype");
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    if (name == name_of(dtype)) return dtype;
  throw Error("op \"cast\" has no type \"" + name + "\"; it knows f32, bf16 and f16.");
}

const AtLoad cast_registered([] {
  register_kind({.name = "cast",
                 .summary = "x (…), [waits for] -> x as attribute dtype: f32, bf16 or f16",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require((v.inputs() == 1 || v.inputs() == 2) && v.has_input(0) && is_float(v.input(0)) &&
                               v.input(0).dtype != DType::f64 && v.attributes().has("dtype"),
                           v, "one tensor of f32, bf16 or f16 and an attribute dtype");
                   return {{v.input(0).shape, target(v)}};
                 },
                 .gradient =
                     [](Differentiation& d) {
                       const std::string back(name_of(d.forward().input(0).dtype));
                       d.set(0, d.build().emit("cast", {d.output_gradient(0)}, {{"dtype", back}}));
                     },
                 .accumulates = 1,
                 .half = true,
                 .sharding = elementwise(1, 1, 1),  // no partial sum, unless the op says so (kTakesPartial)
                 .kernels = {{"cpu", elementwise_kernel<1>(
                                         [](const Binding& b, const auto& in, const auto& out, int64_t n, int64_t) {
                                           for (int64_t i = 0; i < n; ++i)
                                             out[0][i] = in[0][i] + (b.accumulates(0) ? out[0][i] : 0);
                                         })}}});
});

}  // namespace
}  // namespace strata
