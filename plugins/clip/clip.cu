// Clipping's factor from the exact sum of squares, on the GPU; see clip.cpp.
#include "cuda/bind.h"
#include "strata/exact_sum.h"

namespace strata::cuda::clip_kernels {
namespace {

STRATA_KERNEL clip_factor(const double* sum, const double* scale, double limit, double* factor, double* norm) {
  const double s = scale ? *scale : 1.0;
  *norm = s != s ? 0.0 : s * sqrt(value_of_sum(sum));
  const double f = limit / (*norm + 1e-6);
  *factor = f < 1 ? f : 1.0;
}

const Registration kind("clip_factor", [](const Binding& b) -> Launch {
  return [sum = b.in<double>(0), scale = b.has_input(1) ? b.in<double>(1) : nullptr,
          limit = b.attributes().real("max_norm"), factor = b.out<double>(0), norm = b.out<double>(1),
          queue = b.queue()] { launch(clip_factor, dim3(1), 1, 0, queue, sum, scale, limit, factor, norm); };
});

}  // namespace
}  // namespace strata::cuda::clip_kernels
