// Copies of gradients that wait for a later step, on the GPU (stale.cpp).
#include "cuda/elementwise.h"

namespace strata::cuda::stale_kernels {
namespace {

struct Take {
  STRATA_DEVICE void operator()(const float (&x)[1], float (&y)[1], int64_t) const { y[0] = x[0]; }
};
// Gradient and what is kept, which stays where gradients overflowed (NaN).
struct Keep {
  const double* overflow;
  STRATA_DEVICE void operator()(const float (&x)[2], float (&y)[1], int64_t) const {
    y[0] = overflow && *overflow != *overflow ? x[1] : x[0];
  }
};

const Registration kinds[] = {
    {"stale_take", [](const Binding& b) { return bind_apply<1, 1>(b, Take{}); }},
    {"stale_keep", [](const Binding& b) {
       return bind_apply<2, 1>(b, Keep{b.has_input(2) ? b.in<double>(2) : nullptr});
     }}};

}  // namespace
}  // namespace strata::cuda::stale_kernels
