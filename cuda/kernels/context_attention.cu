// Attention of a rank's queries on a block of keys: those of one rank in a ring, or those of all
// (engine/ops/context_attention.cpp), which go on from the softmax of the blocks before. As attention.cu, with
// positions: on tensor cores (flash_attention.h) where there is no dropout, whose draws would be of keys that do not
// lie in fours; otherwise a warp owns a query row (backward: also a key row), sums in f32 and in a fixed order. And
// keys and values apart from queries, and repeated.
#include "cuda/kernels/attention_rows.h"
#include "cuda/kernels/flash_attention.h"
#include "engine/ops/rank_order.h"

namespace strata::cuda::context_attention_kernels {
namespace {

using namespace attention_kernels;

constexpr int kCopyBlock = 256;

struct Block {
  Sizes s;          // of qkv; its time is this rank's
  RankOrder order;  // of tokens
  int keys, width, window;
  int from = -1;  // the rank whose keys they are; -1: of all ranks, by rank

  Block(const Binding& b, int qkv, int documents)
      : s(sizes_with(b, qkv, documents)),
        order(b.input(qkv), 1, b.attributes().string("axis"), b.attributes().integer("size")),
        keys(int(b.input(qkv + 1).shape[1])),
        width(int(b.input(qkv + 1).shape[2])),
        window(int(b.attributes().integer("window", 0))) {
    if (!b.attributes().has("step")) return;
    const int64_t back = b.attributes().integer("coordinate") - b.attributes().integer("step");
    from = int((back % order.ranks + order.ranks) % order.ranks);
  }
  STRATA_DEVICE int query_at(int row) const { return int(order.token(order.coordinate, row)); }
  STRATA_DEVICE int key_at(int key) const {
    return int(from >= 0 ? order.token(from, key) : order.token(key / order.share, key % order.share));
  }
  // Places in a row of keys.
  STRATA_DEVICE int key(int group) const { return group * 2 * s.size; }
  STRATA_DEVICE int value(int group) const { return key(group) + s.size; }
  // Whether the query of a row, at position `query`, sees the key at position `key`; both are there.
  STRATA_DEVICE bool sees(int n, int row, int query, int key) const {
    return key <= query && (window == 0 || key > query - window) &&
           (!s.documents || key >= s.documents[int64_t(n) * s.time + row]);
  }
  // From where on the query of a row sees keys.
  STRATA_DEVICE int begin(int n, int row) const {
    const int at = query_at(row), of_window = window > 0 && at >= window ? at + 1 - window : 0;
    const int document = s.documents ? s.documents[int64_t(n) * s.time + row] : 0;
    return document > of_window ? document : of_window;
  }
  // The lowest position in a tile of keys: a rank's tokens are in order, and so are the first ones of ranks.
  STRATA_DEVICE int lowest(int first, int count = kTile) const {
    const int at = key_at(first), next = int((first / order.share + 1) * order.share);
    if (from >= 0 || next >= first + count || next >= keys) return at;
    const int other = key_at(next);
    return other < at ? other : at;
  }
};

// The same for kernels on tensor cores (flash::OwnKeys says what they ask): what is noted of a tile are positions.
struct ApartKeys {
  static constexpr bool kApart = true;
  static constexpr int kPlaces = 128, kNowhere = 0x7FFFFFFF;
  static constexpr int kKeys = flash::kKeys;
  Block b;
  Sizes s;
  explicit ApartKeys(const Block& b) : b(b), s(b.s) {}

  STRATA_DEVICE int keys() const { return b.keys; }
  STRATA_DEVICE int width() const { return b.width; }
  STRATA_DEVICE int key(int group) const { return b.key(group); }
  STRATA_DEVICE int value(int group) const { return b.value(group); }
  STRATA_DEVICE int there(int row) const { return row < s.time ? row : s.time - 1; }

