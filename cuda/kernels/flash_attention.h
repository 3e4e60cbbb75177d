// Causal attention of 16-bit numbers on tensor cores (FlashAttention-2, arXiv 2307.08691), heads of 64 or 128, on keys
// that lie with their queries (OwnKeys) or apart from them, in another order (context_attention.cu). A warp owns 16 or
// 32 rows; keys (or queries) pass through shared memory in tiles, two at a time. The backward pass computes scores
// twice, once by queries and once by keys, so that no sum needs atomics and runs repeat bit for bit.
//
// What bounds it, of a warp's product of 16 x 8 results over a depth of 16 (an mma, 4 to 6 cycles of a tensor core):
// - Bytes of shared memory, of which a multiprocessor reads 128 a cycle for its four tensor cores. A fragment of B
//   (16 x 16, 512 bytes) serves two mma for each 16 rows of the warp: 256 bytes, so 8 cycles, an mma with 16 rows, 128
//   and 4 with 32. So warps own 32 rows where registers allow, and what is the same in every tile stays in registers.
// - Instructions of a score: forward a maximum, a product and sum, an exp2 and a sum, and half a conversion. Whatever
//   else an op may ask for (masks at the border of what is seen, soft caps, dropout) is asked once a tile, not once a
//   score, and is in code of its own behind a branch that all lanes of a warp take or do not. Code for sm_90 has, in
//   loops over tiles where nothing else is asked for and heads of 64, 4.9 instructions an mma forward, 3.3 in the
//   gradient of queries and 4.6 in that of keys, of which a tensor core's scheduler issues one a cycle.
#pragma once
#include "cuda/kernels/attention.h"
#include "cuda/raw.h"
#include "cuda/tensor_core.h"

namespace strata::cuda::flash {

using attention_kernels::Dropped;
using attention_kernels::Sizes;

constexpr int kWarps = 4, kBlock = 32 * kWarps;
constexpr int kKeys = 64;     // of a tile that queries walk over
constexpr int kQueries = 32;  // of a tile that keys walk over
constexpr float kLog2e = 1.4426950408889634f, kInfinity = __builtin_huge_valf();

// Tiles of 16 rows that a warp owns, by what accumulators leave of 255 registers.
template <int D>
constexpr int kTall = D == 64 ? 2 : 1;
template <int D>
constexpr int kRows = 16 * kTall<D>* kWarps;

// Rows of a tile lie D + 8 elements apart: addresses of eight rows fall into different banks.
template <int D>
constexpr int kStride = D + 8;
template <int D>
constexpr int kRowBytes = 2 * kStride<D>;
template <int D>
constexpr int kKeyTile = 2 * kKeys* kRowBytes<D>;  // bytes, with the values
template <int D>
constexpr int kQueryTile = 2 * kQueries* kRowBytes<D>;  // with the slopes

struct Lane {
  int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  int g = lane / 4, t = lane % 4;
};

// Starts the copy of rows [first, first + kCount) of a slice D wide; zeros from row `rows` on.
template <int D, int kCount, class T>
STRATA_DEVICE void start_tile(SharedAddress tile, const T* from, int64_t stride, int first, int rows) {
  constexpr int kStep = kBlock * 8 / D;  // rows that a block copies at once
  const int row = int(threadIdx.x) / (D / 8), column = int(threadIdx.x) % (D / 8) * 8;
  const T* source = from + int64_t(first + row) * stride + column;
  tile += uint32_t(row * kRowBytes<D> + column * 2);
#pragma unroll
  for (int r = 0; r < kCount; r += kStep) {
    copy_async<16>(tile + uint32_t(r * kRowBytes<D>), source, first + row + r < rows);
    source += kStep * stride;
  }
}

// Where a lane reads fragments in a tile: A of rows and B of X, whose 16 rows are the depth (transposed) …
template <int D>
STRATA_DEVICE uint32_t place_a(int lane) {
  return uint32_t(lane % 16 * kRowBytes<D> + lane / 16 * 16);
}
// … and B of X^T, two tiles of 8 rows of X.
template <int D>
STRATA_DEVICE uint32_t place_b(int lane) {
  return uint32_t((lane % 8 + lane / 16 * 8) * kRowBytes<D> + lane / 8 % 2 * 16);
}

template <int M, int D>
using Fragments = uint32_t[M][D / 16][4];
template <int M, int N>
using Scores = float[M][N / 8][4];

template <int M, int D>
STRATA_DEVICE void load_fragments(Fragments<M, D>& a, SharedAddress tile) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int k = 0; k < D / 16; ++k) load_matrices(a[m][k], tile + uint32_t(m * 16 * kRowBytes<D> + k * 32), false);
}

