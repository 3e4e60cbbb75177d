// Causal attention with grouped queries, tile by tile with a running softmax (FlashAttention, arXiv 2205.14135): scores
// of time × time never exist. A warp owns a query row (backward: also a key row), its lanes 32 keys at a time, then the
// head's dimensions; sums in f32 and in a fixed order.
#include "cuda/kernels/attention_rows.h"
#include "cuda/kernels/flash_attention.h"

namespace strata::cuda::attention_kernels {
namespace {

template <class T, bool kDrops>
STRATA_KERNEL forward(const T* qkv, T* out, float* lse, Sizes s) {
  float* const keys = dynamic_shared<float>();
  float *const values = keys + kTile * (s.size + 1), *const queries = values + kTile * (s.size + 1);
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const int head = int(blockIdx.y), n = int(blockIdx.z), first = int(blockIdx.x) * kWarps, row = first + warp;
  const T* base = qkv + int64_t(n) * s.time * s.width;
  float* query = queries + warp * s.size;
  for (int d = lane; d < s.size; d += 32)
    query[d] = row < s.time ? to_float(base[int64_t(row) * s.width + s.query(head) + d]) : 0.0f;
  float top = -3.0e38f, sum = 0, o[kDims] = {};
  const int end = first + kWarps < s.time ? first + kWarps : s.time;  // keys that any row here sees
  for (int k = s.begin(n, first) / kTile * kTile; k < end; k += kTile) {
    __syncthreads();
    fill(keys, base + s.key(head / s.per_group()), s.width, k, s.time, s.size);
    fill(values, base + s.value(head / s.per_group()), s.width, k, s.time, s.size);
    __syncthreads();
    const bool seen = s.sees(n, row, k + lane);
    const float score = seen ? s.score(dot(query, keys + lane * (s.size + 1), s.size)) : -3.0e38f;
    const float highest = warp_max(score), before = top;
    top = highest > top ? highest : top;
    float p = seen ? __expf(score - top) : 0.0f;
    const float keep = __expf(before - top);
    sum = sum * keep + warp_sum(p);
    if constexpr (kDrops) p *= s.dropped.kept(n, head, row, k + lane);
#pragma unroll
    for (int j = 0; j < kDims; ++j) o[j] *= keep;
    add_rows(o, p, values, s.size);
  }
  if (row >= s.time) return;
  T* to = out + (int64_t(n) * s.time + row) * s.heads * s.size + head * s.size;
#pragma unroll
  for (int j = 0; j < kDims; ++j)
    if (j * 32 + lane < s.size) to[j * 32 + lane] = from_float<T>(o[j] / sum);
  if (lane == 0) lse[(int64_t(n) * s.heads + head) * s.time + row] = top + logf(sum);
}

template <class T, bool kDrops>
STRATA_KERNEL query_gradient(const T* d_out, const T* qkv, const float* lse, const float* dots, T* d_qkv, Sizes s) {
  float* const keys = dynamic_shared<float>();
  float *const values = keys + kTile * (s.size + 1), *const rows = values + kTile * (s.size + 1);
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const int head = int(blockIdx.y), n = int(blockIdx.z), first = int(blockIdx.x) * kWarps, row = first + warp;
  const T* base = qkv + int64_t(n) * s.time * s.width;
  float *query = rows + 2 * warp * s.size, *slope = query + s.size;
  for (int d = lane; d < s.size; d += 32) {
    const int64_t at = (int64_t(n) * s.time + row) * s.heads * s.size + head * s.size + d;
    query[d] = row < s.time ? to_float(base[int64_t(row) * s.width + s.query(head) + d]) : 0.0f;
    slope[d] = row < s.time ? to_float(d_out[at]) : 0.0f;
  }
  const int64_t at = (int64_t(n) * s.heads + head) * s.time + (row < s.time ? row : 0);
  const float shift = lse[at], mean = dots[at];
  float dq[kDims] = {};
  const int end = first + kWarps < s.time ? first + kWarps : s.time;
  for (int k = s.begin(n, first) / kTile * kTile; k < end; k += kTile) {
    __syncthreads();
    fill(keys, base + s.key(head / s.per_group()), s.width, k, s.time, s.size);
    fill(values, base + s.value(head / s.per_group()), s.width, k, s.time, s.size);
    __syncthreads();
    float ds = 0;
    if (s.sees(n, row, k + lane) && row < s.time) {
      const float score = s.score(dot(query, keys + lane * (s.size + 1), s.size));
      float dp = dot(slope, values + lane * (s.size + 1), s.size);
      if constexpr (kDrops) dp *= s.dropped.kept(n, head, row, k + lane);
      ds = __expf(score - shift) * (dp - mean) * s.slope(score);
    }
    add_rows(dq, ds, keys, s.size);
  }
  if (row >= s.time) return;
  T* to = d_qkv + (int64_t(n) * s.time + row) * s.width + s.query(head);
#pragma unroll
  for (int j = 0; j < kDims; ++j)
    if (j * 32 + lane < s.size) to[j * 32 + lane] = from_float<T>(dq[j]);
}

// A warp a key row: its lanes are 32 queries at a time, over the query heads of the group.
template <class T, bool kDrops>
STRATA_KERNEL key_gradient(const T* d_out, const T* qkv, const float* lse, const float* dots, T* d_qkv, Sizes s) {
  float* const queries = dynamic_shared<float>();
  float *const slopes = queries + kTile * (s.size + 1), *const rows = slopes + kTile * (s.size + 1);
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const int group = int(blockIdx.y), n = int(blockIdx.z), first = int(blockIdx.x) * kWarps, row = first + warp;
  const T* base = qkv + int64_t(n) * s.time * s.width;
  float *key = rows + 2 * warp * s.size, *value = key + s.size;
  for (int d = lane; d < s.size; d += 32) {
    key[d] = row < s.time ? to_float(base[int64_t(row) * s.width + s.key(group) + d]) : 0.0f;
    value[d] = row < s.time ? to_float(base[int64_t(row) * s.width + s.value(group) + d]) : 0.0f;
  }
  float dk[kDims] = {}, dv[kDims] = {};
  for (int head = group * s.per_group(); head < (group + 1) * s.per_group(); ++head) {
    const int64_t of_head = (int64_t(n) * s.heads + head) * s.time;
    const int begin = first / kTile * kTile, end = s.end(n, first + kWarps - 1, begin, kTile);
    for (int q = begin; q < end; q += kTile) {
      __syncthreads();
      fill(queries, base + s.query(head), s.width, q, s.time, s.size);
      fill(slopes, d_out + int64_t(n) * s.time * s.heads * s.size + head * s.size, int64_t(s.heads) * s.size, q, s.time,
           s.size);
      __syncthreads();
      float p = 0, ds = 0;
      if (s.sees(n, q + lane, row) && q + lane < s.time && row < s.time) {
        const float score = s.score(dot(key, queries + lane * (s.size + 1), s.size));
        p = __expf(score - lse[of_head + q + lane]);
        float dp = dot(value, slopes + lane * (s.size + 1), s.size);
        const float kept = kDrops ? s.dropped.kept(n, head, q + lane, row) : 1.0f;
        if constexpr (kDrops) dp *= kept;
        ds = p * (dp - dots[of_head + q + lane]) * s.slope(score);
        if constexpr (kDrops) p *= kept;
      }
      add_rows(dv, p, slopes, s.size);
      add_rows(dk, ds, queries, s.size);
    }
  }
  if (row >= s.time) return;
  T* to = d_qkv + (int64_t(n) * s.time + row) * s.width;
#pragma unroll
  for (int j = 0; j < kDims; ++j)
    if (j * 32 + lane < s.size) {
      to[s.key(group) + j * 32 + lane] = from_float<T>(dk[j]);
      to[s.value(group) + j * 32 + lane] = from_float<T>(dv[j]);
    }
}

template <class T>
Launch bind_forward(const Binding& b) {
  const Sizes s = sizes_with(b, 0, 1);
  const unsigned heads = unsigned(s.heads), batch = unsigned(b.input(0).shape[0]);
  const auto fast = on_tensor_cores<T>(s, [&](auto zero, auto size) -> Launch {
    using Half = decltype(zero);
    constexpr int D = decltype(size)::value;
    const auto kernel = flash::forward<Half, D, flash::OwnKeys>;
    return flash::with_tiling<Half, D>(kernel, [&](auto tiling) -> Launch {
      using Tiles = decltype(tiling);
      const flash::Order order(blocks(s.time, Tiles::kRows), heads, batch, 4 * D * int64_t(s.time));
      return [=, qkv = b.in<Half>(0), out = b.out<Half>(0), lse = b.out<float>(1), queue = b.queue()] {
        launch(kernel, order.grid(), flash::kBlock, Tiles::kForwardShared, queue, qkv, qkv, nullptr, nullptr, out,
               nullptr, lse, flash::OwnKeys{s}, order);
      };
    });
  });
  if (fast) return fast;
  return with_drops(s, [&](auto drops) -> Launch {
    constexpr bool kDrops = decltype(drops)::value;
    const dim3 grid(blocks(s.time, kWarps), heads, batch);
    return [=, qkv = b.in<T>(0), out = b.out<T>(0), lse = b.out<float>(1), queue = b.queue()] {
      launch(forward<T, kDrops>, grid, kBlock, shared_bytes(s), queue, qkv, out, lse, s);
    };
  });
}

template <class T>
Launch bind_gradient(const Binding& b) {
  const Sizes s = sizes_with(b, 1, 4);
  const unsigned heads = unsigned(s.heads), groups = unsigned(s.groups), batch = unsigned(b.input(1).shape[0]);
  const auto fast = on_tensor_cores<T>(s, [&](auto zero, auto size) -> Launch {
    using Half = decltype(zero);
    constexpr int D = decltype(size)::value;
    const auto queries = flash::query_gradient<Half, D, flash::OwnKeys>;
    const auto keys = flash::key_gradient<Half, D, flash::OwnKeys>;
    return flash::with_tiling<Half, D>(queries, [&](auto tiling) -> Launch {
      using Tiles = decltype(tiling);
      const unsigned tiles = blocks(s.time, Tiles::kRows);
      const flash::Order by_query(tiles, heads, batch, 4 * D * int64_t(s.time)),
          by_key(tiles, groups, batch, 4 * D * int64_t(s.time) * s.queries);
      return [=, d_out = b.in<Half>(0), qkv = b.in<Half>(1), out = b.in<Half>(2), lse = b.in<float>(3),
              d_qkv = b.out<Half>(0), dots = b.workspace<float>(), queue = b.queue()] {
        launch(queries, by_query.grid(), flash::kBlock, Tiles::kQueryShared, queue, d_out, qkv, qkv, out, lse, dots,
               d_qkv, false, flash::OwnKeys{s}, by_query);
        launch(keys, by_key.grid(), flash::kBlock, Tiles::kKeyShared, queue, d_out, qkv, qkv, lse, dots, d_qkv,
               flash::OwnKeys{s}, by_key);
      };
    });
  });
  if (fast) return fast;
  const dim3 by_head(blocks(s.time, kWarps), heads, batch), by_group(blocks(s.time, kWarps), groups, batch);
  return with_drops(s, [&](auto drops) -> Launch {
    constexpr bool kDrops = decltype(drops)::value;
    return [=, d_out = b.in<T>(0), qkv = b.in<T>(1), out = b.in<T>(2), lse = b.in<float>(3), d_qkv = b.out<T>(0),
            dots = b.workspace<float>(), queue = b.queue()] {
      launch(row_dots<T>, by_head, kBlock, 0, queue, d_out, out, dots, s);
      launch(query_gradient<T, kDrops>, by_head, kBlock, shared_bytes(s), queue, d_out, qkv, lse, dots, d_qkv, s);
      launch(key_gradient<T, kDrops>, by_group, kBlock, shared_bytes(s), queue, d_out, qkv, lse, dots, d_qkv, s);
    };
  });
}

const Registration attention_kind("attention", [](const Binding& b) -> Launch {
  return with_type(b.input(0).dtype, [&](auto zero) { return bind_forward<decltype(zero)>(b); });
});
const Registration gradient_kind(
    "attention_gradient",
    [](const Binding& b) -> Launch {
      return with_type(b.input(0).dtype, [&](auto zero) { return bind_gradient<decltype(zero)>(b); });
    },
    [](const OpView& v, int) { return count(v.input(3)) * 4; });

}  // namespace
}  // namespace strata::cuda::attention_kernels
