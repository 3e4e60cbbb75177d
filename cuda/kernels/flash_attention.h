// Causal attention of 16-bit numbers on tensor cores (FlashAttention-2, arXiv 2307.08691), heads of 64 or 128, on keys
// that lie with their queries (OwnKeys) or apart from them, in another order (context_attention.cu). A warp owns 16 or
// 32 rows; keys (or queries) pass through shared memory in tiles, two at a time. The backward pass computes scores
// twice, once by queries and once by keys, so that no sum needs atomics and runs repeat bit for bit.
//
// What bounds it, where each warp multiplies (mma), of a product of 16 x 8 results over a depth of 16 (4 to 6 cycles of
// a tensor core):
// - Bytes of shared memory, of which a multiprocessor reads 128 a cycle for its four tensor cores. A fragment of B
//   (16 x 16, 512 bytes) serves two mma for each 16 rows of the warp: 256 bytes, so 8 cycles, an mma with 16 rows, 128
//   and 4 with 32. So warps own 32 rows where registers allow, and what is the same in every tile stays in registers.
// - Instructions of a score: forward a maximum, a product and sum, an exp2 and a sum, and half a conversion. Whatever
//   else an op may ask for (masks at the border of what is seen, soft caps, dropout) is asked once a tile, not once a
//   score, and is in code of its own behind a branch that all lanes of a warp take or do not. Code for sm_90 has, in
//   loops over tiles where nothing else is asked for and heads of 64, 4.9 instructions an mma forward, 3.3 in the
//   gradient of queries and 4.6 in that of keys, of which a tensor core's scheduler issues one a cycle.
#pragma once
#include "cuda/kernels/flash_keys.h"

