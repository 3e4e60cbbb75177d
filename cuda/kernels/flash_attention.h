// Causal attention of 16-bit numbers on tensor cores (FlashAttention-2, arXiv 2307.08691), heads of 64 or 128. A warp
// owns 16 rows; keys (or queries) pass through shared memory in tiles, two at a time. The backward pass computes scores
// twice, once by queries and once by keys, so that no sum needs atomics and runs repeat bit for bit.
#pragma once
#include "cuda/kernels/attention.h"
#include "cuda/tensor_core.h"

namespace strata::cuda::flash {

using attention_kernels::Dropped;
using attention_kernels::Sizes;

constexpr int kWarps = 4, kBlock = 32 * kWarps, kRows = 16 * kWarps;
constexpr int kKeys = 64;     // of a tile that queries walk over
constexpr int kQueries = 32;  // of a tile that keys walk over
constexpr float kLog2e = 1.4426950408889634f;

// Rows of a tile lie D + 8 elements apart: addresses of eight rows fall into different banks.
template <int D>
constexpr int kStride = D + 8;

// Starts the copy of rows [first, first + kCount) of a slice D wide; zeros from row `rows` on.
template <int D, int kCount, class T>
STRATA_DEVICE void start_tile(T* tile, const T* from, int64_t stride, int first, int rows) {
  for (int i = int(threadIdx.x); i < kCount * D / 8; i += kBlock) {
    const int r = i / (D / 8), c = i % (D / 8) * 8;
    const bool there = first + r < rows;
    copy_16(tile + r * kStride<D> + c, from + int64_t(there ? first + r : 0) * stride + c, there);
  }
}

// The A fragment of 16 rows from `tile`, columns [16 k, 16 k + 16).
template <int D, class T>
STRATA_DEVICE void load_a(uint32_t (&a)[4], const T* tile, int k) {
  const int lane = int(threadIdx.x) % 32;
  load_matrices(a, tile + (lane % 8 + lane / 8 % 2 * 8) * kStride<D> + 16 * k + lane / 16 * 8, false);
}
// B fragments of X^T where X has 16 rows here: columns [16 k, 16 k + 16) of X; two tiles of 8 rows of X.
template <int D, class T>
STRATA_DEVICE void load_b_rows(uint32_t (&b)[4], const T* tile, int k) {
  const int lane = int(threadIdx.x) % 32;
  load_matrices(b, tile + (lane % 8 + lane / 16 * 8) * kStride<D> + 16 * k + lane / 8 % 2 * 8, false);
}
// B fragments of X, 16 rows here (the depth), columns [16 k, 16 k + 16): two tiles of 8 columns.
template <int D, class T>
STRATA_DEVICE void load_b_columns(uint32_t (&b)[4], const T* tile, int k) {
  const int lane = int(threadIdx.x) % 32;
  load_matrices(b, tile + (lane % 8 + lane / 8 % 2 * 8) * kStride<D> + 16 * k + lane / 16 * 8, true);
}

// c (16, 8 kTiles) = rows of `a_tile` times rows of `b_tile`, over D.
template <int D, int kTiles, class T>
STRATA_DEVICE void products(float (&c)[kTiles][4], const T* a_tile, const T* b_tile) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) c[n][i] = 0;
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    uint32_t a[4];
    load_a<D>(a, a_tile, k);
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      uint32_t b[4];
      load_b_rows<D>(b, b_tile + n * 8 * kStride<D>, k);
      mma<T>(c[n], a, {b[0], b[1]});
      mma<T>(c[n + 1], a, {b[2], b[3]});
    }
  }
}

// sum (16, D) += p (16, 8 kTiles) as 16-bit numbers times the 8 kTiles rows of `tile`.
template <int D, int kTiles, class T>
STRATA_DEVICE void add_products(float (&sum)[D / 8][4], const float (&p)[kTiles][4], const T* tile) {
#pragma unroll
  for (int k = 0; k < kTiles / 2; ++k) {
    const uint32_t a[4] = {pack<T>(p[2 * k][0], p[2 * k][1]), pack<T>(p[2 * k][2], p[2 * k][3]),
                           pack<T>(p[2 * k + 1][0], p[2 * k + 1][1]), pack<T>(p[2 * k + 1][2], p[2 * k + 1][3])};
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      uint32_t b[4];
      load_b_columns<D>(b, tile + k * 16 * kStride<D>, n);
      mma<T>(sum[2 * n], a, {b[0], b[1]});
      mma<T>(sum[2 * n + 1], a, {b[2], b[3]});
    }
  }
}

