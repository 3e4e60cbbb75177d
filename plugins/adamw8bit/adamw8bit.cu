// AdamW with 8-bit moments on the GPU: a block of threads decodes, updates and encodes one block of 256 elements; the
// mathematics is in adamw8bit_kernel.h.
#include "cuda/bind.h"
#include "plugins/adamw8bit/adamw8bit_codec.h"

namespace strata::cuda::adamw8bit_kernels {
namespace {

using namespace strata::adamw8bit;
constexpr int kBlock = 256;

struct Settings {
  double beta1, beta2, epsilon, learning_rate, weight_decay;
  const double *step, *factor, *scale;
};

STRATA_KERNEL update(float* parameter, const float* gradient, uint8_t* m, float* m_scale, uint8_t* v, float* v_scale,
                     int64_t columns, int64_t of_row, Settings s) {
  __shared__ float scratch[32];
  const double scale = s.scale ? *s.scale : 1.0;
  if (scale != scale) return;  // the step overflowed
  const int64_t block = blockIdx.x, in_row = block % of_row * kBlock + threadIdx.x,
                i = block / of_row * columns + in_row;
  const bool there = in_row < columns;
  const double step = *s.step, rate = s.learning_rate * *s.factor;
  float first = 0, second = 0;
  if (there) {
    const float g = gradient[i] * float(scale);
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
  const Attributes& a = b.attributes();
  const Settings s{
      a.real("beta1"),        a.real("beta2"), a.real("epsilon"), a.real("learning_rate"),
      a.real("weight_decay"), b.in<double>(6), b.in<double>(7),   b.has_input(8) ? b.in<double>(8) : nullptr};
  const int64_t rows = b.input(0).shape.size() > 1 ? b.input(0).shape[0] : 1, columns = count(b.input(0)) / rows;
  return [=, p = b.out<float>(0), g = b.in<float>(1), m = b.out<uint8_t>(1), ms = b.out<float>(2),
          v = b.out<uint8_t>(3), vs = b.out<float>(4), queue = b.queue()] {
    const int64_t of_row = (columns + kBlock - 1) / kBlock;
    launch(update, dim3(unsigned(rows * of_row)), kBlock, 0, queue, p, g, m, ms, v, vs, columns, of_row, s);
  };
});

}  // namespace
}  // namespace strata::cuda::adamw8bit_kernels
