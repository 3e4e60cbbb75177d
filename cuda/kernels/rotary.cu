// Rotary positions (arXiv 2104.09864): a block a token turns its query and key heads; angles in f64, rounded once.
#include "cuda/bind.h"

namespace strata::cuda::rotary_kernels {
namespace {

constexpr int kBlock = 128;

template <class T>
STRATA_KERNEL rotary(const T* x, T* y, int64_t time, int heads, int groups, int size, double base, bool inverse) {
  float* const cosine = dynamic_shared<float>();
  float* const sine = cosine + size / 2;
  const int64_t row = blockIdx.x, width = int64_t(heads + 2 * groups) * size;
  for (int i = int(threadIdx.x); i < size / 2; i += kBlock) {
    double s, c;
    sincos(double(row % time) * pow(base, -2.0 * double(i) / double(size)), &s, &c);
    cosine[i] = float(c);
    sine[i] = float(inverse ? -s : s);
  }
  __syncthreads();
  const int per_group = heads / groups + 2, half = size / 2;
  for (int k = int(threadIdx.x); k < (heads + 2 * groups) * half; k += kBlock) {
    const int head = k / half, i = k % half;
    const int64_t at = row * width + int64_t(head) * size + i;
    const float a = to_float(x[at]), b = to_float(x[at + half]);
    const bool turns = head % per_group != per_group - 1;
    const float c = turns ? cosine[i] : 1.0f, s = turns ? sine[i] : 0.0f;
    y[at] = from_float<T>(a * c - b * s);
    y[at + half] = from_float<T>(b * c + a * s);
  }
}

const Registration kind("rotary", [](const Binding& b) -> Launch {
  return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
    using T = decltype(zero);
    const int heads = int(b.attributes().integer("heads")), groups = int(b.attributes().integer("kv_heads"));
    const int size = int(b.columns(0)) / (heads + 2 * groups);
    return [=, x = b.in<T>(0), y = b.out<T>(0), rows = b.rows(0), time = b.input(0).shape[1],
            base = b.attributes().real("base"), inverse = b.attributes().integer("inverse") != 0, queue = b.queue()] {
      launch(rotary<T>, dim3(unsigned(rows)), kBlock, size * 4, queue, x, y, time, heads, groups, size, base, inverse);
    };
  });
});

}  // namespace
}  // namespace strata::cuda::rotary_kernels
