// Passes over the matrix, each of which reads or writes it once: four rows at a time, so that a number of a factor
// serves four and, at ranks up to some ten, memory is what they wait for. See powersgd_kernel.h.
#include "plugins/powersgd/powersgd_kernel.h"

#include <algorithm>
#include <cmath>

#include "plugins/quantized_exchange/streaming.h"
#include "strata/convert.h"
#include "strata/simd.h"

namespace strata::powersgd {
namespace {

constexpr int64_t kChunk = 1024;  // columns of which four rows stay in the first cache
constexpr int64_t kLanes = 16;
constexpr int64_t kApart = 2 * kLanes;  // between chunks side by side, so that they are so in the cache, too
constexpr int64_t kStride = kChunk + kApart;
constexpr int64_t kNeighbours = 4;
constexpr int64_t kPart = 32;  // products of a row whose sums are under way at a time

// Numbers that the compiler keeps in registers, however wide the machine's are.
using Lanes = float __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
STRATA_INLINE const Lanes& lanes_at(const float* x) { return *reinterpret_cast<const Lanes*>(x); }
STRATA_INLINE Lanes& lanes_at(float* x) { return *reinterpret_cast<Lanes*>(x); }

// Neighbouring rows of a matrix; surplus ones are the last one again.
struct Rows {
  float* row[kNeighbours];
  int count;
  Rows(float* matrix, int64_t columns, int64_t first, int64_t rows)
      : count(int(std::min<int64_t>(kNeighbours, rows - first))) {
    for (int r = 0; r < kNeighbours; ++r) row[r] = matrix + (first + std::min(r, count - 1)) * columns;
  }
};

STRATA_SIMD void plus(const float* from, int64_t count, float* x) {
  for (int64_t i = 0; i < count; ++i) x[i] += from[i];
}

// sums (kNeighbours, kPart, kLanes) += by lane the products of rows' columns [first, first + count) and those of
// `ranks` queries. `count` is a multiple of kLanes.
STRATA_SIMD void add_products(const Rows& rows, int64_t first, int64_t count, const float* query, int64_t columns,
                              int64_t ranks, float* sums) {
  const float *const row0 = rows.row[0] + first, *const row1 = rows.row[1] + first, *const row2 = rows.row[2] + first,
                     *const row3 = rows.row[3] + first;
  for (int64_t k = 0; k < ranks; k += 2) {
    const int64_t other = std::min(k + 1, ranks - 1);  // the same again where ranks are odd
    const float *const query0 = query + k * columns + first, *const query1 = query + other * columns + first;
    const auto sum = [&](int64_t r, int64_t of) { return sums + (r * kPart + of) * kLanes; };
    Lanes a0 = lanes_at(sum(0, k)), a1 = lanes_at(sum(1, k)), a2 = lanes_at(sum(2, k)), a3 = lanes_at(sum(3, k));
    Lanes b0 = lanes_at(sum(0, other)), b1 = lanes_at(sum(1, other)), b2 = lanes_at(sum(2, other)),
          b3 = lanes_at(sum(3, other));
    for (int64_t i = 0; i < count; i += kLanes) {
      const Lanes q0 = lanes_at(query0 + i), q1 = lanes_at(query1 + i);
      const Lanes x0 = lanes_at(row0 + i), x1 = lanes_at(row1 + i), x2 = lanes_at(row2 + i), x3 = lanes_at(row3 + i);
      a0 += x0 * q0, b0 += x0 * q1;
      a1 += x1 * q0, b1 += x1 * q1;
      a2 += x2 * q0, b2 += x2 * q1;
      a3 += x3 * q0, b3 += x3 * q1;
    }
    lanes_at(sum(0, k)) = a0, lanes_at(sum(1, k)) = a1, lanes_at(sum(2, k)) = a2, lanes_at(sum(3, k)) = a3;
    if (other == k) continue;
    lanes_at(sum(0, other)) = b0, lanes_at(sum(1, other)) = b1, lanes_at(sum(2, other)) = b2;
    lanes_at(sum(3, other)) = b3;
  }
}

float sum_of(float* lanes) {
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  return lanes[0];
}

// Of some ranks the basis's numbers for neighbouring rows, 0 for surplus ones.
struct Weights {
  float of[kPart][kNeighbours];
  Weights(const float* basis, const Sizes& sizes, int64_t first_rank, int64_t first_row) {
    for (int64_t k = first_rank; k < std::min(sizes.rank, first_rank + kPart); ++k)
      for (int64_t r = 0; r < kNeighbours; ++r)
        of[k - first_rank][r] = first_row + r < sizes.rows ? basis[k * sizes.rows + first_row + r] : 0;
  }
};

// sums (ranks, stride) += of each rank the rows' numbers times its weights, of `count` columns. Two registers at a
// time: what is loaded of weights serves both. The next rows, `next` numbers ahead, are asked for: few columns are read
// of each, too few for the machine to see.
STRATA_SIMD void add_rows(const Rows& rows, int64_t next, int64_t first, int64_t count, const Weights& weights,
                          int64_t ranks, float* sums, int64_t stride) {
  const float *const row0 = rows.row[0] + first, *const row1 = rows.row[1] + first, *const row2 = rows.row[2] + first,
                     *const row3 = rows.row[3] + first;
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    const Lanes x0 = lanes_at(row0 + i), x1 = lanes_at(row1 + i), x2 = lanes_at(row2 + i), x3 = lanes_at(row3 + i);
    const Lanes y0 = lanes_at(row0 + i + kLanes), y1 = lanes_at(row1 + i + kLanes), y2 = lanes_at(row2 + i + kLanes),
                y3 = lanes_at(row3 + i + kLanes);
    for (const float* row : {row0, row1, row2, row3})
      __builtin_prefetch(row + next + i), __builtin_prefetch(row + next + i + kLanes);
    for (int64_t k = 0; k < ranks; ++k) {
      const float* const w = weights.of[k];
      const Lanes w0 = w[0] - Lanes{}, w1 = w[1] - Lanes{}, w2 = w[2] - Lanes{}, w3 = w[3] - Lanes{};
      Lanes &x = lanes_at(sums + k * stride + i), &y = lanes_at(sums + k * stride + i + kLanes);
      x = x + x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3;
      y = y + y0 * w0 + y1 * w1 + y2 * w2 + y3 * w3;
    }
  }
  for (; i < count; ++i)
    for (int64_t k = 0; k < ranks; ++k) {
      const float* const w = weights.of[k];
      float& sum = sums[k * stride + i];
      sum = sum + row0[i] * w[0] + row1[i] * w[1] + row2[i] * w[2] + row3[i] * w[3];
    }
}

// sums (kNeighbours, kStride) += of each row the ranks' numbers `right` (ranks, columns) times its weights.
STRATA_SIMD void add_ranks(const float* right, int64_t columns, int64_t ranks, const Weights& weights, int64_t count,
                           float* sums) {
  float *const to0 = sums, *const to1 = sums + kStride, *const to2 = sums + 2 * kStride,
               *const to3 = sums + 3 * kStride;
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    Lanes x0 = lanes_at(to0 + i), x1 = lanes_at(to1 + i), x2 = lanes_at(to2 + i), x3 = lanes_at(to3 + i);
    Lanes y0 = lanes_at(to0 + i + kLanes), y1 = lanes_at(to1 + i + kLanes), y2 = lanes_at(to2 + i + kLanes),
          y3 = lanes_at(to3 + i + kLanes);
    for (int64_t k = 0; k < ranks; ++k) {
      const float* const w = weights.of[k];
      const Lanes w0 = w[0] - Lanes{}, w1 = w[1] - Lanes{}, w2 = w[2] - Lanes{}, w3 = w[3] - Lanes{};
      const Lanes x = lanes_at(right + k * columns + i), y = lanes_at(right + k * columns + i + kLanes);
      x0 += x * w0, x1 += x * w1, x2 += x * w2, x3 += x * w3;
      y0 += y * w0, y1 += y * w1, y2 += y * w2, y3 += y * w3;
    }
    lanes_at(to0 + i) = x0, lanes_at(to1 + i) = x1, lanes_at(to2 + i) = x2, lanes_at(to3 + i) = x3;
    lanes_at(to0 + i + kLanes) = y0, lanes_at(to1 + i + kLanes) = y1, lanes_at(to2 + i + kLanes) = y2;
    lanes_at(to3 + i + kLanes) = y3;
  }
  for (; i < count; ++i)
    for (int64_t k = 0; k < ranks; ++k)
      for (int64_t r = 0; r < kNeighbours; ++r) sums[r * kStride + i] += right[k * columns + i] * weights.of[k][r];
}

