// Gist's encodings on the GPU but the sparse one, whose overflow would have to stop the run: masks, bf16, and eight
// bits with a scale a block of 256; what the bytes mean is said in codec_kernels.h.
#include "cuda/bind.h"
#include "plugins/gist/codec_formats.h"

namespace strata::cuda::gist_kernels {
namespace {

using namespace strata::gist;
constexpr int kBlock = 256;

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

// Calls body(Code{}) with the format that the op names.
template <class Body>
Launch with_format(const Binding& b, Body&& body) {
  const std::string name = b.attributes().string("format");
  if (name == "e4m3") return body(E4M3{});
  if (name == "e5m2") return body(E5M2{});
  return body(Int8{});
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
    {"gist_8bit_encode",
     [](const Binding& b) {
       return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
         return with_format(b, [&](auto code) -> Launch {
           using T = decltype(zero);
           using Code = decltype(code);
           return [=, x = b.in<T>(0), codes = b.out<uint8_t>(0), scales = b.out<float>(1), n = count(b.input(0)),
                   queue = b.queue()] {
             launch(encode_8bit<Code, T>, dim3(blocks(n, kBlock)), kBlock, 0, queue, x, n, codes, scales);
           };
         });
       });
     }},
    {"gist_8bit_decode",
     [](const Binding& b) {
       return with_type(b.output(0).dtype, [&](auto zero) -> Launch {
         return with_format(b, [&](auto code) -> Launch {
           using T = decltype(zero);
           using Code = decltype(code);
           return [=, codes = b.in<uint8_t>(0), scales = b.in<float>(1), x = b.out<T>(0), n = count(b.output(0)),
                   queue = b.queue()] {
             launch(decode_8bit<Code, T>, dim3(blocks(n, kBlock)), kBlock, 0, queue, codes, scales, n, x);
           };
         });
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
