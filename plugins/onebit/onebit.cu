// Bits of gradients on the GPU: a block of threads a block of 512 numbers, which makes the bytes that the CPU makes and
// leaves the errors that it leaves; what they mean is said in signs.h and signs.cpp.
#include "cuda/bind.h"
#include "plugins/onebit/signs.h"
#include "strata/communicator.h"

namespace strata::cuda::onebit_kernels {
namespace {

constexpr int kElements = int(onebit::kBlock), kLanes = 16, kRows = kElements / kLanes;
constexpr int64_t kBytes = 8 + 4 * kLanes;  // of a block: two values, then the bits by lane

STRATA_DEVICE float by_sign(const uint8_t* block, int i) {
  const uint32_t word = reinterpret_cast<const uint32_t*>(block + 8)[i % kLanes];
  return reinterpret_cast<const float*>(block)[word >> (i / kLanes) & 1];
}
STRATA_DEVICE bool is_finite(float x) { return (float_bits(x) & 0x7F800000u) != 0x7F800000u; }

// A thread an element. Sums are taken lane by lane, as the CPU does: by the first threads.
template <class T>
STRATA_KERNEL pack(const T* from, int64_t elements, float* error, const double* overflow, uint8_t* list) {
  __shared__ float x[kElements], sums[2][kLanes];
  __shared__ uint32_t signs[kLanes];
  const int l = int(threadIdx.x);
  const int64_t first = int64_t(blockIdx.x) * kElements, i = first + l;
  const int count = int(elements - first < kElements ? elements - first : kElements);
  uint8_t* const block = list + int64_t(blockIdx.x) * kBytes;
  if (overflow && *overflow != *overflow) return;  // the list is zeros
  x[l] = l < count ? rounded_sum(to_float(from[i]), error[i]) : 0.0f;
  __syncthreads();
  if (l < kLanes) {
    uint32_t bits = 0;
    float without = 0, with = 0;
    for (int r = 0; r < kRows; ++r) {
      const float value = x[kLanes * r + l];
      const bool sign = float_bits(value) >> 31;
      bits |= uint32_t(sign) << r;
      without = rounded_sum(without, sign ? 0.0f : value);
      with = rounded_sum(with, sign ? value : 0.0f);
    }
    signs[l] = bits, sums[0][l] = without, sums[1][l] = with;
  }
  __syncthreads();
  if (l == 0) {
    int counted = 0;
    float without = 0, with = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int r = 0; r < kRows; ++r) counted += int(signs[lane] >> r & 1);
      without = rounded_sum(without, sums[0][lane]), with = rounded_sum(with, sums[1][lane]);
      reinterpret_cast<uint32_t*>(block + 8)[lane] = signs[lane];
    }
    float values[2] = {count > counted ? without / float(count - counted) : 0.0f,
                       counted > 0 ? with / float(counted) : 0.0f};
    if (const float all = rounded_sum(without, with); !is_finite(all)) values[0] = values[1] = all;
    for (int k = 0; k < 2; ++k) reinterpret_cast<float*>(block)[k] = sums[k][0] = values[k];
  }
  __syncthreads();
  if (l >= count) return;
  const float read = sums[signs[l % kLanes] >> (l / kLanes) & 1][0];
  error[i] = is_finite(sums[0][0]) ? rounded_sum(x[l], -read) : 0.0f;
}

template <class T>
STRATA_KERNEL unpack(const uint8_t* lists, int64_t sources, int64_t stride, int64_t elements, T* to) {
  const int64_t i = int64_t(blockIdx.x) * kElements + threadIdx.x;
  if (i >= elements) return;
  float sum = 0;
  for (int64_t source = 0; source < sources; ++source)
    sum = rounded_sum(sum, by_sign(lists + source * stride + int64_t(blockIdx.x) * kBytes, int(threadIdx.x)));
  to[i] = from_float<T>(sum);
}

STRATA_KERNEL clear(uint8_t* bytes, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * kElements + threadIdx.x;
  if (i < count) bytes[i] = 0;
}

int64_t row_of(const Shape& shape) { return elements(shape) / (shape[0] > 0 ? shape[0] : 1); }

const Registration kinds[] = {
    {"onebit_pack",
     [](const Binding& b) {
       return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
         using T = decltype(zero);
         return [=, x = b.in<T>(0), shape = Shape(b.input(0).shape), error = b.out<float>(1),
                 overflow = b.has_input(2) ? b.in<double>(2) : nullptr, packed = b.out<uint8_t>(0),
                 lists = b.output(0).shape[1], bytes = b.output(0).shape[2], queue = b.queue()] {
           launch(clear, dim3(blocks(lists * bytes, kElements)), kElements, 0, queue, packed, lists * bytes);
           for (int64_t list = 0; list < lists; ++list) {
             const Range rows = lists == 1 ? Range{0, shape[0]} : share_of(shape[0], int(list), int(lists));
             const int64_t row = row_of(shape), n = rows.count() * row;
             launch(pack<T>, dim3(blocks(n, kElements)), kElements, 0, queue, x + rows.begin * row, n,
                    error + rows.begin * row, overflow, packed + list * bytes);
           }
         };
       });
     }},
    {"onebit_unpack", [](const Binding& b) {
       return with_type(b.output(0).dtype, [&](auto zero) -> Launch {
         using T = decltype(zero);
         return [=, packed = b.in<uint8_t>(0), x = b.out<T>(0), shape = Shape(b.output(0).shape),
                 ranks = b.input(0).shape[0], bytes = b.input(0).shape[2], sum = b.attributes().integer("sum") != 0,
                 queue = b.queue()] {
           const auto one = [&](const uint8_t* lists, int64_t sources, int64_t n, T* to) {
             launch(unpack<T>, dim3(blocks(n, kElements)), kElements, 0, queue, lists, sources, bytes, n, to);
           };
           if (sum) return one(packed, ranks, elements(shape), x);
           for (int r = 0; r < int(ranks); ++r) {
             const Range rows = share_of(shape[0], r, int(ranks));
             const int64_t row = row_of(shape);
             one(packed + r * bytes, 1, rows.count() * row, x + rows.begin * row);
           }
         };
       });
     }}};

}  // namespace
}  // namespace strata::cuda::onebit_kernels