STRATA_SIMD void take_out(const float* sum, float part, int64_t count, float* row) {
  for (int64_t i = 0; i < count; ++i) row[i] -= part * sum[i];
}

double dot_in_f64(const float* a, const float* b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += double(a[i]) * b[i];
  return sum;
}

// Sums over rows, of some ranks, are made of so many columns at a time that they stay in the first cache. They are kept
// together: whole rows of a factor, often a power of two apart, would drive each other out of it.
constexpr int64_t kSums = 8 * kChunk;
int64_t width_of(int64_t ranks) { return std::min(kChunk, kSums / ranks / 64 * 64); }

int64_t groups_of(int64_t rows) { return (rows + kNeighbours - 1) / kNeighbours; }
// Groups of rows worth a thread of their own.
int64_t grain(const Sizes& sizes) {
  return std::max<int64_t>(1, 4096 / kNeighbours / std::max<int64_t>(1, sizes.columns));
}

}  // namespace

void project(Threads& threads, const Sizes& sizes, DType dtype, const void* gradient, const float* query, float* matrix,
             float* left) {
  const auto [rows, columns, rank] = sizes;
  threads.split(
      groups_of(rows), grain(sizes), [&, rows = rows, columns = columns, rank = rank](int64_t begin, int64_t end) {
        float chunk[kChunk], sums[kNeighbours * kPart * kLanes], rest[kNeighbours * kPart];
        for (int64_t group = begin; group < end; ++group) {
          const Rows some_rows(matrix, columns, group * kNeighbours, rows);
          for (int64_t k = 0; k < rank; k += kPart) {
            const int64_t ranks = std::min(kPart, rank - k);
            std::fill(std::begin(sums), std::end(sums), 0.0f), std::fill(std::begin(rest), std::end(rest), 0.0f);
            for (int64_t j = 0; j < columns; j += kChunk) {
              const int64_t some = std::min(kChunk, columns - j), whole = some / kLanes * kLanes;
              for (int r = 0; r < some_rows.count && k == 0; ++r) {
                const void* const from = at(gradient, dtype, (group * kNeighbours + r) * columns + j);
                if (dtype != DType::f32) to_f32(dtype, from, chunk, some);
                plus(dtype == DType::f32 ? static_cast<const float*>(from) : chunk, some, some_rows.row[r] + j);
              }
              add_products(some_rows, j, whole, query + k * columns, columns, ranks, sums);
              for (int64_t i = j + whole; i < j + some; ++i)
                for (int r = 0; r < some_rows.count; ++r)
                  for (int64_t of = 0; of < ranks; ++of)
                    rest[r * kPart + of] += some_rows.row[r][i] * query[(k + of) * columns + i];
            }
            for (int r = 0; r < some_rows.count; ++r)
              for (int64_t of = 0; of < ranks; ++of)
                left[(k + of) * rows + group * kNeighbours + r] =
                    sum_of(sums + (r * kPart + of) * kLanes) + rest[r * kPart + of];
          }
        }
      });
}

