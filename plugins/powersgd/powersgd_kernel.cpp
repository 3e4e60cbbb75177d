// Loops over rows of the gradient: each reads or writes the matrix once. See powersgd_kernel.h.
#include "plugins/powersgd/powersgd_kernel.h"

#include <algorithm>
#include <cmath>

#include "strata/convert.h"

namespace strata::powersgd {
namespace {

constexpr int64_t kChunk = 1024;  // columns that stay in the first cache
constexpr int64_t kLanes = 16;

// In lanes of a fixed number, so that the sum depends on nothing but the sizes.
float dot(const float* a, const float* b, int64_t count) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] += a[i + l] * b[i + l];
  float rest = 0;
  for (; i < count; ++i) rest += a[i] * b[i];
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  return lanes[0] + rest;
}

double dot_in_f64(const float* a, const float* b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += double(a[i]) * b[i];
  return sum;
}

// Rows worth a thread of their own.
int64_t row_grain(const Sizes& sizes) { return std::max<int64_t>(1, 4096 / std::max<int64_t>(1, sizes.columns)); }

}  // namespace

void project(Threads& threads, const Sizes& sizes, DType dtype, const void* gradient, const float* query, float* matrix,
             float* left) {
  const auto [rows, columns, rank] = sizes;
  threads.split(rows, row_grain(sizes), [&, rows = rows, columns = columns, rank = rank](int64_t begin, int64_t end) {
    float chunk[kChunk];
    for (int64_t i = begin; i < end; ++i) {
      float* const row = matrix + i * columns;
      for (int64_t j = 0; j < columns; j += kChunk) {
        const int64_t some = std::min(kChunk, columns - j);
        to_f32(dtype, at(gradient, dtype, i * columns + j), chunk, some);
        for (int64_t c = 0; c < some; ++c) row[j + c] += chunk[c];
      }
      for (int64_t k = 0; k < rank; ++k) left[k * rows + i] = dot(row, query + k * columns, columns);
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
  threads.split(columns, 64, [&, rows = rows, columns = columns, rank = rank](int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += kChunk) {
      const int64_t some = std::min(kChunk, end - first);
      for (int64_t k = 0; k < rank; ++k) std::fill_n(right + k * columns + first, some, 0.0f);
      for (int64_t i = 0; i < rows; ++i) {
        const float* const row = matrix + i * columns + first;
        for (int64_t k = 0; k < rank; ++k) {
          const float b = basis[k * rows + i];
          float* const to = right + k * columns + first;
          for (int64_t c = 0; c < some; ++c) to[c] += b * row[c];
        }
      }
    }
  });
}

void finish(Threads& threads, const Sizes& sizes, int64_t ranks, const float* basis, const float* right, float* matrix,
            float* query, int64_t first, int64_t count, DType dtype, void* result) {
  const auto [rows, columns, rank] = sizes;
  const float part = 1.0f / float(ranks);
  threads.split(rows, row_grain(sizes), [&, rows = rows, columns = columns, rank = rank](int64_t begin, int64_t end) {
    float sum[kChunk];
    for (int64_t i = begin; i < end; ++i)
      for (int64_t j = 0; j < columns; j += kChunk) {
        const int64_t some = std::min(kChunk, columns - j);
        std::fill_n(sum, some, 0.0f);
        for (int64_t k = 0; k < rank; ++k) {
          const float b = basis[k * rows + i];
          const float* const from = right + k * columns + j;
          for (int64_t c = 0; c < some; ++c) sum[c] += b * from[c];
        }
        float* const row = matrix + i * columns + j;
        for (int64_t c = 0; c < some; ++c) row[c] -= part * sum[c];
        if (i >= first && i < first + count) from_f32(dtype, sum, at(result, dtype, (i - first) * columns + j), some);
      }
  });
  for (int64_t k = 0; k < rank; ++k) {
    const float* const row = right + k * columns;
    if (std::any_of(row, row + columns, [](float x) { return x != 0; })) std::copy_n(row, columns, query + k * columns);
  }
}

}  // namespace strata::powersgd
