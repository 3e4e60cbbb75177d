// Dropout whose mask is a pure function of seed, step, site and global element index (Philox), so that nothing is
// stored and every split of the batch, or of the tensor over ranks, drops the same elements.
#include <algorithm>

#include "engine/ops/dropout_draw.h"
#include "engine/ops/registration.h"
#include "engine/ops/vector.h"
#include "strata/layout.h"

namespace strata {
namespace {

using simd::U;

// The four words of blocks block..block+15, one block a lane; the same numbers as philox().
struct Words {
  U word[4];
};
STRATA_INLINE Words philox_lanes(uint64_t block, uint32_t stream0, uint32_t stream1, uint32_t key0, uint32_t key1) {
  using Wide = uint64_t __attribute__((vector_size(128)));
  U lane{};
  for (int i = 0; i < 16; ++i) lane[i] = uint32_t(i);
  U c0 = uint32_t(block) + lane, c1 = U{} + uint32_t(block >> 32), c2 = U{} + stream0, c3 = U{} + stream1;
  c1 += (c0 < lane) ? U{} + 1u : U{};  // carry
  for (int round = 0; round < 10; ++round) {
    const Wide a = __builtin_convertvector(c0, Wide) * uint64_t{0xD2511F53},
               b = __builtin_convertvector(c2, Wide) * uint64_t{0xCD9E8D57};
    c0 = __builtin_convertvector(b >> 32, U) ^ c1 ^ key0;
    c1 = __builtin_convertvector(b, U);
    c2 = __builtin_convertvector(a >> 32, U) ^ c3 ^ key1;
    c3 = __builtin_convertvector(a, U);
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return {{c0, c1, c2, c3}};
}

// a[0], b[0], a[1], b[1], … of the lower or upper halves.
STRATA_INLINE U zip_low(U a, U b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
STRATA_INLINE U zip_high(U a, U b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

// Elements from global index `first` on. Element i keeps its value (times factor)
// when word i%4 of block i/4 is at least `threshold`.
STRATA_SIMD void dropout(const float* x, float* y, int64_t end, int64_t first, uint32_t threshold, float factor,
                         uint64_t seed, uint64_t stream) {
  for (int64_t i = 0; i < end;) {
    const uint64_t block = uint64_t(first + i) / 4;
    const Words words =
        philox_lanes(block, uint32_t(stream), uint32_t(stream >> 32), uint32_t(seed), uint32_t(seed >> 32));
    // Block by block from word by word: 64 consecutive elements.
    const U low02 = zip_low(words.word[0], words.word[2]), low13 = zip_low(words.word[1], words.word[3]);
    const U high02 = zip_high(words.word[0], words.word[2]), high13 = zip_high(words.word[1], words.word[3]);
    const U bits[4] = {zip_low(low02, low13), zip_high(low02, low13), zip_low(high02, high13),
                       zip_high(high02, high13)};
    const int64_t base = int64_t(block) * 4 - first, stop = std::min(end, base + 64);
    if (i == base && stop == base + 64) {
      for (int v = 0; v < 4; ++v, i += simd::kLanes) {
        const simd::F scaled = simd::load(x + i) * factor;
        simd::store(y + i, bits[v] >= threshold ? scaled : simd::F{});
      }
    } else {  // at the ends
      uint32_t word[64];
      std::memcpy(word, bits, sizeof word);
      for (; i < stop; ++i) y[i] = word[i - base] >= threshold ? x[i] * factor : 0.0f;
    }
  }
}

// What of a draw is known when the op is bound: microbatches follow each other, and `global` is where in the whole
// tensor of one this rank's part is: the output's, as what is read may have been kept since the step before, which
// other ranks' parts belong to.
struct Mask {
  explicit Mask(const Binding& b)
      : first(std::max(0, b.op().microbatch) * elements(b.output(0).full_shape())),
        global(b.output(0)),
        threshold(dropout_threshold(b.attributes().real("probability"))),
        factor(1 / (1 - b.attributes().real("probability"))) {}
  int64_t first;
  GlobalIndex global;
  uint32_t threshold;
  double factor;
};

DropoutDraw draw_of(const Binding& b) { return {*b.in<double>(1), *b.in<double>(2), b.attributes().integer("stream")}; }

Launch bind_cpu(const Binding& b) {
  require(compute_type(b) != DType::f64, b, "f32, bf16 or f16 tensors on the cpu backend");
  return [b, mask = Mask(b)] {
    const DropoutDraw draw = draw_of(b);
    b.threads().split(elements(b.input(0).shape), kGrain, [&](int64_t i, int64_t e) {
      over_f32<1, 1>(b, i, e, [&](const auto& in, const auto& out, int64_t n, int64_t begin) {
        mask.global.runs(begin, begin + n, [&](int64_t local, int64_t global, int64_t count) {
          drop_row(in[0] + (local - begin), out[0] + (local - begin), count, mask.first + global, mask.threshold,
                   float(mask.factor), draw);
        });
      });
    });
  };
}

template <class T>
Launch bind_reference(const Binding& b) {
  return [b, mask = Mask(b)] {
    const DropoutDraw draw = draw_of(b);
    for (int64_t i = 0; i < elements(b.input(0).shape); ++i) {
      const uint64_t index = uint64_t(mask.first + mask.global(i));
      b.out<T>(0)[i] = is_kept(draw, index, mask.threshold) ? b.in<T>(0)[i] * T(mask.factor) : T(0);
    }
  };
}
Launch bind_reference_type(const Binding& b) {
  require(!is_half(compute_type(b)), b, "f32 or f64 tensors on the reference backend");
  return compute_type(b) == DType::f64 ? bind_reference<double>(b) : bind_reference<float>(b);
}

std::vector<TensorSpec> shape(const OpView& v) {
  require(v.inputs() == 3 && v.has_input(0) && is_float(v.input(0)) && v.has_input(1) && is_scalar(v.input(1)) &&
              v.has_input(2) && is_scalar(v.input(2)) && v.attributes().has("probability") &&
              v.attributes().has("stream") && v.attributes().real("probability") >= 0 &&
              v.attributes().real("probability") < 1,
          v, "x, the scalars seed and step, and attributes probability in [0, 1) and stream");
  return {like(v.input(0))};
}

const AtLoad dropout_registered([] {
  register_kind({.name = "dropout",
                 .summary = "x (…), seed, step (f64 scalars) -> x·mask/(1-p); attributes probability, stream",
                 .shape = shape,
                 .gradient =
                     [](Differentiation& d) {
                       d.set(0, d.build().emit("dropout", {d.output_gradient(0), d.input(1), d.input(2)},
                                               d.forward().attributes()));
                     },
                 .in_place = {{0, 0}},
                 .half = true,
                 .sharding = elementwise(1, 1, 2, 1),
                 .kernels = {{"cpu", {bind_cpu, {}}}, {"reference", {bind_reference_type, {}}}}});
});

}  // namespace

void drop_row(const float* x, float* y, int64_t count, int64_t first, uint32_t threshold, float factor,
              const DropoutDraw& draw) {
  dropout(x, y, count, first, threshold, factor, draw.seed, draw.stream);
}

}  // namespace strata
