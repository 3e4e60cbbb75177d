// RMSNorm of each query head and each key head (engine/ops/head_norm.cpp). A warp owns a head; the backward pass adds
// each block's share of the weights' gradients in a fixed order, so results do not change from run to run.
#include "cuda/sum_parts.h"

namespace strata::cuda::head_norm_kernels {
namespace {

constexpr int kMost = 256, kHeld = kMost / 32, kParts = 1024;

struct Heads {
  int64_t rows;
  int groups, queries, size;
  float epsilon, offset;
  Heads(const OpView& v, int qkv)
      : rows(v.rows(qkv)),
        queries(int(v.attributes().integer("queries_per_group"))),
        size(int(v.attributes().integer("head_size"))),
        epsilon(float(v.attributes().real("epsilon"))),
        offset(float(v.attributes().real("offset", 0.0))) {
    groups = int(v.columns(qkv) / ((queries + 2) * size));
    require(size <= kMost, v, "heads of at most 256 on the cuda backend");
  }
  int64_t heads() const { return rows * groups * (queries + 2); }
};

// The head that is `item` of all: where it begins, and where its statistics are, or -1 for a value.
struct Place {
  int64_t at, number;
  bool key;
  STRATA_DEVICE Place(const Heads& s, int64_t item) {
    const int64_t group = item / (s.queries + 2), head = item % (s.queries + 2);
    at = item * s.size;
    number = head > s.queries ? -1 : group * (s.queries + 1) + head;
    key = head == s.queries;
  }
};

template <class T>
STRATA_KERNEL forward(const T* x, const T* wq, const T* wk, T* y, float* statistics, Heads s) {
  const int lane = int(threadIdx.x);
  const Place p(s, blockIdx.x);
  float v[kHeld], squares = 0;
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    v[j] = j * 32 + lane < s.size ? to_float(x[p.at + j * 32 + lane]) : 0.0f;
    squares += v[j] * v[j];
  }
  const float inverse = rsqrtf(warp_sum(squares) / float(s.size) + s.epsilon);
  const T* const w = p.key ? wk : wq;
#pragma unroll
  for (int j = 0; j < kHeld; ++j)
    if (j * 32 + lane < s.size)
      y[p.at + j * 32 + lane] =
          from_float<T>(p.number < 0 ? v[j] : v[j] * inverse * (s.offset + to_float(w[j * 32 + lane])));
  if (lane == 0 && p.number >= 0) statistics[p.number] = inverse;
}

// Heads blockIdx.x, blockIdx.x + gridDim.x, …; their dw of queries and of keys into parts (gridDim.x, 2, size).
template <class T>
STRATA_KERNEL gradient(const T* dy, const T* x, const T* wq, const T* wk, const float* statistics, T* dx, float* parts,
                       int64_t heads, Heads s) {
  const int lane = int(threadIdx.x);
  float dw[2][kHeld] = {};
  for (int64_t item = blockIdx.x; item < heads; item += gridDim.x) {
    const Place p(s, item);
    const float inverse = p.number < 0 ? 1.0f : statistics[p.number];
    const T* const w = p.key ? wk : wq;
    float g[kHeld], normed[kHeld], dot = 0;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const bool here = j * 32 + lane < s.size;
      g[j] = here ? to_float(dy[p.at + j * 32 + lane]) : 0.0f;
      normed[j] = here ? to_float(x[p.at + j * 32 + lane]) * inverse : 0.0f;
      if (p.number < 0) continue;
      dw[0][j] += p.key ? 0.0f : g[j] * normed[j];
      dw[1][j] += p.key ? g[j] * normed[j] : 0.0f;
      g[j] *= here ? s.offset + to_float(w[j * 32 + lane]) : 0.0f;
      dot += g[j] * normed[j];
    }
    dot = warp_sum(dot) / float(s.size);
#pragma unroll
    for (int j = 0; j < kHeld; ++j)
      if (j * 32 + lane < s.size)
        dx[p.at + j * 32 + lane] = from_float<T>(p.number < 0 ? g[j] : (g[j] - normed[j] * dot) * inverse);
  }
  for (int key = 0; key < 2; ++key)
#pragma unroll
    for (int j = 0; j < kHeld; ++j)
      if (j * 32 + lane < s.size) parts[(int64_t(blockIdx.x) * 2 + key) * s.size + j * 32 + lane] = dw[key][j];
}

int parts_of(const OpView& v) { return int(std::min<int64_t>(kParts, Heads(v, 0).heads())); }

const Registration forward_kind("head_norm", [](const Binding& b) -> Launch {
  return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
    using T = decltype(zero);
    return [s = Heads(b, 0), x = b.in<T>(0), wq = b.in<T>(1), wk = b.in<T>(2), y = b.out<T>(0),
            statistics = b.out<float>(1), queue = b.queue()] {
      launch(forward<T>, dim3(unsigned(s.heads())), 32, 0, queue, x, wq, wk, y, statistics, s);
    };
  });
});
const Registration gradient_kind(
    "head_norm_gradient",
    [](const Binding& b) -> Launch {
      return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
        using T = decltype(zero);
        return [s = Heads(b, 0), dy = b.in<T>(0), x = b.in<T>(1), wq = b.in<T>(2), wk = b.in<T>(3),
                statistics = b.in<float>(4), dx = b.out<T>(0), dwq = b.out<float>(1), dwk = b.out<float>(2),
                onto_q = b.accumulates(1), onto_k = b.accumulates(2), parts = b.workspace<float>(), count = parts_of(b),
                queue = b.queue()] {
          launch(gradient<T>, dim3(unsigned(count)), 32, 0, queue, dy, x, wq, wk, statistics, dx, parts, s.heads(), s);
          launch_sum_parts(parts, count, s.size, {{dwq, dwk}, {onto_q, onto_k}}, queue);
        };
      });
    },
    [](const OpView& v, int) { return parts_of(v) * 2 * v.attributes().integer("head_size") * 4; });

}  // namespace
}  // namespace strata::cuda::head_norm_kernels