// This lane's part of the 16 rows of `from`, times `factor` a row, into rows of the result below `rows`.
template <int D, class T>
STRATA_DEVICE void write_rows(const float (&from)[D / 8][4], const float (&factor)[2], T* to, int64_t stride, int first,
                              int rows) {
  const int lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + g + 8 * half;
    if (row >= rows) continue;
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
      *reinterpret_cast<uint32_t*>(to + row * stride + 8 * n + 2 * t) =
          pack<T>(from[n][2 * half] * factor[half], from[n][2 * half + 1] * factor[half]);
  }
}

// Over the four lanes that share a row.
STRATA_DEVICE float row_max(float x) {
  for (int width = 1; width < 4; width *= 2) {
    const float other = __shfl_xor_sync(0xFFFFFFFFu, x, width);
    x = other > x ? other : x;
  }
  return x;
}
STRATA_DEVICE float row_sum(float x) {
  for (int width = 1; width < 4; width *= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, width);
  return x;
}

// Calls body(k, keys) for each tile of keys from `begin`, of a tile, to `end`, its values behind them, while the next
// is on its way. What the caller has started to copy before is there too.
template <int D, class T, class Body>
STRATA_DEVICE void over_keys(T* tiles, const T* key, const T* value, const Sizes& s, int begin, int end, Body body) {
  const auto start = [&](int k, int which) {
    T* const to = tiles + which * 2 * kKeys * kStride<D>;
    start_tile<D, kKeys>(to, key, s.width, k, s.time);
    start_tile<D, kKeys>(to + kKeys * kStride<D>, value, s.width, k, s.time);
    commit_copies();
  };
  start(begin, 0);
  for (int k = begin, which = 0; k < end; k += kKeys, which ^= 1) {
    if (k + kKeys < end) {
      start(k + kKeys, which ^ 1);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();
    const T* const keys = tiles + which * 2 * kKeys * kStride<D>;
    body(k, keys);
    __syncthreads();
  }
}

// Of a lane's probabilities of one row, pairs of neighbours 8 apart of which `first` is the place of the first.
template <int N>
STRATA_DEVICE void drop_pairs(float (&p)[N][4], int half, const Dropped& dropped, int64_t first) {
#pragma unroll
  for (int c = 0; c < N; ++c) {
    const int64_t at = first + 8 * c;  // even: its block of four words has the neighbour's, too
    const Words words = dropped.words(at);
    p[c][2 * half] *= dropped.kept(words, at);
    p[c][2 * half + 1] *= dropped.kept(words, at + 1);
  }
}

template <int D>
constexpr int kForwardShared = (kRows + 4 * kKeys) * kStride<D> * 2;

template <class T, int D, bool kDrops>
STRATA_KERNEL forward(const T* qkv, T* out, float* lse, Sizes s) {
  T* const queries = dynamic_shared<T>();
  T* const tiles = queries + kRows * kStride<D>;  // keys, values; then those of the next tile
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int head = int(blockIdx.y), n = int(blockIdx.z);
  const int first = int(gridDim.x - 1 - blockIdx.x) * kRows;  // the longest first
  const T* const base = qkv + int64_t(n) * s.time * s.width;
  const T *const key = base + s.key(head / s.per_group()), *const value = base + s.value(head / s.per_group());
  const int end = first + kRows < s.time ? first + kRows : s.time;
  start_tile<D, kRows>(queries, base + s.query(head), s.width, first, s.time);
  float o[D / 8][4] = {}, top[2] = {-3.0e38f, -3.0e38f}, sum[2] = {0, 0};
  over_keys<D>(tiles, key, value, s, s.begin(n, first) / kKeys * kKeys, end, [&](int k, const T* keys) {
    float p[kKeys / 8][4];
    products<D>(p, queries + warp * 16 * kStride<D>, keys);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + warp * 16 + g + 8 * half;
      float highest = -3.0e38f;
#pragma unroll
      for (int c = 0; c < kKeys / 8; ++c)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = p[c][2 * half + e];
          score = s.sees(n, row, k + 8 * c + 2 * t + e) ? s.score(score) * kLog2e : -3.0e38f;
          highest = score > highest ? score : highest;
        }
      highest = row_max(highest);
      const float before = top[half];
      top[half] = highest > before ? highest : before;
      const float keep = exp2f(before - top[half]);
      float add = 0;
#pragma unroll
      for (int c = 0; c < kKeys / 8; ++c)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = p[c][2 * half + e];
          score = score > -2.9e38f ? exp2f(score - top[half]) : 0.0f;
          add += score;
        }
      if constexpr (kDrops) drop_pairs(p, half, s.dropped, s.dropped.index(n, head, row) + k + 2 * t);
      sum[half] = sum[half] * keep + row_sum(add);
#pragma unroll
      for (int c = 0; c < D / 8; ++c) {
        o[c][2 * half] *= keep;
        o[c][2 * half + 1] *= keep;
      }
    }
    add_products<D>(o, p, keys + kKeys * kStride<D>);
  });
  const float factor[2] = {1 / sum[0], 1 / sum[1]};
  const int64_t out_width = int64_t(s.heads) * s.size;
  write_rows<D>(o, factor, out + int64_t(n) * s.time * out_width + head * D, out_width, first + warp * 16, s.time);
  if (t == 0)
    for (int half = 0; half < 2; ++half)
      if (const int row = first + warp * 16 + g + 8 * half; row < s.time)
        lse[(int64_t(n) * s.heads + head) * s.time + row] = top[half] / kLog2e + logf(sum[half]);
}