// c (16 M, N) = rows whose fragments rows(m, k, to) gives times rows of the tile at `b_tile` (place_b), over D.
template <int D, int M, int N, class T, class Rows>
STRATA_DEVICE void products(Scores<M, N>& c, SharedAddress b_tile, Rows rows) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) c[m][n][i] = 0;
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    uint32_t a[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) rows(m, k, a[m]);
#pragma unroll
    for (int n = 0; n < N / 8; n += 2) {
      uint32_t b[4];
      load_matrices(b, b_tile + uint32_t(n * 8 * kRowBytes<D> + k * 32), false);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma<T>(c[m][n], a[m], {b[0], b[1]});
        mma<T>(c[m][n + 1], a[m], {b[2], b[3]});
      }
    }
  }
}
// Rows that are in registers, or in a tile (place_a).
template <int M, int D>
STRATA_DEVICE auto held(const Fragments<M, D>& a) {
  return [&a](int m, int k, uint32_t(&to)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = a[m][k][i];
  };
}
template <int D>
STRATA_DEVICE auto in_tile(SharedAddress tile) {
  return [tile](int m, int k, uint32_t(&to)[4]) {
    load_matrices(to, tile + uint32_t(m * 16 * kRowBytes<D> + k * 32), false);
  };
}

// sum (16 M, D) += p (16 M, N) as 16-bit numbers times the N rows of the tile at `tile` (place_a).
template <int D, int M, int N, class T>
STRATA_DEVICE void add_products(Scores<M, D>& sum, const Scores<M, N>& p, SharedAddress tile) {
#pragma unroll
  for (int k = 0; k < N / 16; ++k) {
    uint32_t a[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[m][i] = pack<T>(p[m][2 * k + i / 2][i % 2 * 2], p[m][2 * k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      uint32_t b[4];
      load_matrices(b, tile + uint32_t(k * 16 * kRowBytes<D> + n * 16), true);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma<T>(sum[m][n], a[m], {b[0], b[1]});
        mma<T>(sum[m][n + 1], a[m], {b[2], b[3]});
      }
    }
  }
}

// Calls body(m, n, i) for each of a lane's results.
template <int M, int N, class Body>
STRATA_DEVICE void each(const Scores<M, N>&, Body body) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) body(m, n, i);
}

// This lane's part of 16 M rows from `first` on, times `factor` of its rows, into those below `rows`, or added to them.
template <int D, int M, class T>
STRATA_DEVICE void write_rows(const Scores<M, D>& from, const float (&factor)[M][2], T* to, int64_t stride, int first,
                              int rows, bool onto = false) {
  const Lane at;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + 16 * m + at.g + 8 * half;
      if (row >= rows) continue;
      T* const of_row = to + row * stride + 2 * at.t;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        float low = from[m][n][2 * half] * factor[m][half], high = from[m][n][2 * half + 1] * factor[m][half];
        if (onto) low += to_float(of_row[8 * n]), high += to_float(of_row[8 * n + 1]);
        if constexpr (sizeof(T) == 2)
          *reinterpret_cast<uint32_t*>(of_row + 8 * n) = pack<T>(low, high);
        else
          of_row[8 * n] = low, of_row[8 * n + 1] = high;
      }
    }
}