  STRATA_DEVICE int first_tile(int, int first, int rows) const { return next_tile(-kKeys, first, rows); }
  STRATA_DEVICE int next_tile(int k, int first, int rows) const {
    const int last = b.query_at(there(first + rows - 1));
    for (k += kKeys; k < b.keys && b.lowest(k, kKeys) > last;) k += kKeys;
    return k;
  }
  STRATA_DEVICE int end(int, int) const { return b.keys; }
  STRATA_DEVICE void note_keys(int* to, int k) const {
    const int i = int(threadIdx.x);
    if (i < kKeys) to[i] = k + i < b.keys ? b.key_at(k + i) : kNowhere;
  }
  template <int M>
  struct Seen {
    int lowest, highest, border;  // positions that any row sees, and from where on all of them do
    int position, at[M][2], from[M][2];
    const int* places = nullptr;
    int low = 0, high = 0;  // of the tile
    STRATA_DEVICE Seen(const ApartKeys& k, int n, int first) {
      const flash::Lane lane;
      const int last = k.there(first + 16 * M - 1);
      position = k.b.query_at(k.there(first)), highest = k.b.query_at(last), border = k.b.begin(n, last);
      lowest = first < k.s.time ? k.b.begin(n, first) : kNowhere;
      if (first >= k.s.time) highest = -1;
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = k.there(first + 16 * m + lane.g + 8 * half);
          at[m][half] = k.b.query_at(row), from[m][half] = k.b.begin(n, row);
        }
    }
    template <int N>
    STRATA_DEVICE void look(int, const int* noted) {
      places = noted;
      low = high = places[threadIdx.x % 32];
      if (N > 32)
        low = min(low, places[N - 32 + threadIdx.x % 32]), high = max(high, places[N - 32 + threadIdx.x % 32]);
#pragma unroll
      for (int width = 16; width > 0; width /= 2) {
        low = min(low, __shfl_xor_sync(0xFFFFFFFFu, low, width));
        high = max(high, __shfl_xor_sync(0xFFFFFFFFu, high, width));
      }
    }
    template <int N>
    STRATA_DEVICE bool any() const {
      return low <= highest && high >= lowest;
    }
    template <int N>
    STRATA_DEVICE bool all() const {
      return high <= position && low >= border;
    }
    template <int N>
    STRATA_DEVICE void mask(flash::Scores<M, N>& scores) const {
      const flash::Lane lane;
#pragma unroll
      for (int c = 0; c < N / 8; ++c)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int place = places[8 * c + 2 * lane.t + e];
#pragma unroll
          for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
              if (place < from[m][half] || place > at[m][half]) scores[m][c][2 * half + e] = -flash::kInfinity;
        }
    }
  };
  template <int M>
  STRATA_DEVICE Seen<M> seen(int n, int first) const {
    return Seen<M>(*this, n, first);
  }

  template <int N>
  STRATA_DEVICE int first_query(int first, int rows) const {
    const int low = b.lowest(first, rows);
    int q = 0;
    while (q + N < s.time && b.query_at(q + N - 1) < low) q += N;
    return q;
  }
  template <int>
  STRATA_DEVICE int end_of_queries(int, int, int) const {
    return s.time;
  }
  template <int N>
  STRATA_DEVICE void note_queries(int* to, int n, int query) const {
    static_assert(2 * N <= kPlaces);
    const int i = int(threadIdx.x);
    if (i < N) to[i] = b.query_at(there(query + i)), to[N + i] = b.begin(n, there(query + i));
  }
  template <int M, int N>
  struct SeenBy {
    int at[M][2], low, high;
    bool there;
    const int* places = nullptr;
    STRATA_DEVICE SeenBy(const ApartKeys& k, int, int first) : there(first < k.b.keys) {
      const flash::Lane lane;
      low = kNowhere, high = -1;
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = first + 16 * m + lane.g + 8 * half;
          at[m][half] = k.b.key_at(key < k.b.keys ? key : k.b.keys - 1);
          low = min(low, at[m][half]), high = max(high, at[m][half]);
        }
#pragma unroll
      for (int width = 4; width < 32; width *= 2) {
        low = min(low, __shfl_xor_sync(0xFFFFFFFFu, low, width));
        high = max(high, __shfl_xor_sync(0xFFFFFFFFu, high, width));
      }
    }
    STRATA_DEVICE void look(int, const int* noted) { places = noted; }
    STRATA_DEVICE bool any() const { return there && low <= places[N - 1] && high >= places[N]; }
    STRATA_DEVICE bool all() const { return high <= places[0] && low >= places[2 * N - 1]; }
    STRATA_DEVICE void mask(flash::Scores<M, N>& scores) const {
      const flash::Lane lane;
#pragma unroll
      for (int c = 0; c < N / 8; ++c)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 8 * c + 2 * lane.t + e, query = places[i], begin = places[N + i];
#pragma unroll
          for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
              if (at[m][half] < begin || at[m][half] > query) scores[m][c][2 * half + e] = -flash::kInfinity;
        }
    }
  };
};