void orthonormalize(const Sizes& sizes, float* left) {
  // Below this part of its length, what is left of a vector is rounding.
  constexpr double kNothing = 1e-6;
  const int64_t n = sizes.rows;
  for (int64_t k = 0; k < sizes.rank; ++k) {
    float* const v = left + k * n;
    const double before = std::sqrt(dot_in_f64(v, v, n));
    for (int pass = 0; pass < 2; ++pass)
      for (int64_t l = 0; l < k; ++l) {
        const float* const u = left + l * n;
        const double along = dot_in_f64(u, v, n);
        for (int64_t i = 0; i < n; ++i) v[i] = float(v[i] - along * u[i]);
      }
    const double length = std::sqrt(dot_in_f64(v, v, n));
    if (length <= kNothing * before)  // not so where it is NaN, which is to be seen in the result
      std::fill_n(v, n, 0.0f);
    else
      for (int64_t i = 0; i < n; ++i) v[i] = float(v[i] / length);
  }
}

void project_back(Threads& threads, const Sizes& sizes, const float* basis, const float* matrix, float* right) {
  const auto [rows, columns, rank] = sizes;
  const int64_t part = std::min(kPart, rank), width = width_of(part), stride = width + kApart;
  threads.split(columns, 64, [&, rows = rows, columns = columns, rank = rank](int64_t begin, int64_t end) {
    float sums[kSums + kPart * kApart];
    for (int64_t first = begin; first < end; first += width)
      for (int64_t k = 0; k < rank; k += part) {
        const int64_t some = std::min(width, end - first), ranks = std::min(part, rank - k);
        std::fill_n(sums, ranks * stride, 0.0f);
        for (int64_t i = 0; i < rows; i += kNeighbours)
          add_rows(Rows(const_cast<float*>(matrix), columns, i, rows), kNeighbours * columns, first, some,
                   Weights(basis, sizes, k, i), ranks, sums, stride);
        for (int64_t of = 0; of < ranks; ++of)
          std::copy_n(sums + of * stride, some, right + (k + of) * columns + first);
      }
  });
}