// Over the four lanes that share a row.
STRATA_DEVICE float row_max(float x) {
#pragma unroll
  for (int width = 1; width < 4; width *= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, width));
  return x;
}
STRATA_DEVICE float row_sum(float x) {
#pragma unroll
  for (int width = 1; width < 4; width *= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, width);
  return x;
}

// tanh to 2e-7, where |x| is a score by its cap.
STRATA_DEVICE float bend(float x) { return 1 - 2 * fast_inverse(1 + fast_exp2(2 * kLog2e * x)); }

// Of the rows of a warp, from `first` on, what they see: masks are looked at in tiles at its borders only.
template <int M>
struct Seen {
  int lowest, highest, border;  // columns that any row sees, and from where on all of them do
  int first, from[M][2];        // the lane's own rows: begin
  STRATA_DEVICE Seen(const Sizes& s, int n, int first) : first(first) {
    const Lane at;
    const auto begin = [&](int row) { return s.begin(n, row < s.time ? row : s.time - 1); };
    highest = first + 16 * M - 1;
    lowest = first < s.time ? begin(first) : highest + 1;
    border = begin(highest);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) from[m][half] = begin(first + 16 * m + at.g + 8 * half);
  }
  int column = 0;
  // The tile that is asked about, of N columns from `from` on.
  template <int N>
  STRATA_DEVICE void look(int from, const int*) {
    column = from;
  }
  template <int N>
  STRATA_DEVICE bool any() const {
    return column <= highest && column + N > lowest;
  }
  template <int N>
  STRATA_DEVICE bool all() const {
    return column + N - 1 <= first && column >= border;
  }
  template <int N>
  STRATA_DEVICE void mask(Scores<M, N>& scores) const {
    const Lane at;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t last = uint32_t(first + 16 * m + at.g + 8 * half - from[m][half]);  // seen: from 0 to it
        const uint32_t mine = uint32_t(column + 2 * at.t - from[m][half]);
#pragma unroll
        for (int c = 0; c < N / 8; ++c)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (mine + uint32_t(8 * c + e) > last) scores[m][c][2 * half + e] = -kInfinity;
      }
  }
};

// Which scores of a tile dropout keeps, a bit each: bit 4 c + i of a lane's [c][i]. A draw of four words is that of
// four keys of a query, which two or four lanes share: each makes the draws of some, all give each other theirs.
// Rows are queries: lanes t and t ^ 1 have columns of the same four, each draws for one of the rows g and g + 8.
template <int N>
STRATA_DEVICE uint32_t kept_of_queries(const Dropped& d, int n, int head, int row, int column) {
  const Lane at;
  const int half = at.t % 2;
  const int64_t index = d.index(n, head, row + at.g + 8 * half) + column + at.t / 2 * 4;
  uint32_t mine = 0, bits = 0;
#pragma unroll 1
  for (int c = 0; c < N / 8; ++c) {
    const Words words = d.words(index + 8 * c);
#pragma unroll
    for (int i = 0; i < 4; ++i) mine |= uint32_t(words.word[i] >= d.threshold) << (4 * c + i);
  }
  const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, mine, 1);
  const uint32_t of_rows[2] = {half == 0 ? mine : other, half == 0 ? other : mine};
  const uint32_t two = 0x33333333u;  // of each four columns those of this lane, for row g and for row g + 8
  bits = (of_rows[0] >> (2 * half) & two) | (of_rows[1] >> (2 * half) & two) << 2;
  return bits;
}
// Rows are keys: lanes of the same g / 4 have keys of the same four, each draws for one of the four results of a tile.
template <int N>
STRATA_DEVICE uint32_t kept_of_keys(const Dropped& d, int n, int head, int query, int row) {
  const Lane at;
  const int i = at.g % 4;
  const int64_t index = d.index(n, head, query + 2 * at.t + i % 2) + row + at.g / 4 * 4 + i / 2 * 8;
  uint32_t mine = 0, bits = 0;
#pragma unroll 1
  for (int c = 0; c < N / 8; ++c) {
    const Words words = d.words(index + 8 * c * d.row);
#pragma unroll
    for (int k = 0; k < 4; ++k) mine |= uint32_t(words.word[k] >= d.threshold) << (4 * c + k);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)  // bit g % 4 of each four of what lane j has is that of [c][j]
    bits |= (__shfl_sync(0xFFFFFFFFu, mine, (at.lane & ~12) | j << 2) >> i & 0x11111111u) << j;
  return bits;
}
template <int M, int N>
STRATA_DEVICE void drop(Scores<M, N>& p, const uint32_t (&kept)[M], float factor) {
  each<M, N>(p, [&](int m, int c, int i) { p[m][c][i] = kept[m] >> (4 * c + i) & 1 ? p[m][c][i] * factor : 0.0f; });
}

