// subtract, one half of a reversible block inverted, on the GPU.
#include "cuda/elementwise.h"

namespace strata::cuda::subtract_kernels {
namespace {

struct Subtract {
  STRATA_DEVICE void operator()(const float (&x)[2], float (&y)[1], int64_t) const { y[0] = x[0] - x[1]; }
};
const Registration kind("subtract", [](const Binding& b) { return bind_apply<2, 1>(b, Subtract{}); });

}  // namespace
}  // namespace strata::cuda::subtract_kernels
