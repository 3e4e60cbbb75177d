// The linear layer's three products by gemm.h, and that which ends with GELU's gradient.
#include <memory>

#include "cuda/register.h"
#include "cuda/gemm.h"
#include "engine/ops/linear_gelu.h"

namespace strata::cuda {
namespace {

Launch bind_product(const Binding& b, GemmShape shape) {
  shape.in = b.input(0).dtype;
  shape.out = b.output(0).dtype;
  shape.bias = b.has_input(2) && !shape.gelu_gradient;
  shape.accumulate = b.accumulates(0);
  GemmMemory memory{b.in<void>(0), b.in<void>(1), b.out<void>(0), b.workspace()};
  if (shape.bias) memory.bias = b.in<void>(2);
  if (shape.gelu_gradient) memory.x = b.in<void>(2);
  const auto gemm = std::make_shared<Gemm>(shape, memory);
  if (!gemm->known()) return bind_in_turn(b, "cuda");
  return [gemm, memory, queue = b.queue()] { gemm->run(memory, queue); };
}
GemmShape input_gradient(const Binding& b) {
  const int64_t m = b.rows(0), n = b.columns(1), k = b.columns(0);
  return {false, false, m, n, k, k, n, n, {}, {}};
}
int64_t workspace(const OpView&, int) { return Gemm::workspace(); }

const Registration kinds[] = {
    {"linear",
     [](const Binding& b) {
       const int64_t m = b.rows(0), n = b.input(1).shape[0], k = b.columns(0);
       return bind_product(b, {false, true, m, n, k, k, k, n, {}, {}});
     },
     workspace},
    {"linear_input_gradient", [](const Binding& b) { return bind_product(b, input_gradient(b)); }, workspace},
    {"linear_gelu_gradient",
     [](const Binding& b) {
       GemmShape shape = input_gradient(b);
       shape.gelu_gradient = true;
       return bind_product(b, shape);
     },
     workspace},
    {"linear_weight_gradient",
     [](const Binding& b) {
       const int64_t m = b.columns(0), n = b.columns(1), k = b.rows(0);
       return bind_product(b, {true, false, m, n, k, m, n, n, {}, {}});
     },
     workspace}};

}  // namespace
}  // namespace strata::cuda