// Keys that lie with their queries, in rows of s.width: row and column are the position. What kernels ask of keys:
// where they are, which tiles of them a block of queries looks at, and what of a tile its rows see; and the same for a
// block of keys and tiles of queries.
struct OwnKeys {
  static constexpr bool kApart = false;
  static constexpr int kPlaces = 1;  // ints of shared memory for what is noted of a tile
  Sizes s;
  template <int M>
  using Seen = flash::Seen<M>;

  STRATA_DEVICE int keys() const { return s.time; }
  STRATA_DEVICE int width() const { return s.width; }
  STRATA_DEVICE int key(int group) const { return s.key(group); }
  STRATA_DEVICE int value(int group) const { return s.value(group); }
  template <int M>
  STRATA_DEVICE Seen<M> seen(int n, int first) const {
    return Seen<M>(s, n, first);
  }
  // Tiles for queries [first, first + rows): from the first of them to an end, each after the other.
  STRATA_DEVICE int first_tile(int n, int first, int) const { return s.begin(n, first) / kKeys * kKeys; }
  STRATA_DEVICE int next_tile(int k, int, int) const { return k + kKeys; }
  STRATA_DEVICE int end(int first, int rows) const { return first + rows < s.time ? first + rows : s.time; }
  STRATA_DEVICE void note_keys(int*, int) const {}

  // Queries for keys [first, first + rows).
  STRATA_DEVICE int first_query(int first, int) const { return first; }
  STRATA_DEVICE int end_of_queries(int n, int first, int rows) const {
    return s.end(n, first + rows - 1, first, kQueries);
  }
  STRATA_DEVICE void note_queries(int*, int, int) const {}
  // Of 16 M keys from `first` on, which queries of a tile see them.
  template <int M>
  struct SeenBy {
    const Sizes& s;
    int n, first, last;
    int query = 0, behind = 0;  // the tile, and what the last of it sees
    STRATA_DEVICE SeenBy(const OwnKeys& own, int n, int first)
        : s(own.s), n(n), first(first), last(first + 16 * M - 1) {}
    // Queries from `time` on are zeros, as their slopes are: nothing comes of them.
    STRATA_DEVICE void look(int tile, const int*) {
      query = tile;
      behind = s.begin(n, tile + kQueries <= s.time ? tile + kQueries - 1 : s.time - 1);
    }
    STRATA_DEVICE bool any() const { return first < s.time && query + kQueries > first && s.begin(n, query) <= last; }
    STRATA_DEVICE bool all() const { return query >= last && behind <= first; }
    STRATA_DEVICE void mask(Scores<M, kQueries>& scores) const {
      const Lane at;
#pragma unroll
      for (int c = 0; c < kQueries / 8; ++c)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = query + 8 * c + 2 * at.t + e, begin = s.begin(n, column < s.time ? column : s.time - 1);
#pragma unroll
          for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
              if (uint32_t(first + 16 * m + at.g + 8 * half - begin) > uint32_t(column - begin))
                scores[m][c][2 * half + e] = -kInfinity;
        }
    }
  };
};

