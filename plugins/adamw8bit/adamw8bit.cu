// AdamW with 8-bit moments on the GPU: a block of threads decodes, updates and encodes one block of 256 elements; the
// mathematics is in adamw8bit_kernel.h.
#include "cuda/bind.h"
#include "plugins/adamw/adamw_rates.h"
#include "plugins/adamw8bit/adamw8bit_codec.h"
#include "strata/optimizer.h"

namespace strata::cuda::adamw8bit_kernels {
namespace {

using namespace strata::adamw8bit;
constexpr int kBlock = 256;

struct Settings : UpdateScalars {
  double beta1, beta2, epsilon;
};

// The moments of one element after this step.
struct Moments {
  float first, second;
  STRATA_DEVICE Moments(const Settings& s, float gradient, uint8_t m, float m_scale, uint8_t v, float v_scale) {
    const float g = gradient * float(s.gradient_scale());
    first = code_value(m, 1, true) * m_scale;
    second = code_value(v, 2, false) * v_scale;
    first += float(1 - s.beta1) * (g - first);
    second = float(s.beta2) * second + float(1 - s.beta2) * g * g;
  }
  STRATA_DEVICE Moments() : first(0), second(0) {}
  STRATA_DEVICE void change(const AdamRates& rates, float epsilon, float& parameter) const {
    parameter = parameter * rates.decay - rates.step_size * first / (sqrtf(second) * rates.root + epsilon);
  }
  STRATA_DEVICE float size() const { return first < 0 ? -first : first; }
  STRATA_DEVICE void encode(float to_m, float to_v, uint8_t& m, uint8_t& v) const {
    m = signed_code(first * reciprocal(to_m));
    v = unsigned_code(second * reciprocal(to_v), true);
  }
};

STRATA_KERNEL update(float* parameter, const float* gradient, uint8_t* m, float* m_scale, uint8_t* v, float* v_scale,
                     int64_t columns, int64_t of_row, int64_t all, Settings s) {
  __shared__ float scratch[32];
  if (s.skips()) return;
  const AdamRates rates = adam_rates(s, 1, s.step());
  for (int64_t block = blockIdx.x; block < all; block += gridDim.x) {
    const int64_t in_row = block % of_row * kBlock + threadIdx.x, i = block / of_row * columns + in_row;
    const bool there = in_row < columns;
    Moments now;
    if (there) {
      now = Moments(s, gradient[i], m[i], m_scale[block], v[i], v_scale[block]);
      now.change(rates, float(s.epsilon), parameter[i]);
    }
    const float to_m = block_max(now.size(), scratch),
                to_v = block_max(now.second, scratch);  // and all have read scales
    if (there) now.encode(to_m, to_v, m[i], v[i]);
    if (threadIdx.x == 0) {
      m_scale[block] = to_m;
      v_scale[block] = to_v;
    }
  }
}

// Parts of a vector or of rows (adamw8bit_part.h), a block of threads for each block of the whole rows: of each row
// `count` elements from `begin` on are here. The largest of m come first, those of v `of_moment` numbers behind.
struct Cut {
  int64_t begin, count, of_row, of_moment;
  STRATA_DEVICE int64_t in_row() const { return blockIdx.x % of_row * kBlock + threadIdx.x - begin; }
  STRATA_DEVICE bool has(int64_t i) const { return i >= 0 && i < count; }
  STRATA_DEVICE int64_t at(int64_t i) const { return blockIdx.x / of_row * count + i; }
};
STRATA_KERNEL largest(const float* gradient, const uint8_t* m, const float* m_scale, const uint8_t* v,
                      const float* v_scale, Cut cut, float* out, Settings s) {
  __shared__ float scratch[32];
  const int64_t block = blockIdx.x, in_row = cut.in_row(), i = cut.at(in_row);
  Moments now;
  if (cut.has(in_row) && !s.skips()) now = Moments(s, gradient[i], m[i], m_scale[block], v[i], v_scale[block]);
  const float to_m = block_max(now.size(), scratch), to_v = block_max(now.second, scratch);
  if (threadIdx.x == 0) {
    out[block] = to_m;
    out[cut.of_moment + block] = to_v;
  }
}
STRATA_KERNEL update_part(float* parameter, const float* gradient, uint8_t* m, float* m_scale, uint8_t* v,
                          float* v_scale, const float* largest, Cut cut, Settings s) {
  if (s.skips()) return;
  const AdamRates rates = adam_rates(s, 1, s.step());
  const int64_t block = blockIdx.x, in_row = cut.in_row(), i = cut.at(in_row);
  const float to_m = largest[block], to_v = largest[cut.of_moment + block];
  if (cut.has(in_row)) {
    const Moments now(s, gradient[i], m[i], m_scale[block], v[i], v_scale[block]);
    now.change(rates, float(s.epsilon), parameter[i]);
    now.encode(to_m, to_v, m[i], v[i]);
  }
  __syncthreads();  // all have read the old scales
  if (threadIdx.x == 0) {
    m_scale[block] = to_m;
    v_scale[block] = to_v;
  }
}

// `scales`: of the rows that are here; `largest`: as exchanged, with room for the most rows that any rank has.
Cut cut_of(const Tensor& like, const Tensor& scales, const Tensor& largest) {
  return {box_of(like).offset[like.shape.size() - 1], like.shape.back(), scales.shape.back(), largest.shape[1]};
}

Settings settings(const Binding& b, const UpdateScalars& scalars) {
  const Attributes& a = b.attributes();
  return {scalars, a.real("beta1"), a.real("beta2"), a.real("epsilon")};
}

const Registration kind("adamw_8bit", [](const Binding& b) -> Launch {
  const Update u(b);
  const Attributes& a = u.attributes();
  const Settings s{u.scalars(), a.real("beta1"), a.real("beta2"), a.real("epsilon")};
  const int64_t rows = u.parameter().shape.size() > 1 ? u.parameter().shape[0] : 1,
                columns = u.count() / std::max<int64_t>(1, rows);
  return [=, p = u.parameter<float>(), g = u.gradient<float>(), m = u.state<uint8_t>(0), ms = u.state<float>(1),
          v = u.state<uint8_t>(2), vs = u.state<float>(3), queue = u.queue()] {
    const int64_t of_row = (columns + kBlock - 1) / kBlock, all = rows * of_row;
    launch(update, adam_grid(all), kBlock, 0, queue, p, g, m, ms, v, vs, columns, of_row, all, s);
  };
});

const Registration part_kinds[] = {
    {"adamw_8bit_largest",
     [](const Binding& b) -> Launch {
       const Settings s = settings(b, update_scalars(b, 5));
       const Cut cut = cut_of(b.input(0), b.input(2), b.output(0));
       return [=, g = b.in<float>(0), m = b.in<uint8_t>(1), ms = b.in<float>(2), v = b.in<uint8_t>(3),
               vs = b.in<float>(4), out = b.out<float>(0), of_here = unsigned(count(b.input(2))),
               queue = b.queue()] { launch(largest, dim3(of_here), kBlock, 0, queue, g, m, ms, v, vs, cut, out, s); };
     }},
    {"adamw_8bit_part", [](const Binding& b) -> Launch {
       const Settings s = settings(b, update_scalars(b, 7));
       const Cut cut = cut_of(b.input(1), b.input(3), b.input(6));
       return [=, p = b.out<float>(0), g = b.in<float>(1), m = b.out<uint8_t>(1), ms = b.out<float>(2),
               v = b.out<uint8_t>(3), vs = b.out<float>(4), all = b.in<float>(6), of_here = unsigned(count(b.input(3))),
               queue = b.queue()] {
         launch(update_part, dim3(of_here), kBlock, 0, queue, p, g, m, ms, v, vs, all, cut, s);
       };
     }}};

}  // namespace
}  // namespace strata::cuda::adamw8bit_kernels
