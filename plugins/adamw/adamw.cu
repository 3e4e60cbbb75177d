// AdamW on the GPU: one pass over memory, eight elements a thread; see adamw_kernel.h for the mathematics. Every
// product and sum is rounded as on the CPU, so that an update gives the same bits beside offloaded states as on the
// device.
#include "cuda/bind.h"
#include "cuda/elementwise.h"
#include "cuda/philox.h"
#include "plugins/adamw/adamw_rates.h"
#include "strata/optimizer.h"

namespace strata::cuda::adamw_kernels {
namespace {

constexpr int kBlock = 256, kEach = 8;
struct Settings : UpdateScalars {
  double beta1, beta2, epsilon;
  uint64_t m_stream, v_stream;
  GlobalIndex global;
};

// As to_bf16_stochastically, with 16 random bits.
STRATA_DEVICE bf16 rounded(float x, uint32_t random) {
  const uint32_t bits = float_bits(x);
  const bool finite = (bits & 0x7F800000u) != 0x7F800000u;
  return {uint16_t(finite ? (bits + (random & 0xFFFF)) >> 16 : bits >> 16 | ((bits & 0x7FFFFFu) ? 0x40 : 0))};
}
// kEach numbers from element i on. A block of Philox has eight numbers of 16 bits, which neighbours share.
STRATA_DEVICE Pack<bf16> rounded(const float (&x)[kEach], uint64_t seed, uint64_t stream, const GlobalIndex& global,
                                 int64_t i) {
  static_assert(kEach == 8 && kPack<bf16> == kEach);
  Pack<bf16> result;
  const auto first = uint64_t(global(i)), last = uint64_t(global(i + kEach - 1));
  if (first % kEach == 0 && last == first + kEach - 1) {
    const Words words = random_words(seed, stream, first / kEach);
#pragma unroll
    for (int e = 0; e < kEach; ++e) result.value[e] = rounded(x[e], words.word[e / 2] >> (e % 2 * 16));
  } else {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const auto index = uint64_t(global(i + e));  // beyond the end, too, where nothing is written
      const uint32_t word = pick(random_words(seed, stream, index / 8), uint32_t(index % 8 / 2));
      result.value[e] = rounded(x[e], word >> (index % 2 * 16));
    }
  }
  return result;
}

STRATA_DEVICE void store_as_is(bf16* to, int64_t i, int64_t count, const Pack<bf16>& from) {
  if (i + kEach <= count && reinterpret_cast<uintptr_t>(to + i) % 16 == 0) {
    *reinterpret_cast<Pack<bf16>*>(to + i) = from;
  } else {
#pragma unroll
    for (int e = 0; e < kEach; ++e)
      if (i + e < count) to[i + e] = from.value[e];
  }
}

template <class Gradient, class Moment>
STRATA_KERNEL __launch_bounds__(kBlock)
    update(float* parameter, const Gradient* gradient, Moment* m, Moment* v, int64_t count, Settings s) {
  if (s.skips()) return;
  const AdamRates rates = adam_rates(s, 1, s.step());
  const float weight1 = float(1 - s.beta1), weight2 = float(1 - s.beta2), beta2 = float(s.beta2),
              epsilon = float(s.epsilon), factor = float(s.gradient_scale());
  for (int64_t i = (int64_t(blockIdx.x) * kBlock + threadIdx.x) * kEach; i < count;
       i += int64_t(gridDim.x) * kBlock * kEach) {
    float p[kEach], g[kEach], first[kEach], second[kEach];
    load(static_cast<const float*>(parameter), i, count, p);
    load(gradient, i, count, g);
    load(static_cast<const Moment*>(m), i, count, first);
    load(static_cast<const Moment*>(v), i, count, second);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      g[e] = rounded_product(g[e], factor);
      first[e] = rounded_sum(first[e], rounded_product(weight1, g[e] - first[e]));
      second[e] = rounded_sum(rounded_product(beta2, second[e]), rounded_product(rounded_product(weight2, g[e]), g[e]));
      const float under = rounded_sum(rounded_product(sqrtf(second[e]), rates.root), epsilon);
      p[e] = rounded_sum(rounded_product(p[e], rates.decay), -(rounded_product(rates.step_size, first[e]) / under));
    }
    store(parameter, i, count, p);
    if constexpr (sizeof(Moment) == 2) {
      store_as_is(m, i, count, rounded(first, s.seed(), s.in_step(s.m_stream), s.global, i));
      store_as_is(v, i, count, rounded(second, s.seed(), s.in_step(s.v_stream), s.global, i));
    } else {
      store(m, i, count, first);
      store(v, i, count, second);
    }
  }
}