// Where a block of queries is.
template <class T, int D, class Keys>
struct QueryBlock {
  int head = int(blockIdx.y), n = int(blockIdx.z), first = int(gridDim.x - 1 - blockIdx.x) * kRows<D>;  // longest first
  const T *query, *key, *value;
  STRATA_DEVICE QueryBlock(const T* qkv, const T* kv, const Keys& keys) {
    const Sizes& s = keys.s;
    query = qkv + int64_t(n) * s.time * s.width + s.query(head);
    const T* const base = kv + int64_t(n) * keys.keys() * keys.width();
    key = base + keys.key(head / s.per_group()), value = base + keys.value(head / s.per_group());
  }
};

// Calls body(k, keys, places) for each tile of keys that the block's queries look at, its values behind them, while the
// next is on its way. What the caller has started to copy before is there when it calls before(), and may be where the
// second tile comes. places: what was noted of the tile, of `noted` for two of them.
template <int D, class T, class Keys, class Before, class Body>
STRATA_DEVICE void over_keys(SharedAddress tiles, int* noted, const QueryBlock<T, D, Keys>& block, const Keys& keys,
                             Before before, Body body) {
  const auto start = [&](int k, int which) {
    const SharedAddress to = tiles + uint32_t(which * kKeyTile<D>);
    start_tile<D, kKeys>(to, block.key, keys.width(), k, keys.keys());
    start_tile<D, kKeys>(to + uint32_t(kKeyTile<D> / 2), block.value, keys.width(), k, keys.keys());
    keys.note_keys(noted + which * kKeys, k);
    commit_copies();
  };
  int k = keys.first_tile(block.n, block.first, kRows<D>);
  start(k, 0);
  wait_copies<0>();
  __syncthreads();
  before();
  __syncthreads();
  const int end = keys.end(block.first, kRows<D>);
  for (int which = 0; k < end; which ^= 1) {
    const int next = keys.next_tile(k, block.first, kRows<D>);
    if (next < end) start(next, which ^ 1);
    body(k, tiles + uint32_t(which * kKeyTile<D>), noted + which * kKeys);
    wait_copies<0>();
    __syncthreads();  // the next is there, and nobody reads this one
    k = next;
  }
}

template <int D>
constexpr int kForwardShared = 2 * kKeyTile<D>;

