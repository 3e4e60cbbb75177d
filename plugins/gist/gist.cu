// Gist's encodings on the GPU: masks, nonzeros, bf16, and eight bits with a scale a block of 256; what the bytes mean
// is said in codec_kernels.h.
#include "cuda/bind.h"
#include "plugins/gist/codec_formats.h"
#include "plugins/gist/codec_kernels.h"

namespace strata::cuda::gist_kernels {
namespace {

using namespace strata::gist;
constexpr int kBlock = int(gist::kBlock);

// A thread a byte.
template <class T>
STRATA_KERNEL encode_mask(const T* x, int64_t count, uint8_t* mask) {
  const int64_t byte = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (byte * 8 >= count) return;
  float v[8];
  load(x, byte * 8, count, v);
  uint8_t bits = 0;
#pragma unroll
  for (int b = 0; b < 8; ++b) bits |= uint8_t((v[b] > 0) << b);
  mask[byte] = bits;
}
template <class T>
STRATA_KERNEL decode_mask(const uint8_t* mask, int64_t count, T* x) {
  const int64_t byte = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (byte * 8 >= count) return;
  float v[8];
#pragma unroll
  for (int b = 0; b < 8; ++b) v[b] = float(mask[byte] >> b & 1);
  store(x, byte * 8, count, v);
}

STRATA_DEVICE bool is_zero(float x) { return float_bits(x) == 0; }
STRATA_DEVICE bool is_zero(bf16 x) { return x.bits == 0; }
STRATA_DEVICE bool is_zero(f16 x) { return x.bits == 0; }
STRATA_DEVICE int bits_set(unsigned byte) {
  int set = 0;
#pragma unroll
  for (int b = 0; b < 8; ++b) set += int(byte >> b & 1);
  return set;
}
// Sum of what the threads before this one gave; `total` of all. `counts`: kBlock numbers of shared memory.
STRATA_DEVICE int before(int mine, int* counts, int& total) {
  counts[threadIdx.x] = mine;
  __syncthreads();
  for (int width = 1; width < kBlock; width *= 2) {
    const int left = int(threadIdx.x) >= width ? counts[threadIdx.x - width] : 0;
    __syncthreads();
    counts[threadIdx.x] += left;
    __syncthreads();
  }
  total = counts[kBlock - 1];
  const int result = counts[threadIdx.x] - mine;
  __syncthreads();
  return result;
}

// A block a chunk, a thread eight elements at a time.
template <class T>
STRATA_KERNEL find_nonzeros(const T* x, int64_t count, uint8_t* bitmap, int32_t* starts) {
  __shared__ float scratch[32];
  const int64_t begin = int64_t(blockIdx.x) * kChunk, end = begin + kChunk < count ? begin + kChunk : count;
  float found = 0;  // whole numbers below 2^24
  for (int64_t i = begin + int64_t(threadIdx.x) * 8; i < end; i += kBlock * 8) {
    unsigned byte = 0;
    for (int b = 0; b < 8 && i + b < end; ++b) byte |= unsigned(!is_zero(x[i + b])) << b;
    bitmap[i / 8] = uint8_t(byte);
    found += float(bits_set(byte));
  }
  found = block_sum(found, scratch);
  if (threadIdx.x == 0) starts[blockIdx.x + 1] = int32_t(found);
}
// One block: counts of chunks become where each begins.
STRATA_KERNEL add_starts(int32_t* starts, int64_t chunks, int64_t capacity, uint64_t* fault) {
  __shared__ int counts[kBlock];
  const int64_t each = (chunks + kBlock - 1) / kBlock, begin = threadIdx.x * each,
                end = begin + each < chunks ? begin + each : chunks;
  int mine = 0, total;
  for (int64_t c = begin; c < end; ++c) mine += starts[c + 1];
  int at = before(mine, counts, total);
  for (int64_t c = begin; c < end; ++c) starts[c + 1] = at += starts[c + 1];
  if (threadIdx.x != 0) return;
  starts[0] = 0;
  if (total > capacity) *fault = uint64_t(total);
}
// What goes beyond the capacity is dropped: the step ends with an error.
template <class T>
STRATA_KERNEL pack_nonzeros(const T* x, int64_t count, const uint8_t* bitmap, const int32_t* starts, T* values,
                            int64_t capacity) {
  __shared__ int counts[kBlock];
  const int64_t begin = int64_t(blockIdx.x) * kChunk, end = begin + kChunk < count ? begin + kChunk : count;
  int64_t base = starts[blockIdx.x];
  for (int64_t tile = begin; tile < end; tile += kBlock * 8) {
    const int64_t i = tile + int64_t(threadIdx.x) * 8;
    const unsigned byte = i < end ? bitmap[i / 8] : 0;
    int total;
    int64_t at = base + before(bits_set(byte), counts, total);
    for (int b = 0; b < 8; ++b)
      if (byte >> b & 1) {
        if (at < capacity) values[at] = x[i + b];
        ++at;
      }
    base += total;
  }
}
template <class T>
STRATA_KERNEL unpack_nonzeros(const uint8_t* bitmap, const T* values, const int32_t* starts, int64_t capacity,
                              int64_t count, T* x) {
  __shared__ int counts[kBlock];
  const int64_t begin = int64_t(blockIdx.x) * kChunk, end = begin + kChunk < count ? begin + kChunk : count;
  int64_t base = starts[blockIdx.x];
  for (int64_t tile = begin; tile < end; tile += kBlock * 8) {
    const int64_t i = tile + int64_t(threadIdx.x) * 8;
    const unsigned byte = i < end ? bitmap[i / 8] : 0;
    int total;
    int64_t at = base + before(bits_set(byte), counts, total);
    for (int b = 0; b < 8 && i + b < end; ++b) {
      const bool set = byte >> b & 1;
      x[i + b] = set && at < capacity ? values[at] : T{};
      at += set;
    }
    base += total;
  }
}

template <class Code, class T>
STRATA_KERNEL encode_8bit(const T* x, int64_t count, uint8_t* codes, float* scales) {
  __shared__ float scratch[32];
  const int64_t i = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  const float v = i < count ? to_float(x[i]) : 0.0f;
  const float scale = block_max(v < 0 ? -v : v, scratch) / Code::largest();
  const float factor = scale > 0 ? 1 / scale : 0;
  if (i < count) codes[i] = uint8_t(Code::encode(v * (factor <= 3.4e38f ? factor : 0)));
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
}
template <class Code, class T>
STRATA_KERNEL decode_8bit(const uint8_t* codes, const float* scales, int64_t count, T* x) {
  const int64_t i = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (i < count) x[i] = from_float<T>(Code::decode(codes[i]) * scales[blockIdx.x]);
}

template <class From, class To>
STRATA_KERNEL convert(const From* from, To* to, int64_t count) {
  const int64_t first = (int64_t(blockIdx.x) * kBlock + threadIdx.x) * 8;
  float v[8];
  if (first >= count) return;
  load(from, first, count, v);
  store(to, first, count, v);
}

// Calls body(T{}, Code{}) with the type of the tensor that is coded and the format that the op names.
template <class Body>
Launch with_codes(const Binding& b, const Tensor& coded, Body&& body) {
  return with_type(coded.dtype, [&](auto zero) -> Launch {
    const std::string name = b.attributes().string("format");
    if (name == "e4m3") return body(zero, E4M3{});
    if (name == "e5m2") return body(zero, E5M2{});
    return body(zero, Int8{});
  });
}

const Registration kinds[] = {
    {"gist_mask_encode",
     [](const Binding& b) {
       return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
         using T = decltype(zero);
         return [=, x = b.in<T>(0), mask = b.out<uint8_t>(0), n = count(b.input(0)), queue = b.queue()] {
           launch(encode_mask<T>, dim3(blocks(n, 8 * kBlock)), kBlock, 0, queue, x, n, mask);
         };
       });
     }},
    {"gist_mask_decode",
     [](const Binding& b) {
       return with_type(b.output(0).dtype, [&](auto zero) -> Launch {
         using T = decltype(zero);
         return [=, mask = b.in<uint8_t>(0), x = b.out<T>(0), n = count(b.output(0)), queue = b.queue()] {
           launch(decode_mask<T>, dim3(blocks(n, 8 * kBlock)), kBlock, 0, queue, mask, n, x);
         };
       });
     }},
    {"gist_sparse_encode",
     [](const Binding& b) {
       return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
         using T = decltype(zero);
         return [=, x = b.in<T>(0), bitmap = b.out<uint8_t>(0), values = b.out<T>(1), starts = b.out<int32_t>(2),
                 n = count(b.input(0)), capacity = count(b.output(1)), fault = b.fault(), queue = b.queue()] {
           const dim3 grid(blocks(n, kChunk));
           launch(find_nonzeros<T>, grid, kBlock, 0, queue, x, n, bitmap, starts);
           launch(add_starts, dim3(1), kBlock, 0, queue, starts, int64_t(grid.x), capacity, fault);
           launch(pack_nonzeros<T>, grid, kBlock, 0, queue, x, n, bitmap, starts, values, capacity);
         };
       });
     },
     {},
     [](const OpView& v, uint64_t found) { return too_many(v, int64_t(found)); }},
    {"gist_sparse_decode",
     [](const Binding& b) {
       return with_type(b.output(0).dtype, [&](auto zero) -> Launch {
         using T = decltype(zero);
         return [=, bitmap = b.in<uint8_t>(0), values = b.in<T>(1), starts = b.in<int32_t>(2), x = b.out<T>(0),
                 n = count(b.output(0)), capacity = count(b.input(1)), queue = b.queue()] {
           launch(unpack_nonzeros<T>, dim3(blocks(n, kChunk)), kBlock, 0, queue, bitmap, values, starts, capacity, n,
                  x);
         };
       });
     }},
    {"gist_8bit_encode",
     [](const Binding& b) {
       return with_codes(b, b.input(0), [&](auto zero, auto code) -> Launch {
         using T = decltype(zero);
         using Code = decltype(code);
         return [=, x = b.in<T>(0), codes = b.out<uint8_t>(0), scales = b.out<float>(1), n = count(b.input(0)),
                 queue = b.queue()] {
           launch(encode_8bit<Code, T>, dim3(blocks(n, kBlock)), kBlock, 0, queue, x, n, codes, scales);
         };
       });
     }},
    {"gist_8bit_decode",
     [](const Binding& b) {
       return with_codes(b, b.output(0), [&](auto zero, auto code) -> Launch {
         using T = decltype(zero);
         using Code = decltype(code);
         return [=, codes = b.in<uint8_t>(0), scales = b.in<float>(1), x = b.out<T>(0), n = count(b.output(0)),
                 queue = b.queue()] {
           launch(decode_8bit<Code, T>, dim3(blocks(n, kBlock)), kBlock, 0, queue, codes, scales, n, x);
         };
       });
     }},
    {"gist_bf16_encode",
     [](const Binding& b) -> Launch {
       return [=, x = b.in<float>(0), to = b.out<bf16>(0), n = count(b.input(0)), queue = b.queue()] {
         launch(convert<float, bf16>, dim3(blocks(n, 8 * kBlock)), kBlock, 0, queue, x, to, n);
       };
     }},
    {"gist_bf16_decode", [](const Binding& b) -> Launch {
       return [=, x = b.in<bf16>(0), to = b.out<float>(0), n = count(b.output(0)), queue = b.queue()] {
         launch(convert<bf16, float>, dim3(blocks(n, 8 * kBlock)), kBlock, 0, queue, x, to, n);
       };
     }}};

}  // namespace
}  // namespace strata::cuda::gist_kernels