namespace strata::cuda::flash {

// Where a block of queries is.
template <class T, int D, class Keys>
struct QueryBlock {
  int head, n, first;
  const T *query, *key, *value;
  STRATA_DEVICE QueryBlock(const T* qkv, const T* kv, const Keys& keys, const Order& order) {
    const Order::Place at = order.place();
    head = at.head, n = at.n, first = (order.tiles - 1 - at.tile) * TilingOf<T, D>::kRows;
    const Sizes& s = keys.s;
    query = qkv + int64_t(n) * s.time * s.width + s.query(head);
    const T* const base = kv + int64_t(n) * keys.keys() * keys.width();
    key = base + keys.key(head / s.per_group()), value = base + keys.value(head / s.per_group());
  }
};

// Calls body(k, keys, places, start_next) for each tile of keys that the block's queries look at, its values behind
// them. start_next() lets the next one come, which body calls. What the caller has started to copy before is there when
// it calls before(), and may be where the second tile comes. places: what was noted of the tile, of `noted` for two of
// them.
template <int D, class T, class Keys, class Before, class Body>
STRATA_DEVICE void over_keys(SharedAddress tiles, int* noted, const QueryBlock<T, D, Keys>& block, const Keys& keys,
                             Before before, Body body) {
  using Tiles = TilingOf<T, D>;
  const auto start = [&](int k, int which) {
    const SharedAddress to = tiles + uint32_t(which * Tiles::kKeyTile);
    start_tile<D, kKeys>(to, block.key, keys.width(), k, keys.keys());
    start_tile<D, kKeys>(to + uint32_t(Tiles::tile(kKeys)), block.value, keys.width(), k, keys.keys());
    keys.note_keys(noted + which * kKeys, k);
    commit_copies();
  };
  int k = keys.first_tile(block.n, block.first, Tiles::kRows);
  start(k, 0);
  wait_copies<0>();
  publish_to_products();
  __syncthreads();
  before();
  __syncthreads();
  const int end = keys.end(block.first, Tiles::kRows);
  for (int which = 0; k < end; which ^= 1) {
    const int next = keys.next_tile(k, block.first, Tiles::kRows);
    body(k, tiles + uint32_t(which * Tiles::kKeyTile), noted + which * kKeys, [&] {
      if (next < end) start(next, which ^ 1);
    });
    wait_copies<0>();
    publish_to_products();
    __syncthreads();  // the next is there, and nobody reads this one
    k = next;
  }
}

// Products of queries and keys bent to the cap.
template <int M, int N>
STRATA_DEVICE void bend_scores(Scores<M, N>& p, const Sizes& s) {
  each<M, N>(p,
             [&, by = s.scale / s.soft_cap](int m, int c, int i) { p[m][c][i] = s.soft_cap * bend(p[m][c][i] * by); });
}

// Goes on from the softmax of other keys, which gave `before` and `lse_before`, where there are such.
// The result is in `wide` instead of `out` where that is not null.
template <class T, int D, class Keys>
STRATA_KERNEL __launch_bounds__(kBlock, TilingOf<T, D>::kForwardBlocks)
    forward(const T* qkv, const T* kv, const float* before, const float* lse_before, T* out, float* wide, float* lse,
            Keys of, Order order) {
  using Tiles = TilingOf<T, D>;
  constexpr int M = Tiles::kTall, N = kKeys;
  __shared__ int noted[2 * Keys::kPlaces];
  const Sizes& s = of.s;
  const Lane at;
  const QueryBlock<T, D, Keys> block(qkv, kv, of, order);
  const int head = block.head, n = block.n, first = block.first + at.warp * 16 * M;
  const SharedAddress tiles = first_tile_at(dynamic_shared<T>()), queries = tiles + uint32_t(Tiles::kOwnRows);
  start_tile<D, Tiles::kRows>(queries, block.query, s.width, block.first, s.time);
  typename Keys::template Seen<M> seen = of.template seen<M>(n, first);
  const float factor = s.soft_cap > 0 ? kLog2e : s.scale * kLog2e;
  const int64_t width = int64_t(s.heads) * D, of_rows = int64_t(n) * s.time * width + head * D,
                of_head = (int64_t(n) * s.heads + head) * s.time;
  OwnRows<T, D> q;
  float o[M][D / 8][4] = {}, top[M][2], sum[M][2];
#pragma unroll
  for (int m = 0; m < M; ++m) top[m][0] = top[m][1] = -kInfinity, sum[m][0] = sum[m][1] = 0;
  if (Keys::kApart && before) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first + 16 * m + at.g + 8 * half;
        if (row >= s.time) continue;
        top[m][half] = lse_before[of_head + row] * kLog2e / factor;
        sum[m][half] = at.t == 0 ? 1.0f : 0.0f;
#pragma unroll
        for (int c = 0; c < D / 8; ++c)
#pragma unroll
          for (int e = 0; e < 2; ++e) o[m][c][2 * half + e] = before[of_rows + row * width + 8 * c + 2 * at.t + e];
      }
  }
  over_keys<D>(
      tiles, noted, block, of, [&] { q.read(queries); },
      [&](int k, SharedAddress keys, const int* places, auto start_next) {
        float p[M][N / 8][4];
        if constexpr (kWarpgroups<T>) {  // all warps, whatever each sees
          start_products<D, kKeys, T>(p, q.rows, keys);
          start_next();
          seen.template look<N>(k, places);
        } else {
          start_next();
          seen.template look<N>(k, places);
          if (!seen.template any<N>()) return;
          start_products<D, kKeys, T>(p, q.rows, keys);
        }
        finish<0, T>(p);
        if (s.soft_cap > 0) bend_scores<M, N>(p, s);
        if (!seen.template all<N>()) seen.template mask<N>(p);
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float highest = top[m][half];
#pragma unroll
            for (int c = 0; c < N / 8; ++c) highest = fmaxf(highest, fmaxf(p[m][c][2 * half], p[m][c][2 * half + 1]));
            highest = row_max(highest);
            const float shift = highest == -kInfinity ? 0.0f : highest * factor;
            const float keep = fast_exp2(top[m][half] * factor - shift);
            top[m][half] = highest;
            sum[m][half] *= keep;  // of this lane's columns
#pragma unroll
            for (int c = 0; c < N / 8; ++c)
#pragma unroll
              for (int e = 2 * half; e < 2 * half + 2; ++e) {
                p[m][c][e] = fast_exp2(p[m][c][e] * factor - shift);
                sum[m][half] += p[m][c][e];
              }
#pragma unroll
            for (int c = 0; c < D / 8; ++c) o[m][c][2 * half] *= keep, o[m][c][2 * half + 1] *= keep;
          }
        if (!Keys::kApart && s.dropped.threshold > 0) {
          uint32_t kept[M];
#pragma unroll
          for (int m = 0; m < M; ++m) kept[m] = kept_of_queries<N>(s.dropped, n, head, first + 16 * m, k);
          drop<M, N>(p, kept, s.dropped.factor);
        }
        start_sums<kKeys, N, T>(
            o, [&](int m, int c, int i) { return p[m][c][i]; }, keys + uint32_t(Tiles::tile(kKeys)));
        finish<0, T>(o);
      });
  float inverse[M][2];
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = row_sum(sum[m][half]);
      inverse[m][half] = 1 / total;
      const int row = first + 16 * m + at.g + 8 * half;
      if (at.t == 0 && row < s.time) lse[of_head + row] = top[m][half] * factor / kLog2e + logf(total);
    }
  if (Keys::kApart && wide)
    write_rows<D, M>(o, inverse, wide + of_rows, width, first, s.time);
  else
    write_rows<D, M>(o, inverse, out + of_rows, width, first, s.time);
}