// Goes on from the softmax of other keys, which gave `before` and `lse_before`, where there are such.
// The result is in `wide` instead of `out` where that is not null.
template <class T, int D, class Keys>
STRATA_KERNEL __launch_bounds__(kBlock) forward(const T* qkv, const T* kv, const float* before, const float* lse_before,
                                                T* out, float* wide, float* lse, Keys of) {
  constexpr int M = kTall<D>, N = kKeys;
  static_assert(kRows<D> * kRowBytes<D> <= kKeyTile<D>);
  __shared__ int noted[2 * Keys::kPlaces];
  const Sizes& s = of.s;
  const Lane at;
  const QueryBlock<T, D, Keys> block(qkv, kv, of);
  const int head = block.head, n = block.n, first = block.first + at.warp * 16 * M;
  const SharedAddress tiles = shared_address(dynamic_shared<T>()), queries = tiles + uint32_t(kKeyTile<D>);
  start_tile<D, kRows<D>>(queries, block.query, s.width, block.first, s.time);
  typename Keys::template Seen<M> seen = of.template seen<M>(n, first);
  const float factor = s.soft_cap > 0 ? kLog2e : s.scale * kLog2e;
  const int64_t width = int64_t(s.heads) * D, of_rows = int64_t(n) * s.time * width + head * D,
                of_head = (int64_t(n) * s.heads + head) * s.time;
  uint32_t q[M][D / 16][4];
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
      tiles, noted, block, of,
      [&] { load_fragments<M, D>(q, queries + uint32_t(at.warp * 16 * M * kRowBytes<D>) + place_a<D>(at.lane)); },
      [&](int k, SharedAddress keys, const int* places) {
        seen.template look<N>(k, places);
        if (!seen.template any<N>()) return;
        float p[M][N / 8][4];
        products<D, M, N, T>(p, keys + place_b<D>(at.lane), held<M, D>(q));
        if (s.soft_cap > 0)
          each<M, N>(p, [&, by = s.scale / s.soft_cap](int m, int c, int i) {
            p[m][c][i] = s.soft_cap * bend(p[m][c][i] * by);
          });
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
        add_products<D, M, N, T>(o, p, keys + uint32_t(kKeyTile<D> / 2) + place_a<D>(at.lane));
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

// What backward kernels make of scores and of what the probabilities' slopes are, less their mean: slopes of scores,
// but for the scale that all of them have. `scores` become probabilities; shift(m, c, i) is log2 of their sum.
template <int M, int N, class Mask, class Shift>
STRATA_DEVICE void slopes(Scores<M, N>& scores, Scores<M, N>& ds, const Sizes& s, Mask mask, Shift shift) {
  if (s.soft_cap > 0)
    each<M, N>(scores, [&, by = s.scale / s.soft_cap](int m, int c, int i) {
      const float bent = bend(scores[m][c][i] * by);
      scores[m][c][i] = s.soft_cap * bent;
      ds[m][c][i] *= 1 - bent * bent;
    });
  mask();
  const float factor = s.soft_cap > 0 ? kLog2e : s.scale * kLog2e;
  each<M, N>(scores, [&](int m, int c, int i) {
    scores[m][c][i] = fast_exp2(scores[m][c][i] * factor - shift(m, c, i));
    ds[m][c][i] *= scores[m][c][i];
  });
}

template <int D>
constexpr int kQueryStep = D == 64 ? 32 : 64;  // keys that a warp takes at once, as far as registers go
template <int D>
constexpr int kQueryShared = kKeyTile<D> + std::max(kKeyTile<D>, 2 * kRows<D> * kRowBytes<D>);

// Makes `dots` too, which key_gradient reads: do · o of each row.
template <class T, int D, class Keys>
STRATA_KERNEL __launch_bounds__(kBlock) query_gradient(const T* d_out, const T* qkv, const T* kv, const T* out,
                                                       const float* lse, float* dots, T* d_qkv, bool onto, Keys of) {
  constexpr int M = kTall<D>, N = kQueryStep<D>;
  __shared__ float means[kRows<D>];
  __shared__ int noted[2 * Keys::kPlaces];
  const Sizes& s = of.s;
  const Lane at;
  const QueryBlock<T, D, Keys> block(qkv, kv, of);
  const int head = block.head, n = block.n, first = block.first + at.warp * 16 * M;
  const int64_t width = int64_t(s.heads) * D, of_head = (int64_t(n) * s.heads + head) * s.time;
  const int64_t of_rows = int64_t(n) * s.time * width + head * D;
  unsigned char* const memory = dynamic_shared<unsigned char>();
  const SharedAddress tiles = shared_address(memory), queries = tiles + uint32_t(kKeyTile<D>),
                      gradients = queries + uint32_t(kRows<D> * kRowBytes<D>);
  start_tile<D, kRows<D>>(queries, block.query, s.width, block.first, s.time);
  start_tile<D, kRows<D>>(gradients, d_out + of_rows, width, block.first, s.time);
  typename Keys::template Seen<M> seen = of.template seen<M>(n, first);
  uint32_t q[M][D / 16][4], g[M][D / 16][4];
  float dq[M][D / 8][4] = {}, shift[M][2], mean[M][2];
  // The rows of `out`, D / 8 lanes a row, and what the lanes' own rows have: under way beside the copies.
  constexpr int kReads = kRows<D> * D / 8 / kBlock;
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
    const T* const slopes = reinterpret_cast<const T*>(memory + kKeyTile<D> + kRows<D> * kRowBytes<D>);
#pragma unroll
    for (int j = 0; j < kReads; ++j) {
      const int i = int(threadIdx.x) + j * kBlock, row = i / (D / 8), column = i % (D / 8) * 8;
      const Raw<T> slope(slopes + row * kStride<D>, column, D, true);
      float dot = 0;
#pragma unroll
      for (int e = 0; e < 8; ++e) dot += made[j][e] * slope[e];
#pragma unroll
      for (int lane = 1; lane < D / 8; lane *= 2) dot += __shfl_xor_sync(0xFFFFFFFFu, dot, lane);
      if (column > 0) continue;
      means[row] = dot;
      if (block.first + row < s.time) dots[of_head + block.first + row] = dot;
    }
    const uint32_t rows = uint32_t(at.warp * 16 * M * kRowBytes<D>) + place_a<D>(at.lane);
    load_fragments<M, D>(q, queries + rows);
    load_fragments<M, D>(g, gradients + rows);
    __syncthreads();
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) mean[m][half] = means[first + 16 * m + at.g + 8 * half - block.first];
  };
  over_keys<D>(tiles, noted, block, of, before, [&](int tile, SharedAddress keys, const int* places) {
#pragma unroll 1
    for (int k = tile; k < tile + kKeys; k += N, keys += uint32_t(N * kRowBytes<D>), places += N) {
      seen.template look<N>(k, places);
      if (!seen.template any<N>()) continue;
      float p[M][N / 8][4], ds[M][N / 8][4];
      products<D, M, N, T>(p, keys + place_b<D>(at.lane), held<M, D>(q));
      products<D, M, N, T>(ds, keys + uint32_t(kKeyTile<D> / 2) + place_b<D>(at.lane), held<M, D>(g));
      if (!Keys::kApart && s.dropped.threshold > 0) {
        uint32_t kept[M];
#pragma unroll
        for (int m = 0; m < M; ++m) kept[m] = kept_of_queries<N>(s.dropped, n, head, first + 16 * m, k);
        drop<M, N>(ds, kept, s.dropped.factor);
      }
      each<M, N>(ds, [&](int m, int c, int i) { ds[m][c][i] -= mean[m][i / 2]; });
      slopes<M, N>(
          p, ds, s,
          [&] {
            if (!seen.template all<N>()) seen.template mask<N>(p);
          },
          [&](int m, int, int i) { return shift[m][i / 2]; });
      add_products<D, M, N, T>(dq, ds, keys + place_a<D>(at.lane));
    }
  });
  float scale[M][2];
#pragma unroll
  for (int m = 0; m < M; ++m) scale[m][0] = scale[m][1] = s.scale;
  write_rows<D, M>(dq, scale, d_qkv + int64_t(n) * s.time * s.width + s.query(head), s.width, first, s.time,
                   Keys::kApart && onto);
}

