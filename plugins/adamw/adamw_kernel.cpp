// The vectorized pass of AdamW (adamw_kernel.h). Memory-bound: 16 bytes read and 12 written an element. The lines
// written were just read, so ordinary stores cost no extra fetch and non-temporal ones gain nothing.
#include "plugins/adamw/adamw_kernel.h"

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

}  // namespace strata::adamw
