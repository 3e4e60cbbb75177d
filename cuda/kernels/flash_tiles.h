// What attention on tensor cores is made of (flash_attention.h): tiles of rows in shared memory, which fragments of a
// warp are products of, and the two ways to multiply them: each warp its own rows (mma), or the four warps of a block
// together (wgmma, where warpgroup.h has it), which reads what is in shared memory once for all four.
//
// A tile of R rows of D numbers is D / 64 times R rows of 64, swizzled as warpgroup.h says, at a multiple of 1024
// bytes. So eight rows of a column of 16 bytes fall into different banks, and both ways read the same tile.
#pragma once
#include "cuda/kernels/attention.h"
#include "cuda/raw.h"
#include "cuda/warpgroup.h"

namespace strata::cuda::flash {

using attention_kernels::Dropped;
using attention_kernels::Sizes;

constexpr int kWarps = 4, kBlock = 32 * kWarps;
constexpr int kKeys = 64;  // of a tile that queries walk over
constexpr float kLog2e = 1.4426950408889634f, kInfinity = __builtin_huge_valf();

// Queries of a tile that keys walk over, tiles of 16 rows that a warp owns, and keys that gradients of queries take at
// once, by what accumulators leave of 255 registers.
template <int D>
constexpr int kQueries = D == 64 ? 32 : 64;
template <int D>
constexpr int kTall = D == 64 ? 2 : 1;
template <int D>
constexpr int kQueryStep = D == 64 ? 32 : 64;
template <int D>
constexpr int kRows = 16 * kTall<D>* kWarps;

template <int D>
constexpr int tile_bytes(int rows) {
  return rows * D * 2;
}
constexpr int kAligned = 1024;
STRATA_DEVICE SharedAddress first_tile_at(const void* shared) {
  return (shared_address(shared) + (kAligned - 1)) & ~SharedAddress(kAligned - 1);
}

struct Lane {
  int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  int g = lane / 4, t = lane % 4;
};

// Starts the copy of rows [first, first + kCount) of a slice D wide; zeros from row `rows` on. Where warps multiply
// together, product m takes rows 64 m + 16 w for warp w: kOwned says that they are to be those that the warp owns,
// 16 (kTall w + m).
template <int D, int kCount, bool kOwned = false, class T>
STRATA_DEVICE void start_tile(SharedAddress tile, const T* from, int64_t stride, int first, int rows) {
  constexpr int kStep = kBlock * 8 / D;  // rows that a block copies at once
  const int row = int(threadIdx.x) / (D / 8), column = int(threadIdx.x) % (D / 8);
  const T* source = from + int64_t(first + row) * stride + column * 8;
  tile += uint32_t(column / 8 * kCount * 128 + row * 128 + ((column ^ row) % 8) * 16);
#pragma unroll
  for (int r = 0; r < kCount; r += kStep) {
    const int tall = r / 16, place = kOwned ? (tall % kTall<D> * kWarps + tall / kTall<D>) * 16 + r % 16 : r;
    copy_async<16>(tile + uint32_t(place * 128), source, first + row + r < rows);
    source += kStep * stride;
  }
}

template <int M, int D>
using Fragments = uint32_t[M][D / 16][4];
template <int M, int N>
using Scores = float[M][N / 8][4];

// Where a lane reads fragments of rows from `rows` on: A of rows and B of X, whose 16 rows are the depth (transposed),
// and B of X^T, two tiles of 8 rows of X. Column k of 16, where tiles have kOf rows.
STRATA_DEVICE SharedAddress place_a(SharedAddress rows) {
  const int lane = int(threadIdx.x) % 32;
  return rows + uint32_t(lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16);
}
STRATA_DEVICE SharedAddress place_b(SharedAddress rows) {
  const int lane = int(threadIdx.x) % 32;
  return rows + uint32_t((lane % 8 + lane / 16 * 8) * 128 + (lane / 8 % 2 ^ lane % 8) * 16);
}
template <int kOf>
STRATA_DEVICE SharedAddress column(SharedAddress place, int k) {
  return (place ^ uint32_t(k % 4 * 32)) + uint32_t(k / 4 * kOf * 128);
}

// Reads 16 M rows from `rows` on.
template <int kOf, int M, int D>
STRATA_DEVICE void load_fragments(Fragments<M, D>& a, SharedAddress rows) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int k = 0; k < D / 16; ++k) load_matrices(a[m][k], column<kOf>(place_a(rows), k) + uint32_t(m * 2048), false);
}