template <int D>
constexpr int kQueryShared = (2 * kRows + 4 * kKeys) * kStride<D> * 2;

template <class T, int D, bool kDrops>
STRATA_KERNEL query_gradient(const T* d_out, const T* qkv, const float* lse, const float* dots, T* d_qkv, Sizes s) {
  T* const queries = dynamic_shared<T>();
  T *const slopes = queries + kRows * kStride<D>, *const tiles = slopes + kRows * kStride<D>;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int head = int(blockIdx.y), n = int(blockIdx.z), first = int(gridDim.x - 1 - blockIdx.x) * kRows;
  const T* const base = qkv + int64_t(n) * s.time * s.width;
  const T *const key = base + s.key(head / s.per_group()), *const value = base + s.value(head / s.per_group());
  const int64_t out_width = int64_t(s.heads) * s.size, of_head = (int64_t(n) * s.heads + head) * s.time;
  const int end = first + kRows < s.time ? first + kRows : s.time;
  start_tile<D, kRows>(queries, base + s.query(head), s.width, first, s.time);
  start_tile<D, kRows>(slopes, d_out + int64_t(n) * s.time * out_width + head * D, out_width, first, s.time);
  float shift[2], mean[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + warp * 16 + g + 8 * half;
    shift[half] = row < s.time ? lse[of_head + row] * kLog2e : 0.0f;
    mean[half] = row < s.time ? dots[of_head + row] : 0.0f;
  }
  float dq[D / 8][4] = {};
  over_keys<D>(tiles, key, value, s, s.begin(n, first) / kKeys * kKeys, end, [&](int k, const T* keys) {
    float p[kKeys / 8][4], dp[kKeys / 8][4];
    products<D>(p, queries + warp * 16 * kStride<D>, keys);
    products<D>(dp, slopes + warp * 16 * kStride<D>, keys + kKeys * kStride<D>);
    if constexpr (kDrops)
      for (int half = 0; half < 2; ++half)
        drop_pairs(dp, half, s.dropped, s.dropped.index(n, head, first + warp * 16 + g + 8 * half) + k + 2 * t);
#pragma unroll
    for (int c = 0; c < kKeys / 8; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = first + warp * 16 + g + 8 * (i / 2), column = k + 8 * c + 2 * t + i % 2;
        const float score = s.score(p[c][i]);
        const float e = s.sees(n, row, column) && row < s.time ? exp2f(score * kLog2e - shift[i / 2]) : 0.0f;
        p[c][i] = e * (dp[c][i] - mean[i / 2]) * s.slope(score);
      }
    add_products<D>(dq, p, keys);
  });
  const float factor[2] = {1, 1};
  write_rows<D>(dq, factor, d_qkv + int64_t(n) * s.time * s.width + s.query(head), s.width, first + warp * 16, s.time);
}

