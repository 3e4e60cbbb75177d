// The vectorized pass of AdamW (adamw_kernel.h). Memory-bound: 16 bytes read and 12 written an element. The lines
// written were just read, so ordinary stores cost no extra fetch and non-temporal ones gain nothing.
#include "plugins/adamw/adamw_kernel.h"

#include <algorithm>

#include "strata/convert.h"
#include "strata/simd.h"

namespace strata::adamw {
namespace {

STRATA_SIMD void update_range(float* parameter, const float* gradient, float* m, float* v, int64_t count,
                              const Factors<float>& factors) {
  const Factors<float> f = factors;  // a copy: stores through the pointers cannot change it
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const float g = gradient[i] * f.gradient_scale;
    const float first = m[i] + f.weight1 * (g - m[i]);
    const float second = f.beta2 * v[i] + f.weight2 * g * g;
    m[i] = first;
    v[i] = second;
    parameter[i] = parameter[i] * f.decay - f.step_size * first / (std::sqrt(second) * f.inverse_root + f.epsilon);
  }
}

}  // namespace

void update(Threads& threads, float* parameter, const float* gradient, float* m, float* v, int64_t count,
            const Factors<float>& factors) {
  constexpr int64_t kGrain = 4096;  // elements: below this another thread costs more than it saves
  threads.split(count, kGrain, [&](int64_t begin, int64_t end) {
    update_range(parameter + begin, gradient + begin, m + begin, v + begin, end - begin, factors);
  });
}

void update(Threads& threads, float* parameter, const void* gradient, DType gradient_type, void* m, void* v,
            DType moment_type, int64_t count, const Factors<float>& factors, const Rounding& rounding) {
  constexpr int64_t kChunk = 1024;  // of each, as f32 in the first cache
  threads.split(count, 4 * kChunk, [&](int64_t begin, int64_t end) {
    float g[kChunk], first[kChunk], second[kChunk];
    for (int64_t i = begin; i < end; i += kChunk) {
      const int64_t some = std::min(kChunk, end - i);
      to_f32(gradient_type, at(gradient, gradient_type, i), g, some);
      if (moment_type == DType::f32) {
        update_range(parameter + i, g, static_cast<float*>(m) + i, static_cast<float*>(v) + i, some, factors);
        continue;
      }
      to_f32(moment_type, at(m, moment_type, i), first, some);
      to_f32(moment_type, at(v, moment_type, i), second, some);
      update_range(parameter + i, g, first, second, some, factors);
      rounding.global.runs(i, i + some, [&](int64_t local, int64_t index, int64_t run) {
        to_bf16_stochastically(first + (local - i), static_cast<uint16_t*>(m) + local, run, rounding.seed,
                               rounding.m_stream, index);
        to_bf16_stochastically(second + (local - i), static_cast<uint16_t*>(v) + local, run, rounding.seed,
                               rounding.v_stream, index);
      });
    }
  });
}

}  // namespace strata::adamw