const Registration kind("adamw", [](const Binding& b) -> Launch {
  const Update u(b);
  const Attributes& a = u.attributes();
  const Settings s{u.scalars(), a.real("beta1"), a.real("beta2"),           a.real("epsilon"),
                   u.stream(0), u.stream(1),     GlobalIndex(u.parameter())};
  return with_type(u.gradient().dtype, [&](auto zero) -> Launch {
    using Gradient = decltype(zero);
    const auto bind = [&](auto moment) -> Launch {
      using Moment = decltype(moment);
      return [=, p = u.parameter<float>(), g = u.gradient<Gradient>(), m = u.state<Moment>(0), v = u.state<Moment>(1),
              n = u.count(), queue = u.queue()] {
        launch(update<Gradient, Moment>, adam_grid(blocks(n, kBlock * kEach)), kBlock, 0, queue, p, g, m, v, n, s);
      };
    };
    return u.state(0).dtype == DType::f32 ? bind(float{}) : bind(bf16{});
  });
});

// 1-bit Adam's steps with a frozen second moment: what crosses is the next first moment (adamw_kernel.h).
STRATA_KERNEL __launch_bounds__(kBlock) frozen_update(float* parameter, const float* exchanged, float* m,
                                                      const float* v, int64_t count, Settings s, double frozen) {
  if (s.skips()) return;
  const AdamRates rates = adam_rates(s, double(s.gradient_scale()), frozen);
  const float epsilon = float(s.epsilon);
  for (int64_t i = (int64_t(blockIdx.x) * kBlock + threadIdx.x) * kEach; i < count;
       i += int64_t(gridDim.x) * kBlock * kEach) {
    float p[kEach], first[kEach], second[kEach];
    load(static_cast<const float*>(parameter), i, count, p);
    load(exchanged, i, count, first);
    load(v, i, count, second);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const float under = rounded_sum(rounded_product(sqrtf(second[e]), rates.root), epsilon);
      p[e] = rounded_sum(rounded_product(p[e], rates.decay), -(rounded_product(rates.step_size, first[e]) / under));
    }
    store(parameter, i, count, p);
    store(m, i, count, first);
  }
}

const Registration frozen_kind("adamw_frozen", [](const Binding& b) -> Launch {
  const Update u(b);
  const Attributes& a = u.attributes();
  const Settings s{u.scalars(), a.real("beta1"), a.real("beta2"), a.real("epsilon"), 0, 0, GlobalIndex(u.parameter())};
  return [=, p = u.parameter<float>(), g = u.gradient<float>(), m = u.state<float>(0), v = u.state<float>(1),
          n = u.count(), frozen = double(a.integer("frozen")), queue = u.queue()] {
    launch(frozen_update, adam_grid(blocks(n, kBlock * kEach)), kBlock, 0, queue, p, g, m, v, n, s, frozen);
  };
});

struct Contribution {
  float of_moment, of_gradient;
  STRATA_DEVICE void operator()(const float (&x)[2], float (&y)[1], int64_t) const {
    y[0] = rounded_sum(rounded_product(of_moment, x[1]), rounded_product(of_gradient, x[0]));
  }
};

const Registration contribution_kind("adamw_contribution", [](const Binding& b) -> Launch {
  const float beta1 = float(b.attributes().real("beta1")), share = float(b.attributes().real("share"));
  return bind_apply<2, 1>(b, Contribution{beta1 * share, 1 - beta1});
});

}  // namespace
}  // namespace strata::cuda::adamw_kernels
