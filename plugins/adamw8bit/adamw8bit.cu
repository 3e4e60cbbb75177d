// AdamW with 8-bit moments on the GPU: a block of threads decodes, updates and encodes one block of 256 elements; the
// mathematics is in adamw8bit_kernel.h.
#include "cuda/bind.h"
#include "plugins/adamw8bit/adamw8bit_codec.h"
#include "strata/optimizer.h"

namespace strata::cuda::adamw8bit_kernels {
namespace {

using namespace strata::adamw8bit;
constexpr int kBlock = 256;

struct Settings : UpdateScalars {
  double beta1, beta2, epsilon;
};

STRATA_KERNEL update(float* parameter, const float* gradient, uint8_t* m, float* m_scale, uint8_t* v, float* v_scale,
                     int64_t columns, int64_t of_row, Settings s) {
  __shared__ float scratch[32];
  if (s.skips()) return;
  const int64_t block = blockIdx.x, in_row = block % of_row * kBlock + threadIdx.x,
                i = block / of_row * columns + in_row;
  const bool there = in_row < columns;
  const double step = s.step(), rate = s.rate();
  float first = 0, second = 0;
  if (there) {
    const float g = gradient[i] * float(s.gradient_scale());
    first = code_value(m[i], 1, true) * m_scale[block];
    second = code_value(v[i], 2, false) * v_scale[block];
    first += float(1 - s.beta1) * (g - first);
    second = float(s.beta2) * second + float(1 - s.beta2) * g * g;
    const float root = float(1 / sqrt(1 - pow(s.beta2, step)));
    parameter[i] = parameter[i] * float(1 - rate * s.weight_decay) -
                   float(rate / (1 - pow(s.beta1, step))) * first / (sqrtf(second) * root + float(s.epsilon));
  }
  const float to_m = block_max(first < 0 ? -first : first, scratch), to_v = block_max(second, scratch);
  if (there) {
    m[i] = signed_code(first * reciprocal(to_m));
    v[i] = unsigned_code(second * reciprocal(to_v), true);
  }
  if (threadIdx.x == 0) {
    m_scale[block] = to_m;
    v_scale[block] = to_v;
  }
}

const Registration kind("adamw_8bit", [](const Binding& b) -> Launch {
  const Update u(b);
  const Attributes& a = u.attributes();
  const Settings s{u.scalars(), a.real("beta1"), a.real("beta2"), a.real("epsilon")};
  const int64_t rows = u.parameter().shape.size() > 1 ? u.parameter().shape[0] : 1, columns = u.count() / rows;
  return [=, p = u.parameter<float>(), g = u.gradient<float>(), m = u.state<uint8_t>(0), ms = u.state<float>(1),
          v = u.state<uint8_t>(2), vs = u.state<float>(3), queue = u.queue()] {
    const int64_t of_row = (columns + kBlock - 1) / kBlock;
    launch(update, dim3(unsigned(rows * of_row)), kBlock, 0, queue, p, g, m, ms, v, vs, columns, of_row, s);
  };
});

}  // namespace
}  // namespace strata::cuda::adamw8bit_kernels