template <int D>
constexpr int kKeyShared = (2 * kRows + 4 * kQueries) * kStride<D> * 2;

// Rows are keys here, and columns queries.
template <class T, int D, bool kDrops>
STRATA_KERNEL key_gradient(const T* d_out, const T* qkv, const float* lse, const float* dots, T* d_qkv, Sizes s) {
  T* const keys = dynamic_shared<T>();
  T *const values = keys + kRows * kStride<D>, *const tiles = values + kRows * kStride<D>;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int group = int(blockIdx.y), n = int(blockIdx.z), first = int(blockIdx.x) * kRows;
  const T* const base = qkv + int64_t(n) * s.time * s.width;
  const int64_t out_width = int64_t(s.heads) * s.size;
  const int begin = first / kQueries * kQueries,
            tiles_of_head = (s.end(n, first + kRows - 1, begin, kQueries) - begin + kQueries - 1) / kQueries,
            count = tiles_of_head * s.per_group();
  const auto head_of = [&](int i) { return group * s.per_group() + i / tiles_of_head; };
  const auto query_of = [&](int i) { return begin + i % tiles_of_head * kQueries; };
  const auto start = [&](int i, int which) {
    T* const to = tiles + which * 2 * kQueries * kStride<D>;
    start_tile<D, kQueries>(to, base + s.query(head_of(i)), s.width, query_of(i), s.time);
    start_tile<D, kQueries>(to + kQueries * kStride<D>, d_out + int64_t(n) * s.time * out_width + head_of(i) * D,
                            out_width, query_of(i), s.time);
    commit_copies();
  };
  start_tile<D, kRows>(keys, base + s.key(group), s.width, first, s.time);
  start_tile<D, kRows>(values, base + s.value(group), s.width, first, s.time);
  start(0, 0);
  float dk[D / 8][4] = {}, dv[D / 8][4] = {};
  for (int i = 0, which = 0; i < count; ++i, which ^= 1) {
    if (i + 1 < count) {
      start(i + 1, which ^ 1);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();
    const T* const queries = tiles + which * 2 * kQueries * kStride<D>;
    const T* const slopes = queries + kQueries * kStride<D>;
    const int64_t of_head = (int64_t(n) * s.heads + head_of(i)) * s.time;
    float p[kQueries / 8][4], ds[kQueries / 8][4];
    products<D>(p, keys + warp * 16 * kStride<D>, queries);
    products<D>(ds, values + warp * 16 * kStride<D>, slopes);
#pragma unroll
    for (int c = 0; c < kQueries / 8; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = first + warp * 16 + g + 8 * (e / 2), query = query_of(i) + 8 * c + 2 * t + e % 2;
        const bool seen = s.sees(n, query, row) && query < s.time;
        const float score = s.score(p[c][e]);
        const float shift = seen ? lse[of_head + query] * kLog2e : 0.0f, mean = seen ? dots[of_head + query] : 0.0f;
        p[c][e] = seen ? exp2f(score * kLog2e - shift) : 0.0f;
        const float kept = kDrops ? s.dropped.kept(n, head_of(i), query, row) : 1.0f;
        ds[c][e] = p[c][e] * ((kDrops ? kept * ds[c][e] : ds[c][e]) - mean) * s.slope(score);
        if constexpr (kDrops) p[c][e] *= kept;
      }
    add_products<D>(dv, p, slopes);
    add_products<D>(dk, ds, queries);
    __syncthreads();
  }
  const float factor[2] = {1, 1};
  T* const to = d_qkv + int64_t(n) * s.time * s.width;
  write_rows<D>(dk, factor, to + s.key(group), s.width, first + warp * 16, s.time);
  write_rows<D>(dv, factor, to + s.value(group), s.width, first + warp * 16, s.time);
}

}  // namespace strata::cuda::flash
