// Codes of gradients and of gathered parameters on the GPU: a block of threads a block of 256 numbers, which makes the
// bytes that the CPU makes; what they mean is said in codes.h and rounding.h, where they lie in lists.h.
#include "cuda/bind.h"
#include "cuda/philox.h"
#include "plugins/gist/codec_formats.h"
#include "plugins/quantized_exchange/codes.h"
#include "plugins/quantized_exchange/lists.h"
#include "plugins/quantized_exchange/rounding.h"
#include "strata/communicator.h"

namespace strata::cuda::quantized_kernels {
namespace {

using quantized::Format;
using quantized::Keys;
constexpr int kCodes = int(quantized::kBlock), kThreads = kCodes / 2;  // two elements a thread

// Where a list's scales end, and its codes begin.
STRATA_DEVICE int64_t scales_of(Format format, int64_t elements) {
  return format == Format::bf16 ? 0 : (elements + kCodes - 1) / kCodes * 4;
}
STRATA_DEVICE int64_t code_bytes(Format format, int64_t elements) {
  return format == Format::int4 ? (elements + 1) / 2 : format == Format::bf16 ? 2 * elements : elements;
}

template <Format kFormat>
STRATA_DEVICE uint32_t code_of(float scaled, uint32_t random) {
  if constexpr (kFormat == Format::int8) return quantized::code_of<127>(scaled, random);
  if constexpr (kFormat == Format::int4) return quantized::code_of<7>(scaled, random);
  return gist::E4M3::encode(scaled);
}
template <Format kFormat>
STRATA_DEVICE float value_of(uint32_t code) {
  if constexpr (kFormat == Format::int8) return float(int32_t(code) - 127);
  if constexpr (kFormat == Format::int4) return float(int32_t(code) - 7);
  return gist::E4M3::decode(uint8_t(code));
}
template <Format kFormat>
constexpr float kLargest = kFormat == Format::int8   ? 127.0f
                           : kFormat == Format::int4 ? 7.0f
                                                     : 448.0f;

// With seed and step for random numbers, or to nearest without. `when`: nothing is done where that is a 0.
template <Format kFormat, class T>
STRATA_KERNEL pack(const T* x, int64_t elements, const double* seed, uint32_t stream, const double* step, uint8_t* list,
                   int64_t bytes, const double* when) {
  __shared__ float scratch[32];
  __shared__ uint8_t codes[kCodes];
  if (when && *when == 0) return;
  const int l = int(threadIdx.x);
  const int64_t first = int64_t(blockIdx.x) * kCodes;
  const int count = int(elements - first < kCodes ? elements - first : kCodes);
  uint8_t* const to = list + scales_of(kFormat, elements) + code_bytes(kFormat, first);
  if constexpr (kFormat == Format::bf16) {
    for (int i = l; i < count; i += kThreads) reinterpret_cast<bf16*>(to)[i] = from_float<bf16>(to_float(x[first + i]));
  } else {
    float v[2];
    for (int k = 0; k < 2; ++k) v[k] = l + k * kThreads < count ? to_float(x[first + l + k * kThreads]) : 0.0f;
    const float low = v[0] < 0 ? -v[0] : v[0], high = v[1] < 0 ? -v[1] : v[1];
    const float scale = block_max(high > low || high != high ? high : low, scratch) / kLargest<kFormat>;
    const float factor = scale > 0 ? 1 / scale : 0, finite = factor <= 3.402823466e38f ? factor : 0;
    uint32_t word = quantized::kToNearest << 16 | quantized::kToNearest;
    if (seed) {
      const uint64_t given = uint64_t(*seed), key = uint32_t(given ^ given >> 32) | uint64_t(stream) << 32;
      const Words words = random_words(key, uint32_t(*step), 0);
      word = Keys{words.word[0], words.word[1]}.of_block(uint32_t(blockIdx.x), float_bits(scale)).word(uint32_t(l));
    }
    codes[l] = uint8_t(code_of<kFormat>(rounded_product(v[0], finite), word & 0xFFFF));
    codes[l + kThreads] = uint8_t(code_of<kFormat>(rounded_product(v[1], finite), word >> 16));
    __syncthreads();
    if (l == 0) *reinterpret_cast<float*>(list + 4 * int64_t(blockIdx.x)) = scale;
    if constexpr (kFormat == Format::int4) {
      const int half = (count + 1) / 2;
      if (l < half) to[l] = uint8_t(codes[l] | (half + l < count ? codes[half + l] << 4 : 0));
    } else {
      for (int i = l; i < count; i += kThreads) to[i] = codes[i];
    }
  }
  if (first + count == elements)
    for (int64_t i = scales_of(kFormat, elements) + code_bytes(kFormat, elements) + l; i < bytes; i += kThreads)
      list[i] = 0;
}

// A thread an element: `sources` lists, added up in their order.
template <Format kFormat, class T>
STRATA_KERNEL unpack(const uint8_t* lists, int64_t sources, int64_t stride, int64_t elements, T* x,
                     const double* when) {
  if (when && *when == 0) return;
  const int64_t i = int64_t(blockIdx.x) * kCodes + threadIdx.x, first = i / kCodes * kCodes;
  if (i >= elements) return;
  const int count = int(elements - first < kCodes ? elements - first : kCodes), half = (count + 1) / 2,
            at = int(i - first);
  float sum = 0;
  for (int64_t source = 0; source < sources; ++source) {
    const uint8_t* const list = lists + source * stride;
    const uint8_t* const codes = list + scales_of(kFormat, elements) + code_bytes(kFormat, first);
    float value;
    if constexpr (kFormat == Format::bf16) {
      value = to_float(reinterpret_cast<const bf16*>(codes)[at]);
    } else {
      uint32_t code = codes[kFormat == Format::int4 ? at % half : at];
      if constexpr (kFormat == Format::int4) code = at < half ? code & 15 : code >> 4;
      value = rounded_product(value_of<kFormat>(code), *reinterpret_cast<const float*>(list + first / kCodes * 4));
    }
    sum = source == 0 ? value : rounded_sum(sum, value);
  }
  x[i] = from_float<T>(sum);
}

// Calls body with a number of the tensor's type and the format that the op names.
template <Format kFormat>
struct Of {
  static constexpr Format value = kFormat;
};
template <class Body>
Launch with_format(const Binding& b, const Tensor& tensor, Body&& body) {
  return with_type(tensor.dtype, [&](auto zero) -> Launch {
    const std::string name = b.attributes().string("format");
    if (name == "int8") return body(zero, Of<Format::int8>{});
    if (name == "int4") return body(zero, Of<Format::int4>{});
    if (name == "bf16") return body(zero, Of<Format::bf16>{});
    return body(zero, Of<Format::fp8_e4m3>{});
  });
}
int64_t row_of(const Shape& shape) { return elements(shape) / (shape[0] > 0 ? shape[0] : 1); }

// The kernels of a list of parameters, whose numbers begin at `from` and are read to `to`.
struct Coded {
  quantized::List list;
  Launch pack, unpack;
};
Coded coded(const Binding& b, const quantized::List& list, const void* from, const double* when) {
  auto* const codes = b.workspace<uint8_t>() + list.offset;
  Coded result{.list = list, .pack = {}, .unpack = {}};
  const auto take = [&](bool packs) {
    return with_format(b, b.output(list.tensor), [&](auto zero, auto format) -> Launch {
      using T = decltype(zero);
      constexpr Format kFormat = decltype(format)::value;
      const dim3 grid(blocks(list.elements, kCodes));
      const T* const x = static_cast<const T*>(from);
      T* const to = b.out<T>(list.tensor) + list.first;
      if (packs)
        return [=, queue = b.queue()] {
          launch(pack<kFormat, T>, grid, kThreads, 0, queue, x, list.elements, nullptr, 0u, nullptr, codes, list.bytes,
                 when);
        };
      return [=, queue = b.queue()] {
        launch(unpack<kFormat, T>, grid, kCodes, 0, queue, codes, int64_t{1}, int64_t{0}, list.elements, to, when);
      };
    });
  };
  result.pack = take(true), result.unpack = take(false);
  return result;
}

// A group that exchanges through the host's memory has no queue: its copies come after the kernels that this thread has
// put into the device's, and nobody else waits for those.
void wait_for_kernels(Communicator& group, const std::byte* codes) {
  uint32_t any;
  if (!group.asynchronous()) group.copy_bytes(&any, codes, sizeof any);
}

// `in_place`: of whole tensors of which each rank's own rows are right.
Launch gather(const Binding& b, bool in_place) {
  const std::vector<quantized::List> lists = quantized::lists_of(b);
  std::vector<Coded> all;
  for (const quantized::List& list : lists) {
    const DType dtype = b.output(list.tensor).dtype;
    all.push_back(coded(b, list, at(b.in<void>(list.tensor), dtype, in_place ? list.first : 0), nullptr));
  }
  auto* const codes = b.workspace<std::byte>();
  const auto parts = quantized::pieces_of(lists, b.attributes().integer("size"), codes);
  return [all, parts, codes, &group = b.group()] {
    if (all.empty()) return;
    wait_for_kernels(group, codes);
    for (const Coded& one : all)
      if (one.list.rank == group.rank()) one.pack();
    wait_for_kernels(group, codes);
    group.all_gather(parts);
    for (const Coded& one : all) one.unpack();
    wait_for_kernels(group, codes);
  };
}

int64_t gathered_bytes(const OpView& v, int) { return quantized::bytes_of(quantized::lists_of(v)); }

const Registration gathers[] = {
    {"quantized_gather", [](const Binding& b) { return gather(b, false); }, gathered_bytes},
    {"quantized_gather_rows", [](const Binding& b) { return gather(b, true); }, gathered_bytes},
    {"quantized_rows",
     [](const Binding& b) -> Launch {
       std::vector<Coded> all;
       for (const quantized::List& list : quantized::lists_of(b))
         all.push_back(coded(b, list, at(b.in<void>(0), b.input(0).dtype, list.first), b.in<double>(1)));
       return [all] {
         for (const Coded& one : all) one.pack();
         for (const Coded& one : all) one.unpack();
       };
     },
     gathered_bytes}};

const Registration kinds[] = {
    {"quantized_pack",
     [](const Binding& b) {
       return with_format(b, b.input(0), [&](auto zero, auto format) -> Launch {
         using T = decltype(zero);
         const Shape shape = b.input(0).shape;
         const uint64_t stream = uint64_t(b.attributes().integer("stream"));
         return [=, x = b.in<T>(0), seed = b.in<double>(1), step = b.in<double>(2), packed = b.out<uint8_t>(0),
                 lists = b.output(0).shape[1], bytes = b.output(0).shape[2], queue = b.queue()] {
           for (int64_t list = 0; list < lists; ++list) {
             const Range rows = lists == 1 ? Range{0, shape[0]} : share_of(shape[0], int(list), int(lists));
             const int64_t row = row_of(shape), n = rows.count() * row;
             launch(pack<decltype(format)::value, T>, dim3(blocks(n, kCodes)), kThreads, 0, queue, x + rows.begin * row,
                    n, seed, uint32_t(stream ^ stream >> 32) + uint32_t(list), step, packed + list * bytes, bytes,
                    nullptr);
           }
         };
       });
     }},
    {"quantized_unpack", [](const Binding& b) {
       return with_format(b, b.output(0), [&](auto zero, auto format) -> Launch {
         using T = decltype(zero);
         return [=, packed = b.in<uint8_t>(0), x = b.out<T>(0), shape = Shape(b.output(0).shape),
                 ranks = b.input(0).shape[0], bytes = b.input(0).shape[2], sum = b.attributes().integer("sum") != 0,
                 queue = b.queue()] {
           const auto one = [&](const uint8_t* lists, int64_t sources, int64_t n, T* to) {
             launch(unpack<decltype(format)::value, T>, dim3(blocks(n, kCodes)), kCodes, 0, queue, lists, sources,
                    bytes, n, to, nullptr);
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
}  // namespace strata::cuda::quantized_kernels