template <class T, class Out, bool kDrops>
STRATA_KERNEL forward(const T* qkv, const T* kv, const float* before, const float* lse_before, Out* out, float* lse,
                      Block b) {
  const Sizes& s = b.s;
  float* const keys = dynamic_shared<float>();
  float *const values = keys + kTile * (s.size + 1), *const queries = values + kTile * (s.size + 1);
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const int head = int(blockIdx.y), n = int(blockIdx.z), first = int(blockIdx.x) * kWarps, row = first + warp;
  const bool there = row < s.time;
  const T* base = kv + int64_t(n) * b.keys * b.width;
  float* query = queries + warp * s.size;
  for (int d = lane; d < s.size; d += 32)
    query[d] = there ? to_float(qkv[(int64_t(n) * s.time + row) * s.width + s.query(head) + d]) : 0.0f;
  const int64_t at = (int64_t(n) * s.time + (there ? row : 0)) * s.heads * s.size + head * s.size;
  const int64_t of_row = (int64_t(n) * s.heads + head) * s.time + (there ? row : 0);
  float top = before ? lse_before[of_row] : -3.0e38f, sum = before ? 1.0f : 0.0f, o[kDims] = {};
#pragma unroll
  for (int j = 0; j < kDims; ++j)
    if (before && j * 32 + lane < s.size) o[j] = before[at + j * 32 + lane];
  const int position = b.query_at(there ? row : 0);
  const int last = b.query_at((first + kWarps < s.time ? first + kWarps : s.time) - 1);  // the highest here
  for (int k = 0; k < b.keys; k += kTile) {
    if (b.lowest(k) > last) continue;
    __syncthreads();
    fill(keys, base + b.key(head / s.per_group()), b.width, k, b.keys, s.size);
    fill(values, base + b.value(head / s.per_group()), b.width, k, b.keys, s.size);
    __syncthreads();
    const int key = k + lane < b.keys ? b.key_at(k + lane) : 0;
    const bool seen = there && k + lane < b.keys && b.sees(n, row, position, key);
    const float score = seen ? s.score(dot(query, keys + lane * (s.size + 1), s.size)) : -3.0e38f;
    const float highest = warp_max(score), old = top;
    top = highest > top ? highest : top;
    float p = seen ? __expf(score - top) : 0.0f;
    const float keep = __expf(old - top);
    sum = sum * keep + warp_sum(p);
    if constexpr (kDrops) p *= s.dropped.kept(n, head, position, key);
#pragma unroll
    for (int j = 0; j < kDims; ++j) o[j] *= keep;
    add_rows(o, p, values, s.size);
  }
  if (!there) return;
#pragma unroll
  for (int j = 0; j < kDims; ++j)
    if (j * 32 + lane < s.size) out[at + j * 32 + lane] = from_float<Out>(o[j] / sum);
  if (lane == 0) lse[of_row] = top + logf(sum);
}

template <class T>
STRATA_KERNEL clear(T* data, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * kCopyBlock + threadIdx.x;
  if (i < count) data[i] = from_float<T>(0.0f);
}