// What backward kernels make of products of queries and keys: probabilities; shift(m, c, i) is log2 of their sum.
template <int M, int N, class Mask, class Shift>
STRATA_DEVICE void probabilities(Scores<M, N>& p, const Sizes& s, Mask mask, Shift shift) {
  if (s.soft_cap > 0) bend_scores<M, N>(p, s);
  mask();
  const float factor = s.soft_cap > 0 ? kLog2e : s.scale * kLog2e;
  each<M, N>(p, [&](int m, int c, int i) { p[m][c][i] = fast_exp2(p[m][c][i] * factor - shift(m, c, i)); });
}
// Slopes of capped scores times those of the cap, 1 - tanh^2, where the score is that of its probability.
template <int M, int N, class Shift>
STRATA_DEVICE void bend_slopes(Scores<M, N>& slopes, const Scores<M, N>& p, const Sizes& s, Shift shift) {
  each<M, N>(p, [&, by = 1 / (s.soft_cap * kLog2e)](int m, int c, int i) {
    const float bent = fmaxf((fast_log2(p[m][c][i]) + shift(m, c, i)) * by, -1.0f);
    slopes[m][c][i] *= 1 - bent * bent;
  });
}

// Makes `dots` too, which key_gradient reads: do · o of each row.
template <class T, int D, class Keys>
STRATA_KERNEL __launch_bounds__(kBlock, TilingOf<T, D>::kQueryBlocks)
    query_gradient(const T* d_out, const T* qkv, const T* kv, const T* out, const float* lse, float* dots, T* d_qkv,
                   bool onto, Keys of, Order order) {
  using Tiles = TilingOf<T, D>;
  constexpr int M = Tiles::kTall, N = Tiles::kStep, kRows = Tiles::kRows;
  __shared__ float means[kRows];
  __shared__ int noted[2 * Keys::kPlaces];
  const Sizes& s = of.s;
  const Lane at;
  const QueryBlock<T, D, Keys> block(qkv, kv, of, order);
  const int head = block.head, n = block.n, first = block.first + at.warp * 16 * M;
  const int64_t width = int64_t(s.heads) * D, of_head = (int64_t(n) * s.heads + head) * s.time;
  const int64_t of_rows = int64_t(n) * s.time * width + head * D;
  unsigned char* const memory = dynamic_shared<unsigned char>();
  const SharedAddress tiles = first_tile_at(memory), queries = tiles + uint32_t(Tiles::kOwnRows),
                      gradients = queries + uint32_t(Tiles::tile(kRows));
  start_tile<D, kRows>(queries, block.query, s.width, block.first, s.time);
  start_tile<D, kRows>(gradients, d_out + of_rows, width, block.first, s.time);
  typename Keys::template Seen<M> seen = of.template seen<M>(n, first);
  OwnRows<T, D> q, g;
  float dq[M][D / 8][4] = {}, shift[M][2], mean[M][2];
  // The rows of `out`, D / 8 lanes a row, and what the lanes' own rows have: under way beside the copies.
  constexpr int kReads = kRows * D / 8 / kBlock;
  Raw<T> made[kReads];
#pragma unroll
  for (int j = 0; j < kReads; ++j) {
    const int i = int(threadIdx.x) + j * kBlock, row = block.first + i / (D / 8);
    if (row < s.time) made[j] = Raw<T>(out + of_rows + row * width, i % (D / 8) * 8, D, true);
  }
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + 16 * m + at.g + 8 * half;
      shift[m][half] = row < s.time ? lse[of_head + row] * kLog2e : 0.0f;
    }
  const auto before = [&] {
    const unsigned char* const slopes = memory + (gradients - shared_address(memory));
#pragma unroll
    for (int j = 0; j < kReads; ++j) {
      const int i = int(threadIdx.x) + j * kBlock, row = i / (D / 8), column = i % (D / 8) * 8;
      const int piece = column / 8;
      const Raw<T> slope(reinterpret_cast<const T*>(slopes + piece / 8 * kRows * 128 + row * 128),
                         (piece ^ row) % 8 * 8, 64, true);
      float dot = 0;
#pragma unroll
      for (int e = 0; e < 8; ++e) dot += made[j][e] * slope[e];
#pragma unroll
      for (int lane = 1; lane < D / 8; lane *= 2) dot += __shfl_xor_sync(0xFFFFFFFFu, dot, lane);
      if (column > 0) continue;
      means[row] = dot;
      if (block.first + row < s.time) dots[of_head + block.first + row] = dot;
    }
    q.read(queries);
    g.read(gradients);
    __syncthreads();
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) mean[m][half] = means[first + 16 * m + at.g + 8 * half - block.first];
  };
  over_keys<D>(tiles, noted, block, of, before, [&](int k, SharedAddress keys, const int* places, auto start_next) {
    start_next();
#pragma unroll 1
    for (int step = 0; step < kKeys / N; ++step, k += N, keys += uint32_t(N * 128), places += N) {
      seen.template look<N>(k, places);
      if (!kWarpgroups<T> && !seen.template any<N>()) continue;
      float p[M][N / 8][4], ds[M][N / 8][4];
      start_products<D, kKeys, T>(p, q.rows, keys);
      start_products<D, kKeys, T>(ds, g.rows, keys + uint32_t(Tiles::tile(kKeys)));
      uint32_t kept[M] = {};
      if (!Keys::kApart && s.dropped.threshold > 0)
#pragma unroll
        for (int m = 0; m < M; ++m) kept[m] = kept_of_queries<N>(s.dropped, n, head, first + 16 * m, k);
      const auto shift_of = [&](int m, int, int i) { return shift[m][i / 2]; };
      finish<1, T>(p);
      probabilities<M, N>(
          p, s,
          [&] {
            if (!seen.template all<N>()) seen.template mask<N>(p);
          },
          shift_of);
      finish<0, T>(ds);
      if (!Keys::kApart && s.dropped.threshold > 0) drop<M, N>(ds, kept, s.dropped.factor);
      each<M, N>(ds, [&](int m, int c, int i) { ds[m][c][i] -= mean[m][i / 2]; });
      if (s.soft_cap > 0) bend_slopes<M, N>(ds, p, s, shift_of);
      start_sums<kKeys, N, T>(
          dq, [&](int m, int c, int i) { return ds[m][c][i] * p[m][c][i]; }, keys);
      finish<0, T>(dq);
    }
  });
  float scale[M][2];
