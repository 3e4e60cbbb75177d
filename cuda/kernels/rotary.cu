// Rotary positions (arXiv 2104.09864): turns query and key heads.
#include "cuda/bind.h"
#include "strata/layout.h"

namespace strata::cuda::rotary_kernels {
namespace {

constexpr int kBlock = 128, kEach = 8;
constexpr double kTurn = 6.283185307179586;

// A block turns one position of all sequences: angles serve them all.
template <class T>
STRATA_KERNEL rotary(const T* x, T* y, int64_t batch, int64_t time, Indices positions, int heads, int per_group,
                     int size, double base, bool inverse) {
  float* const cosine = dynamic_shared<float>();
  float* const sine = cosine + size / 2;
  const int64_t position = blockIdx.x, width = int64_t(heads) * size;
  for (int i = int(threadIdx.x); i < size / 2; i += kBlock) {
    // In f64 up to the turns that do not count; f32 is exact enough for what is left.
    const double angle = double(positions(position)) * pow(base, -2.0 * double(i) / double(size));
    float s, c;
    sincosf(float(angle - kTurn * floor(angle / kTurn)), &s, &c);
    cosine[i] = c;
    sine[i] = inverse ? -s : s;
  }
  __syncthreads();
  const int half = size / 2, packs = (half + kEach - 1) / kEach;
  for (int64_t n = blockIdx.y; n < batch; n += gridDim.y)
    for (int k = int(threadIdx.x); k < heads * packs; k += kBlock) {
      const int head = k / packs, i = k % packs * kEach;
      const int64_t at = (n * time + position) * width + int64_t(head) * size;
      const bool turns = head % per_group != per_group - 1;
      float a[kEach], b[kEach];
      load(x + at, i, half, a);
      load(x + at + half, i, half, b);
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const float c = turns && i + e < half ? cosine[i + e] : 1.0f, s = turns && i + e < half ? sine[i + e] : 0.0f;
        const float first = a[e] * c - b[e] * s;
        b[e] = b[e] * c + a[e] * s;
        a[e] = first;
      }
      store(y + at, i, half, a);
      store(y + at + half, i, half, b);
    }
}

const Registration kind("rotary", [](const Binding& b) -> Launch {
  return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
    using T = decltype(zero);
    const int size = int(b.attributes().integer("head_size")), heads = int(b.columns(0)) / size,
              per_group = int(b.attributes().integer("queries_per_group")) + 2;  // keys and values among them
    return [=, x = b.in<T>(0), y = b.out<T>(0), batch = b.input(0).shape[0], time = b.input(0).shape[1],
            positions = Indices(b.input(0), 1), base = b.attributes().real("base"),
            inverse = b.attributes().integer("inverse") != 0, queue = b.queue()] {
      const int64_t side_by_side = std::max<int64_t>(1, std::min(batch, 4096 / time));  // positions alone may be few
      launch(rotary<T>, dim3(unsigned(time), unsigned(side_by_side)), kBlock, size * 4, queue, x, y, batch, time,
             positions, heads, per_group, size, base, inverse);
    };
  });
});

}  // namespace
}  // namespace strata::cuda::rotary_kernels