template <class T, bool kDrops>
STRATA_KERNEL query_gradient(const T* d_out, const T* qkv, const T* kv, const float* lse, const float* dots, T* d_qkv,
                             Block b) {
  const Sizes& s = b.s;
  float* const keys = dynamic_shared<float>();
  float *const values = keys + kTile * (s.size + 1), *const rows = values + kTile * (s.size + 1);
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const int head = int(blockIdx.y), n = int(blockIdx.z), first = int(blockIdx.x) * kWarps, row = first + warp;
  const bool there = row < s.time;
  const T* base = kv + int64_t(n) * b.keys * b.width;
  float *query = rows + 2 * warp * s.size, *slope = query + s.size;
  for (int d = lane; d < s.size; d += 32) {
    const int64_t at = int64_t(n) * s.time + row;
    query[d] = there ? to_float(qkv[at * s.width + s.query(head) + d]) : 0.0f;
    slope[d] = there ? to_float(d_out[at * s.heads * s.size + head * s.size + d]) : 0.0f;
  }
  const int64_t at = (int64_t(n) * s.heads + head) * s.time + (there ? row : 0);
  const float shift = lse[at], mean = dots[at];
  float dq[kDims] = {};
  const int position = b.query_at(there ? row : 0);
  const int last = b.query_at((first + kWarps < s.time ? first + kWarps : s.time) - 1);
  for (int k = 0; k < b.keys; k += kTile) {
    if (b.lowest(k) > last) continue;
    __syncthreads();
    fill(keys, base + b.key(head / s.per_group()), b.width, k, b.keys, s.size);
    fill(values, base + b.value(head / s.per_group()), b.width, k, b.keys, s.size);
    __syncthreads();
    const int key = k + lane < b.keys ? b.key_at(k + lane) : 0;
    float ds = 0;
    if (there && k + lane < b.keys && b.sees(n, row, position, key)) {
      const float score = s.score(dot(query, keys + lane * (s.size + 1), s.size));
      float dp = dot(slope, values + lane * (s.size + 1), s.size);
      if constexpr (kDrops) dp *= s.dropped.kept(n, head, position, key);
      ds = __expf(score - shift) * (dp - mean) * s.slope(score);
    }
    add_rows(dq, ds, keys, s.size);
  }
  if (!there) return;
  T* to = d_qkv + (int64_t(n) * s.time + row) * s.width + s.query(head);
#pragma unroll
  for (int j = 0; j < kDims; ++j)
    if (j * 32 + lane < s.size) to[j * 32 + lane] = from_float<T>(to_float(to[j * 32 + lane]) + dq[j]);
}

