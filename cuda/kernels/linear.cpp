// The linear layer's three products by gemm.h.
#include <memory>

#include "cuda/register.h"
#include "cuda/gemm.h"

namespace strata::cuda {
namespace {

Launch bind_product(const Binding& b, GemmShape shape) {
  shape.in = b.input(0).dtype;
  shape.out = b.output(0).dtype;
  shape.bias = b.has_input(2);
  shape.accumulate = b.accumulates(0);
  const void *A = b.in<void>(0), *B = b.in<void>(1), *bias = b.has_input(2) ? b.in<void>(2) : nullptr;
  const auto gemm = std::make_shared<Gemm>(shape, A, B, bias, b.out<void>(0), b.workspace());
  return [=, C = b.out<void>(0), workspace = b.workspace(), queue = b.queue()] {
    gemm->run(A, B, bias, C, workspace, queue);
  };
}
int64_t workspace(const OpView&, int) { return Gemm::workspace(); }

const Registration kinds[] = {{"linear",
                               [](const Binding& b) {
                                 const int64_t m = b.rows(0), n = b.input(1).shape[0], k = b.columns(0);
                                 return bind_product(b, {false, true, m, n, k, k, k, n, {}, {}});
                               },
                               workspace},
                              {"linear_input_gradient",
                               [](const Binding& b) {
                                 const int64_t m = b.rows(0), n = b.columns(1), k = b.columns(0);
                                 return bind_product(b, {false, false, m, n, k, k, n, n, {}, {}});
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
