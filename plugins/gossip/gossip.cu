// The mean of a rank's parameter and its neighbours', on the GPU (gossip.cpp).
#include "cuda/elementwise.h"

namespace strata::cuda::gossip_kernels {
namespace {

struct MeanOfTwo {
  STRATA_DEVICE void operator()(const float (&x)[2], float (&y)[1], int64_t) const { y[0] = (x[0] + x[1]) / 2; }
};
struct MeanOfThree {
  STRATA_DEVICE void operator()(const float (&x)[3], float (&y)[1], int64_t) const { y[0] = (x[0] + x[1] + x[2]) / 3; }
};

const Registration kind("gossip_mix", [](const Binding& b) -> Launch {
  return b.inputs() == 3 ? bind_apply<3, 1>(b, MeanOfThree{}) : bind_apply<2, 1>(b, MeanOfTwo{});
});

}  // namespace
}  // namespace strata::cuda::gossip_kernels