// A warp a key row: its lanes are 32 queries at a time, over the query heads of the group.
template <class T, bool kDrops>
STRATA_KERNEL key_gradient(const T* d_out, const T* qkv, const T* kv, const float* lse, const float* dots, T* d_kv,
                           Block b) {
  const Sizes& s = b.s;
  float* const queries = dynamic_shared<float>();
  float *const slopes = queries + kTile * (s.size + 1), *const rows = slopes + kTile * (s.size + 1);
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const int group = int(blockIdx.y), n = int(blockIdx.z), first = int(blockIdx.x) * kWarps, row = first + warp;
  const bool there = row < b.keys;
  const T* base = kv + int64_t(n) * b.keys * b.width;
  float *key = rows + 2 * warp * s.size, *value = key + s.size;
  for (int d = lane; d < s.size; d += 32) {
    key[d] = there ? to_float(base[int64_t(row) * b.width + b.key(group) + d]) : 0.0f;
    value[d] = there ? to_float(base[int64_t(row) * b.width + b.value(group) + d]) : 0.0f;
  }
  const int position = b.key_at(there ? row : 0), lowest = b.lowest(first);
  float dk[kDims] = {}, dv[kDims] = {};
  for (int head = group * s.per_group(); head < (group + 1) * s.per_group(); ++head) {
    const int64_t of_head = (int64_t(n) * s.heads + head) * s.time;
    for (int q = 0; q < s.time; q += kTile) {
      if (b.query_at((q + kTile < s.time ? q + kTile : s.time) - 1) < lowest) continue;
      __syncthreads();
      fill(queries, qkv + int64_t(n) * s.time * s.width + s.query(head), s.width, q, s.time, s.size);
      fill(slopes, d_out + int64_t(n) * s.time * s.heads * s.size + head * s.size, int64_t(s.heads) * s.size, q, s.time,
           s.size);
      __syncthreads();
      const int query = q + lane < s.time ? b.query_at(q + lane) : 0;
      float p = 0, ds = 0;
      if (there && q + lane < s.time && b.sees(n, q + lane, query, position)) {
        const float score = s.score(dot(key, queries + lane * (s.size + 1), s.size));
        p = __expf(score - lse[of_head + q + lane]);
        float dp = dot(value, slopes + lane * (s.size + 1), s.size);
        const float kept = kDrops ? s.dropped.kept(n, head, query, position) : 1.0f;
        if constexpr (kDrops) dp *= kept;
        ds = p * (dp - dots[of_head + q + lane]) * s.slope(score);
        if constexpr (kDrops) p *= kept;
      }
      add_rows(dv, p, slopes, s.size);
      add_rows(dk, ds, queries, s.size);
    }
  }
  if (!there) return;
  T* to = d_kv + (int64_t(n) * b.keys + row) * b.width;
#pragma unroll
  for (int j = 0; j < kDims; ++j)
    if (j * 32 + lane < s.size) {
      to[b.key(group) + j * 32 + lane] = from_float<T>(dk[j]);
      to[b.value(group) + j * 32 + lane] = from_float<T>(dv[j]);
    }
}

// `body` on tensor cores where they can, otherwise nothing.
template <class T, class Body>
Launch fast(const Block& block, Body&& body) {
  if (block.s.dropped.threshold > 0) return {};
  return on_tensor_cores<T>(block.s, body);
}

Launch bind_forward(const Binding& b) {
  const Block block(b, 0, 4);
  const unsigned heads = unsigned(block.s.heads), batch = unsigned(b.input(0).shape[0]);
  const dim3 grid(blocks(block.s.time, kWarps), heads, batch);
  const bool wide = b.output(0).dtype == DType::f32;
  const float *before = b.has_input(2) ? b.in<float>(2) : nullptr,
              *lse_before = b.has_input(3) ? b.in<float>(3) : nullptr;
  float* const lse = b.out<float>(1);
  return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
    using T = decltype(zero);
    const T *qkv = b.in<T>(0), *kv = b.in<T>(1);
    T* const out = wide ? nullptr : b.out<T>(0);
    float* const wide_out = wide ? b.out<float>(0) : nullptr;
    const Launch on_cores = fast<T>(block, [&](auto half, auto size) -> Launch {
      constexpr int D = decltype(size)::value;
      using Half = decltype(half);
      const auto kernel = flash::forward<Half, D, ApartKeys>;
      return flash::with_tiling<Half, D>(kernel, [&](auto tiling) -> Launch {
        using Tiles = decltype(tiling);
        const flash::Order order(blocks(block.s.time, Tiles::kRows), heads, batch, 4 * D * int64_t(block.keys));
        return [=, queue = b.queue()] {
          launch(kernel, order.grid(), flash::kBlock, Tiles::kForwardShared, queue, qkv, kv, before, lse_before, out,
                 wide_out, lse, ApartKeys(block), order);
        };
      });
    });
    if (on_cores) return on_cores;
    return with_drops(block.s, [&](auto drops) -> Launch {
      constexpr bool kDrops = decltype(drops)::value;
      return [=, queue = b.queue()] {
        if (wide)
          launch(forward<T, float, kDrops>, grid, kBlock, shared_bytes(block.s), queue, qkv, kv, before, lse_before,
                 wide_out, lse, block);
        else
          launch(forward<T, T, kDrops>, grid, kBlock, shared_bytes(block.s), queue, qkv, kv, before, lse_before, out,
                 lse, block);
      };
    });
  });
}