void finish(Threads& threads, const Sizes& sizes, int64_t ranks, const float* basis, const float* right, float* matrix,
            float* query, int64_t first, int64_t count, DType dtype, void* result) {
  const auto [rows, columns, rank] = sizes;
  const float part = 1.0f / float(ranks);
  const bool past = dtype == DType::f32 && 4 * count * columns >= kPastCaches;
  const auto body = [&, rows = rows, columns = columns, rank = rank](int64_t begin, int64_t end) {
    float sums[kNeighbours * kStride];
    for (int64_t group = begin; group < end; ++group) {
      const Rows some_rows(matrix, columns, group * kNeighbours, rows);
      for (int64_t j = 0; j < columns; j += kChunk) {
        const int64_t some = std::min(kChunk, columns - j);
        std::fill(std::begin(sums), std::end(sums), 0.0f);
        for (int64_t k = 0; k < rank; k += kPart)
          add_ranks(right + k * columns + j, columns, std::min(kPart, rank - k),
                    Weights(basis, sizes, k, group * kNeighbours), some, sums);
        for (int r = 0; r < some_rows.count; ++r) {
          const float* const sum = sums + r * kStride;
          take_out(sum, part, some, some_rows.row[r] + j);
          const int64_t i = group * kNeighbours + r;
          if (i < first || i >= first + count) continue;
          void* const to = at(result, dtype, (i - first) * columns + j);
          if (past)
            store_past_caches(static_cast<float*>(to), sum, some);
          else
            from_f32(dtype, sum, to, some);
        }
      }
    }
    if (past) drain_stores();
  };
  threads.split(groups_of(rows), grain(sizes), body);
  for (int64_t k = 0; k < rank; ++k) {
    const float* const row = right + k * columns;
    if (std::any_of(row, row + columns, [](float x) { return x != 0; })) std::copy_n(row, columns, query + k * columns);
  }
}

}  // namespace strata::powersgd
