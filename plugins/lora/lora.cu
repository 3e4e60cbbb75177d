// lora_matrix and its gradient on the GPU: a thread for each number of an adapter's row.
#include "cuda/bind.h"
#include "plugins/lora/matrix.h"

namespace strata::cuda::lora_kernels {
namespace {

constexpr int kBlock = 256;

// Rows of a weight as plain data: where each matrix begins among those that repeat, and among the adapted ones.
struct Places {
  int matrices;
  int64_t period, adapted, rank, columns;
  int64_t begin[lora::Rows::kMost], adapted_begin[lora::Rows::kMost], adapter[lora::Rows::kMost];

  Places(const lora::Rows& rows, int64_t rank)
      : matrices(int(rows.rows.size())),
        period(rows.period()),
        adapted(rows.adapted()),
        rank(rank),
        columns(rank * int64_t(rows.chosen.size())) {
    int64_t at = 0;
    for (int m = 0; m < matrices; at += rows.rows[size_t(m++)]) {
      const lora::Rows::Place place = rows.place_of(at);
      begin[m] = at, adapted_begin[m] = place.row, adapter[m] = place.adapter;
    }
  }
  STRATA_DEVICE int matrix_of(int64_t row) const {
    int m = matrices - 1;
    while (row % period < begin[m]) --m;
    return m;
  }
  STRATA_DEVICE int64_t adapted_row(int64_t row, int m) const {
    return row / period * adapted + adapted_begin[m] + row % period - begin[m];
  }
};

template <class T>
STRATA_KERNEL matrix(const T* b, T* out, int64_t count, Places p, float scale) {
  const int64_t i = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (i >= count) return;
  const int64_t row = i / p.columns, column = i % p.columns;
  const int m = p.matrix_of(row);
  const bool here = p.adapter[m] >= 0 && column / p.rank == p.adapter[m];
  const float value = here ? scale * to_float(b[p.adapted_row(row, m) * p.rank + column % p.rank]) : 0.0f;
  out[i] = from_float<T>(value);
}

STRATA_KERNEL gradient(const float* dy, float* db, int64_t count, Places p, float scale, bool accumulate) {
  const int64_t i = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (i >= count) return;
  const int64_t row = i / p.rank, j = i % p.rank;
  const int m = p.matrix_of(row);
  if (p.adapter[m] < 0) return;
  float& out = db[p.adapted_row(row, m) * p.rank + j];
  out = (accumulate ? out : 0.0f) + scale * dy[row * p.columns + p.adapter[m] * p.rank + j];
}

const Registration kinds[] = {
    {"lora_matrix",
     [](const Binding& b) {
       const Places places(lora::Rows::of(b.attributes()), b.columns(0));
       return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
         using T = decltype(zero);
         return [=, n = count(b.output(0)), from = b.in<T>(0), to = b.out<T>(0), queue = b.queue(),
                 scale = float(b.attributes().real("scale"))] {
           launch(matrix<T>, dim3(blocks(n, kBlock)), kBlock, 0, queue, from, to, n, places, scale);
         };
       });
     }},
    {"lora_matrix_gradient", [](const Binding& b) -> Launch {
       const Places places(lora::Rows::of(b.attributes()), b.output(0).shape[1]);
       return [=, n = b.input(0).shape[0] * places.rank, from = b.in<float>(0), to = b.out<float>(0), queue = b.queue(),
               scale = float(b.attributes().real("scale")), accumulate = b.accumulates(0)] {
         launch(gradient, dim3(blocks(n, kBlock)), kBlock, 0, queue, from, to, n, places, scale, accumulate);
       };
     }}};

}  // namespace
}  // namespace strata::cuda::lora_kernels