Launch bind_gradient(const Binding& b) {
  const Block block(b, 1, 5);
  const unsigned heads = unsigned(block.s.heads), groups = unsigned(block.s.groups),
                 batch = unsigned(b.input(1).shape[0]);
  const dim3 by_query(blocks(block.s.time, kWarps), heads, batch), by_key(blocks(block.keys, kWarps), groups, batch);
  return with_type(b.input(1).dtype, [&](auto zero) -> Launch {
    using T = decltype(zero);
    const T *d_out = b.in<T>(0), *qkv = b.in<T>(1), *kv = b.in<T>(2), *out = b.in<T>(3);
    const float* lse = b.in<float>(4);
    T *d_qkv = b.out<T>(0), *d_kv = b.out<T>(1);
    float* const dots = b.workspace<float>();
    const bool onto = b.accumulates(0);
    const auto clear_others = [=, all = count(b.output(0)), queue = b.queue()] {
      if (!onto) launch(clear<T>, dim3(blocks(all, kCopyBlock)), kCopyBlock, 0, queue, d_qkv, all);
    };
    const Launch on_cores = fast<T>(block, [&](auto half, auto size) -> Launch {
      constexpr int D = decltype(size)::value;
      using Half = decltype(half);
      const auto queries = flash::query_gradient<Half, D, ApartKeys>;
      const auto keys = flash::key_gradient<Half, D, ApartKeys>;
      return flash::with_tiling<Half, D>(queries, [&](auto tiling) -> Launch {
        using Tiles = decltype(tiling);
        const flash::Order by_query(blocks(block.s.time, Tiles::kRows), heads, batch, 4 * D * int64_t(block.keys)),
            by_key(blocks(block.keys, Tiles::kRows), groups, batch, 4 * D * int64_t(block.s.time) * block.s.queries);
        return [=, queue = b.queue()] {
          clear_others();
          launch(queries, by_query.grid(), flash::kBlock, Tiles::kQueryShared, queue, d_out, qkv, kv, out, lse, dots,
                 d_qkv, onto, ApartKeys(block), by_query);
          launch(keys, by_key.grid(), flash::kBlock, Tiles::kKeyShared, queue, d_out, qkv, kv, lse, dots, d_kv,
                 ApartKeys(block), by_key);
        };
      });
    });
    if (on_cores) return on_cores;
    return with_drops(block.s, [&](auto drops) -> Launch {
      constexpr bool kDrops = decltype(drops)::value;
      return [=, queue = b.queue()] {
        const int shared = shared_bytes(block.s);
        clear_others();
        launch(row_dots<T>, by_query, kBlock, 0, queue, d_out, out, dots, block.s);
        launch(query_gradient<T, kDrops>, by_query, kBlock, shared, queue, d_out, qkv, kv, lse, dots, d_qkv, block);
        launch(key_gradient<T, kDrops>, by_key, kBlock, shared, queue, d_out, qkv, kv, lse, dots, d_kv, block);
      };
    });
  });
}

int64_t room_for_dots(const OpView& v, int) { return count(v.input(4)) * 4; }

// The last `keys` of every `group` numbers, from `from` with groups `from_step` apart to `to`.
template <class T>
STRATA_KERNEL copy_keys(const T* from, int64_t from_step, T* to, int64_t to_step, int64_t keys, int64_t all) {
  const int64_t i = int64_t(blockIdx.x) * kCopyBlock + threadIdx.x;
  if (i < all) to[i / keys * to_step + i % keys] = from[i / keys * from_step + i % keys];
}
template <class T>
STRATA_KERNEL copy(const T* from, T* to, int64_t all) {
  const int64_t i = int64_t(blockIdx.x) * kCopyBlock + threadIdx.x;
  if (i < all) to[i] = from[i];
}

