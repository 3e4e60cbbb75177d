// Changes of parameters since the last outer update, and that update, on the GPU (local_sgd.cpp).
#include "cuda/elementwise.h"

namespace strata::cuda::local_sgd_kernels {
namespace {

struct Change {
  STRATA_DEVICE void operator()(const float (&x)[2], float (&y)[1], int64_t) const { y[0] = x[0] - x[1]; }
};

// In: sum of changes, outer parameter, a rank's own, momentum; out: outer parameter, own, momentum.
struct Outer {
  float ranks, rate, decay, keep;
  explicit Outer(const Binding& b)
      : ranks(float(b.attributes().integer("ranks"))),
        rate(float(b.attributes().real("learning_rate"))),
        decay(float(b.attributes().real("momentum"))),
        keep(float(b.attributes().real("keep"))) {}
  STRATA_DEVICE void update(float step, const float* x, float* y) const {
    y[0] = rounded_sum(x[1], -rounded_product(rate, step));
    y[1] = keep == 0 ? y[0] : rounded_sum(rounded_product(keep, x[2]), rounded_product(1 - keep, y[0]));
  }
  STRATA_DEVICE void operator()(const float (&x)[3], float (&y)[2], int64_t) const { update(x[0] / ranks, x, y); }
  STRATA_DEVICE void operator()(const float (&x)[4], float (&y)[3], int64_t) const {
    const float step = x[0] / ranks;
    y[2] = rounded_sum(rounded_product(decay, x[3]), step);
    update(rounded_sum(step, rounded_product(decay, y[2])), x, y);
  }
};

const Registration kinds[] = {
    {"local_sgd_change", [](const Binding& b) { return bind_apply<2, 1>(b, Change{}); }},
    {"local_sgd_outer", [](const Binding& b) -> Launch {
       return b.inputs() == 4 ? bind_apply<4, 3>(b, Outer(b)) : bind_apply<3, 2>(b, Outer(b));
     }}};

}  // namespace
}  // namespace strata::cuda::local_sgd_kernels