// Left operands of products: 16 M rows of each warp, whose fragments are in registers, or which are in a tile of kRows
// of the block's, where they lie as start_tile puts what is owned.
template <int M, int D>
struct Held {
  const Fragments<M, D>& fragments;
  STRATA_DEVICE void load(int m, int k, uint32_t (&to)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = fragments[m][k][i];
  }
  template <class T, int N>
  STRATA_DEVICE void multiply(float (*c)[4], int m, int k, SharedAddress b) const {
    group_mma<T, N, false>(c, fragments[m][k], b, k > 0);
  }
};
template <int M, int D>
struct InTile {
  SharedAddress tile;
  STRATA_DEVICE void load(int m, int k, uint32_t (&to)[4]) const {
    const int warp = int(threadIdx.x) / 32;
    load_matrices(to, column<kRows<D>>(place_a(tile), k) + uint32_t((warp * M + m) * 2048), false);
  }
  template <class T, int N>
  STRATA_DEVICE void multiply(float (*c)[4], int m, int k, SharedAddress b) const {
    group_mma<T, N>(c, column<kRows<D>>(tile, k) + uint32_t(m * 64 * 128), b, k > 0);
  }
};

template <int M, int N>
STRATA_DEVICE void keep_in_place(float (&c)[M][N][4]) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) cuda::keep_in_place(c[m][n][i]);
}

// Starts c (16 M, N) = `rows` times the N rows from `b_rows` on, of a tile of kOf, over D. Not to be touched until
// finished.
template <int D, int kOf, class T, int M, int kN, class Rows>
STRATA_DEVICE void start_products(float (&c)[M][kN][4], const Rows& rows, SharedAddress b_rows) {
  constexpr int N = 8 * kN;
  if constexpr (kWarpgroups<T>) {
    begin_products();
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int k = 0; k < D / 16; ++k) rows.template multiply<T, N>(c[m], m, k, column<kOf>(b_rows, k));
    commit_products();
  } else {
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
      for (int m = 0; m < M; ++m) rows.load(m, k, a[m]);
#pragma unroll
      for (int n = 0; n < N / 8; n += 2) {
        uint32_t b[4];
        load_matrices(b, column<kOf>(place_b(b_rows), k) + uint32_t(n * 8 * 128), false);
#pragma unroll
        for (int m = 0; m < M; ++m) {
          mma<T>(c[m][n], a[m], {b[0], b[1]});
          mma<T>(c[m][n + 1], a[m], {b[2], b[3]});
        }
      }
    }
  }
}

// Starts sum (16 M, D) += p (16 M, N) as 16-bit numbers times the N rows from `rows` on, of a tile of kOf; what(m, c, i)
// gives p. Not to be touched until finished.
template <int kOf, int N, class T, int M, int kD, class What>
STRATA_DEVICE void start_sums(float (&sum)[M][kD][4], What what, SharedAddress rows) {
  uint32_t a[M][N / 16][4];
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int k = 0; k < N / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[m][k][i] = pack<T>(what(m, 2 * k + i / 2, i % 2 * 2), what(m, 2 * k + i / 2, i % 2 * 2 + 1));
  if constexpr (kWarpgroups<T>) {
    keep_in_place(sum);
    begin_products();
#pragma unroll
    for (int k = 0; k < N / 16; ++k)
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < kD; n += 8)
          group_mma<T, 64, true>(sum[m] + n, a[m][k], rows + uint32_t(n / 8 * kOf * 128 + k * 2048), true);
    commit_products();
  } else {
#pragma unroll
    for (int k = 0; k < N / 16; ++k)
#pragma unroll
      for (int n = 0; n < kD; n += 2) {
        uint32_t b[4];
        load_matrices(b, column<kOf>(place_a(rows), n / 2) + uint32_t(k * 2048), true);
#pragma unroll
        for (int m = 0; m < M; ++m) {
          mma<T>(sum[m][n], a[m][k], {b[0], b[1]});
          mma<T>(sum[m][n + 1], a[m][k], {b[2], b[3]});
        }
      }
  }
}

// Waits until all but the last kLeft products and sums that were started are there, of which c is one.
template <int kLeft, class T, int M, int N>
STRATA_DEVICE void finish(float (&c)[M][N][4]) {
  if constexpr (kWarpgroups<T>) {
    wait_products<kLeft>();
    keep_in_place(c);
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

}  // namespace strata::cuda::flash