int64_t keys_of(const Binding& b) { return 2 * b.attributes().integer("head_size"); }
int64_t group_of(const Binding& b) {
  return keys_of(b) + b.attributes().integer("queries_per_group") * b.attributes().integer("head_size");
}

Launch bind_take(const Binding& b) {
  return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
    using T = decltype(zero);
    return [=, keys = keys_of(b), group = group_of(b), from = b.in<T>(0), to = b.out<T>(0), all = count(b.output(0)),
            queue = b.queue()] {
      launch(copy_keys<T>, dim3(blocks(all, kCopyBlock)), kCopyBlock, 0, queue, from + group - keys, group, to, keys,
             keys, all);
    };
  });
}
Launch bind_put(const Binding& b) {
  return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
    using T = decltype(zero);
    return [=, keys = keys_of(b), group = group_of(b), from = b.in<T>(0), kv = b.in<T>(1), to = b.out<T>(0),
            all = count(b.input(0)), of_keys = count(b.input(1)), queue = b.queue()] {
      if (to != from) launch(copy<T>, dim3(blocks(all, kCopyBlock)), kCopyBlock, 0, queue, from, to, all);
      launch(copy_keys<T>, dim3(blocks(of_keys, kCopyBlock)), kCopyBlock, 0, queue, kv, keys, to + group - keys, group,
             keys, of_keys);
    };
  });
}

// A group's numbers are its `all_queries`, then its keys; of them `times` groups are made, with a part of the queries
// each.
struct Repeats {
  int64_t queries, keys, times;  // queries: of a part
  STRATA_DEVICE int64_t group() const { return queries * times + keys; }
};
template <class T>
STRATA_KERNEL repeat(const T* x, T* y, int64_t all, Repeats r) {
  const int64_t i = int64_t(blockIdx.x) * kCopyBlock + threadIdx.x;
  if (i >= all) return;
  const int64_t part = i / (r.queries + r.keys), at = i % (r.queries + r.keys), first = part / r.times * r.group();
  y[i] = x[at < r.queries ? first + part % r.times * r.queries + at : first + r.queries * r.times + at - r.queries];
}
template <class T>
STRATA_KERNEL sum_repeats(const T* dy, T* dx, int64_t all, Repeats r) {
  const int64_t i = int64_t(blockIdx.x) * kCopyBlock + threadIdx.x;
  if (i >= all) return;
  const int64_t step = r.queries + r.keys, at = i % r.group(), first = i / r.group() * r.times * step;
  if (at < r.queries * r.times) {
    dx[i] = dy[first + at / r.queries * step + at % r.queries];
    return;
  }
  float sum = 0;
  for (int64_t j = 0; j < r.times; ++j) sum += to_float(dy[first + j * step + r.queries + at - r.queries * r.times]);
  dx[i] = from_float<T>(sum);
}

Launch bind_repeat(const Binding& b, bool back) {
  const int64_t times = b.attributes().integer("times"), size = b.attributes().integer("head_size");
  const Repeats repeats{b.attributes().integer("queries_per_group") / times * size, 2 * size, times};
  return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
    using T = decltype(zero);
    return [=, from = b.in<T>(0), to = b.out<T>(0), all = count(b.output(0)), queue = b.queue()] {
      launch(back ? sum_repeats<T> : repeat<T>, dim3(blocks(all, kCopyBlock)), kCopyBlock, 0, queue, from, to, all,
             repeats);
    };
  });
}

const Registration kinds[] = {{"ring_attention", bind_forward},
                              {"gathered_attention", bind_forward},
                              {"ring_attention_gradient", bind_gradient, room_for_dots},
                              {"gathered_attention_gradient", bind_gradient, room_for_dots},
                              {"keys_values", bind_take},
                              {"with_keys_values", bind_put},
                              {"repeat_keys_values", [](const Binding& b) { return bind_repeat(b, false); }},
                              {"repeat_keys_values_gradient", [](const Binding& b) { return bind_repeat(b, true); }}};

}  // namespace
}  // namespace strata::cuda::context_attention_kernels