#pragma unroll
  for (int m = 0; m < M; ++m) scale[m][0] = scale[m][1] = s.scale;
  write_rows<D, M>(dq, scale, d_qkv + int64_t(n) * s.time * s.width + s.query(head), s.width, first, s.time,
                   Keys::kApart && onto);
}

// Rows are keys here, and columns queries.
template <class T, int D, class Keys>
STRATA_KERNEL __launch_bounds__(kBlock) key_gradient(const T* d_out, const T* qkv, const T* kv, const float* lse,
                                                     const float* dots, T* d_kv, Keys of, Order order) {
  using Tiles = TilingOf<T, D>;
  constexpr int M = Tiles::kTall, N = Tiles::kQueries, kRows = Tiles::kRows;
  __shared__ float statistics[2][2][N];  // of the queries of two tiles: lse, dots
  __shared__ int noted[2 * Keys::kPlaces];
  const Sizes& s = of.s;
  const Lane at;
  const Order::Place place = order.place();
  const int group = place.head, n = place.n, of_block = place.tile * kRows;
  const int first = of_block + at.warp * 16 * M;
  const int64_t width = int64_t(s.heads) * D, of_keys = int64_t(n) * of.keys() * of.width();
  const SharedAddress keys = first_tile_at(dynamic_shared<T>()), values = keys + uint32_t(Tiles::tile(kRows)),
                      tiles = values + uint32_t(Tiles::tile(kRows));
  const int begin = of.template first_query<N>(of_block, kRows),
            end = of.template end_of_queries<N>(n, of_block, kRows);
  const int heads_begin = group * s.per_group(), heads_end = heads_begin + s.per_group();
  const auto start = [&](int head, int query, int which) {
    const SharedAddress to = tiles + uint32_t(which * Tiles::kQueryTile);
    start_tile<D, N>(to, qkv + int64_t(n) * s.time * s.width + s.query(group, head - heads_begin), s.width, query,
                     s.time);
    start_tile<D, N>(to + uint32_t(Tiles::kQueryTile / 2), d_out + int64_t(n) * s.time * width + head * D, width, query,
                     s.time);
    const int i = int(threadIdx.x) % N;
    if (threadIdx.x < 2 * N)
      copy_async<4>(shared_address(&statistics[which][threadIdx.x / N][i]),
                    (threadIdx.x < N ? lse : dots) + (int64_t(n) * s.heads + head) * s.time + query + i,
                    query + i < s.time);
    of.template note_queries<N>(noted + which * 2 * N, n, query);
    commit_copies();
  };
  start_tile<D, kRows>(keys, kv + of_keys + of.key(group), of.width(), of_block, of.keys());
  start_tile<D, kRows>(values, kv + of_keys + of.value(group), of.width(), of_block, of.keys());
  typename Keys::template SeenBy<M, N> seen(of, n, first);
  int head = heads_begin, query = begin;
  start(head, query, 0);
  wait_copies<0>();
  publish_to_products();
  __syncthreads();
  float dk[M][D / 8][4] = {}, dv[M][D / 8][4] = {};
  for (int which = 0; head < heads_end; which ^= 1) {
    const int this_head = head, this_query = query;
    const auto start_next = [&] {
      query += N;
      if (query >= end) query = begin, ++head;
      if (head < heads_end) start(head, query, which ^ 1);
    };
    const SharedAddress tile = tiles + uint32_t(which * Tiles::kQueryTile),
                        slopes = tile + uint32_t(Tiles::kQueryTile / 2);
    float p[M][N / 8][4], ds[M][N / 8][4];
    const auto start_both = [&] {
      start_products<D, N, T>(p, InTile<M, kRows>{keys}, tile);
      start_products<D, N, T>(ds, InTile<M, kRows>{values}, slopes);
    };
    bool any = true;
    if constexpr (kWarpgroups<T>) {
      start_both();
      start_next();
      seen.look(this_query, noted + which * 2 * N);
    } else {
      start_next();
      seen.look(this_query, noted + which * 2 * N);
      any = seen.any();
      if (any) start_both();
    }
    if (any) {
      uint32_t kept[M] = {};
      if (!Keys::kApart && s.dropped.threshold > 0)
#pragma unroll
        for (int m = 0; m < M; ++m) kept[m] = kept_of_keys<N>(s.dropped, n, this_head, this_query, first + 16 * m);
      const auto of_query = [&](int which_of, int c, int i) {
        return statistics[which][which_of][8 * c + 2 * at.t + i % 2];
      };
      const auto shift_of = [&](int, int c, int i) { return of_query(0, c, i) * kLog2e; };
      finish<1, T>(p);
      probabilities<M, N>(
          p, s,
          [&] {
            if (!seen.all()) seen.mask(p);
          },
          shift_of);
      start_sums<N, N, T>(
          dv,
          [&](int m, int c, int i) {
            return Keys::kApart || s.dropped.threshold == 0 ? p[m][c][i]
                   : kept[m] >> (4 * c + i) & 1             ? p[m][c][i] * s.dropped.factor
                                                            : 0.0f;
          },
          slopes);
      finish<1, T>(ds);
      if (!Keys::kApart && s.dropped.threshold > 0) drop<M, N>(ds, kept, s.dropped.factor);
      each<M, N>(ds, [&](int m, int c, int i) { ds[m][c][i] -= of_query(1, c, i); });
      if (s.soft_cap > 0) bend_slopes<M, N>(ds, p, s, shift_of);
      start_sums<N, N, T>(
          dk, [&](int m, int c, int i) { return ds[m][c][i] * p[m][c][i]; }, tile);
      finish<0, T>(dv);
      finish<0, T>(dk);
    }
    wait_copies<0>();
    publish_to_products();
    __syncthreads();
  }
  float scale[M][2], one[M][2];
#pragma unroll
  for (int m = 0; m < M; ++m) scale[m][0] = scale[m][1] = s.scale, one[m][0] = one[m][1] = 1;
  write_rows<D, M>(dk, scale, d_kv + of_keys + of.key(group), of.width(), first, of.keys());
  write_rows<D, M>(dv, one, d_kv + of_keys + of.value(group), of.width(), first, of.keys());
}

}  // namespace strata::cuda::flash
