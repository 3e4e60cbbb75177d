// SM3 on the GPU: a block of threads a row, largest numbers of columns by atomic maxima, whose order does not matter;
// the mathematics is in sm3_kernel.h.
#include "cuda/bind.h"
#include "strata/optimizer.h"

namespace strata::cuda::sm3_kernels {
namespace {

constexpr int kBlock = 256;

struct Settings : UpdateScalars {
  double momentum, epsilon;
  // One element; returns nu.
  STRATA_DEVICE float change(float bound, float gradient, float& parameter, float* m) const {
    const float g = gradient * float(gradient_scale()), nu = bound + g * g;
    float u = nu > 0 ? g / sqrtf(nu + float(epsilon)) : 0.0f;
    if (m) u = *m = float(momentum) * *m + float(1 - momentum) * u;
    parameter = parameter * float(1 - rate() * weight_decay) - float(rate()) * u;
    return nu;
  }
};

STRATA_KERNEL clear(float* out, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (i < count) out[i] = 0;
}

STRATA_KERNEL rows(float* parameter, const float* gradient, float* row, const float* column, float* m, float* largest,
                   int64_t columns, Settings s) {
  __shared__ float scratch[32];
  if (s.skips()) return;
  const int64_t r = blockIdx.x;
  const float bound = row[r];
  float top = 0;
  for (int64_t j = threadIdx.x; j < columns; j += kBlock) {
    const int64_t i = r * columns + j;
    const float nu = s.change(bound < column[j] ? bound : column[j], gradient[i], parameter[i], m ? m + i : nullptr);
    top = nu > top ? nu : top;
    atomic_max(largest + j, nu);
  }
  top = block_max(top, scratch);
  if (threadIdx.x == 0) row[r] = top;
}

STRATA_KERNEL keep(const float* largest, float* column, int64_t columns, Settings s) {
  const int64_t j = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (j < columns && !s.skips()) column[j] = largest[j];
}

STRATA_KERNEL vector(float* parameter, const float* gradient, float* accumulator, float* m, int64_t count, Settings s) {
  const int64_t i = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (i < count && !s.skips())
    accumulator[i] = s.change(accumulator[i], gradient[i], parameter[i], m ? m + i : nullptr);
}

int64_t columns_of(const UpdateView& v) { return v.has_state(1) ? v.state(1).shape[0] : 0; }

const Registration kind(
    "sm3",
    [](const Binding& b) -> Launch {
      const Update u(b);
      const Settings s{u.scalars(), u.attributes().real("momentum"), u.attributes().real("epsilon")};
      return [=, p = u.parameter<float>(), g = u.gradient<float>(), row = u.state<float>(0), column = u.state<float>(1),
              m = u.state<float>(2), count_of_rows = u.state(0).shape[0], columns = columns_of(u),
              largest = u.workspace<float>(), queue = u.queue()] {
        if (!column)
          return launch(vector, dim3(blocks(count_of_rows, kBlock)), kBlock, 0, queue, p, g, row, m, count_of_rows, s);
        const dim3 across(blocks(columns, kBlock));
        launch(clear, across, kBlock, 0, queue, largest, columns);
        launch(rows, dim3(unsigned(count_of_rows)), kBlock, 0, queue, p, g, row, column, m, largest, columns, s);
        launch(keep, across, kBlock, 0, queue, largest, column, columns, s);
      };
    },
    [](const OpView& v, int) { return columns_of(UpdateView(v)) * 4; });

}  // namespace
}  // namespace strata::cuda::sm3_kernels
