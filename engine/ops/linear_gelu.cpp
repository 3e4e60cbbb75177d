// GELU's gradient as the last step of the product that makes its input: dx = (dy w) ∘ gelu'(x). On the GPU the product
// between is never written; elsewhere the two kernels run one after the other and give the bits that two ops give.
#include "engine/ops/linear_gelu.h"

#include <memory>

#include "engine/ops/registration.h"

namespace strata {
namespace {

const Kernel& kernel_of(std::string_view kind, std::string_view backend) {
  return find_kind(kind).kernels.find(backend)->second;
}
// dy, w -> dx
Op product_of(const OpView& v) {
  return {.kind = &find_kind("linear_input_gradient"),
          .inputs = {v.op().inputs[0], v.op().inputs[1]},
          .outputs = v.op().outputs};
}

Kernel in_turn(std::string backend) {
  return {[backend](const Binding& b) { return bind_in_turn(b, backend); },
          [backend](const OpView& v, int threads) {
            const Op product = product_of(v);
            const Kernel& kernel = kernel_of(product.kind->name, backend);
            return kernel.workspace ? kernel.workspace(OpView(v.program(), product), threads) : 0;
          }};
}

const AtLoad linear_gelu_registered([] {
  OpKind kind{.name = "linear_gelu_gradient",
              .summary = "dy (…, out), w (out, in), x (…, in) -> dx (…, in) = (dy w) gelu'(x)",
              .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                require(v.inputs() == 3 && v.has_input(0) && v.has_input(1) && v.has_input(2), v,
                        "dy (…, out), w (out, in) and x (…, in)");
                const Op product = product_of(v);
                const auto specs = product.kind->shape(OpView(v.program(), product));
                require(v.input(2).shape == specs[0].shape && v.input(2).dtype == specs[0].dtype, v,
                        "an x like the product dy w");
                return specs;
              },
              .cost =
                  [](const OpView& v) {
                    const Op product = product_of(v);
                    Cost cost = cost_of(OpView(v.program(), product));
                    cost.bytes += double(v.input(2).bytes());
                    return cost;
                  },
              .half = true,
              .sharding = {.dimensions = "...o, oi, ...i -> ...i", .linear = 1}};
  kind.kernels = {{"cpu", in_turn("cpu")}, {"reference", in_turn("reference")}};
  register_kind(std::move(kind));
});

}  // namespace

Launch bind_in_turn(const Binding& b, const std::string& backend) {
  struct Ops {
    Op product, slope;
  };
  const auto ops = std::make_shared<const Ops>(Ops{product_of(b), Op{.kind = &find_kind("gelu_gradient"),
                                                                     .inputs = {b.op().outputs[0], b.op().inputs[2]},
                                                                     .outputs = b.op().outputs}});
  const auto bind = [&](const Op& op, std::vector<void*> inputs) {
    return kernel_of(op.kind->name, backend)
        .bind(Binding(OpView(b.program(), op), std::move(inputs), {b.out<void>(0)}, b.workspace(), b.threads(), nullptr,
                      b.queue()));
  };
  const auto in = [&](int i) { return const_cast<void*>(b.in<void>(i)); };
  return [ops, product = bind(ops->product, {in(0), in(1)}), slope = bind(ops->slope, {b.out<void>(0), in(2)})] {
    product();
    slope();
  };
}

}  // namespace strata