template <int D>
constexpr int kKeyShared = 2 * kRows<D>* kRowBytes<D> + 2 * kQueryTile<D>;

// Rows are keys here, and columns queries.
template <class T, int D, class Keys>
STRATA_KERNEL __launch_bounds__(kBlock)
    key_gradient(const T* d_out, const T* qkv, const T* kv, const float* lse, const float* dots, T* d_kv, Keys of) {
  constexpr int M = kTall<D>, N = kQueries;
  __shared__ float statistics[2][2][N];  // of the queries of two tiles: lse, dots
  __shared__ int noted[2 * Keys::kPlaces];
  const Sizes& s = of.s;
  const Lane at;
  const int group = int(blockIdx.y), n = int(blockIdx.z), of_block = int(blockIdx.x) * kRows<D>;
  const int first = of_block + at.warp * 16 * M;
  const int64_t width = int64_t(s.heads) * D, of_keys = int64_t(n) * of.keys() * of.width();
  const SharedAddress keys = shared_address(dynamic_shared<T>()), values = keys + uint32_t(kRows<D> * kRowBytes<D>),
                      tiles = values + uint32_t(kRows<D> * kRowBytes<D>);
  const int begin = of.first_query(of_block, kRows<D>), end = of.end_of_queries(n, of_block, kRows<D>);
  const auto start = [&](int head, int query, int which) {
    const SharedAddress to = tiles + uint32_t(which * kQueryTile<D>);
    start_tile<D, N>(to, qkv + int64_t(n) * s.time * s.width + s.query(head), s.width, query, s.time);
    start_tile<D, N>(to + uint32_t(kQueryTile<D> / 2), d_out + int64_t(n) * s.time * width + head * D, width, query,
                     s.time);
    const int i = int(threadIdx.x) % N;
    if (threadIdx.x < 2 * N)
      copy_async<4>(shared_address(&statistics[which][threadIdx.x / N][i]),
                    (threadIdx.x < N ? lse : dots) + (int64_t(n) * s.heads + head) * s.time + query + i,
                    query + i < s.time);
    of.note_queries(noted + which * 2 * N, n, query);
    commit_copies();
  };
  start_tile<D, kRows<D>>(keys, kv + of_keys + of.key(group), of.width(), of_block, of.keys());
  start_tile<D, kRows<D>>(values, kv + of_keys + of.value(group), of.width(), of_block, of.keys());
  const uint32_t rows = uint32_t(at.warp * 16 * M * kRowBytes<D>) + place_a<D>(at.lane);
  typename Keys::template SeenBy<M> seen(of, n, first);
  const int heads_end = (group + 1) * s.per_group();
  int head = group * s.per_group(), query = begin;
  start(head, query, 0);
  wait_copies<0>();
  __syncthreads();
  float dk[M][D / 8][4] = {}, dv[M][D / 8][4] = {};
  for (int which = 0; head < heads_end; which ^= 1) {
    const bool ends = query + N >= end;
    const int next_head = ends ? head + 1 : head, next_query = ends ? begin : query + N;
    if (next_head < heads_end) start(next_head, next_query, which ^ 1);
    seen.look(query, noted + which * 2 * N);
    if (seen.any()) {
      const SharedAddress tile = tiles + uint32_t(which * kQueryTile<D>);
      float p[M][N / 8][4], ds[M][N / 8][4];
      products<D, M, N, T>(p, tile + place_b<D>(at.lane), in_tile<D>(keys + rows));
      products<D, M, N, T>(ds, tile + uint32_t(kQueryTile<D> / 2) + place_b<D>(at.lane), in_tile<D>(values + rows));
      uint32_t kept[M] = {};
      if (!Keys::kApart && s.dropped.threshold > 0) {
#pragma unroll
        for (int m = 0; m < M; ++m) kept[m] = kept_of_keys<N>(s.dropped, n, head, query, first + 16 * m);
        drop<M, N>(ds, kept, s.dropped.factor);
      }
      float shift[N / 8][2];
#pragma unroll
      for (int c = 0; c < N / 8; ++c)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          shift[c][e] = statistics[which][0][8 * c + 2 * at.t + e] * kLog2e;
          const float mean = statistics[which][1][8 * c + 2 * at.t + e];
#pragma unroll
          for (int m = 0; m < M; ++m) ds[m][c][e] -= mean, ds[m][c][2 + e] -= mean;
        }
      slopes<M, N>(
          p, ds, s,
          [&] {
            if (!seen.all()) seen.mask(p);
          },
          [&](int, int c, int i) { return shift[c][i % 2]; });
      if (!Keys::kApart && s.dropped.threshold > 0) drop<M, N>(p, kept, s.dropped.factor);
      add_products<D, M, N, T>(dv, p, tile + uint32_t(kQueryTile<D> / 2) + place_a<D>(at.lane));
      add_products<D, M, N, T>(dk, ds, tile + place_a<D>(at.lane));
    }
    wait_copies<0>();
    __syncthreads();
    head = next_head, query = next_query;
  }
  float scale[M][2], one[M][2];
#pragma unroll
  for (int m = 0; m < M; ++m) scale[m][0] = scale[m][1] = s.scale, one[m][0] = one[m][1] = 1;
  write_rows<D, M>(dk, scale, d_kv + of_keys + of.key(group), of.width(), first, of.keys());
  write_rows<D, M>(dv, one, d_kv + of_keys + of.value(group), of.width(), first, of.keys());
}

}  // namespace strata::cuda::flash
