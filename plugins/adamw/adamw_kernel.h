// AdamW's update over plain arrays: one pass over memory. Not the plugin, and no allocation of states.
// Loshchilov and Hutter, "Decoupled weight decay regularization", arXiv 1711.05101, in the form of torch.optim.AdamW.
#pragma once
#include <cmath>
#include <cstdint>

#include "strata/layout.h"
#include "strata/threads.h"

namespace strata::adamw {

struct Settings {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double learning_rate = 3e-4;  // of this step, with the schedule's factor in it
  double weight_decay = 0.1;
  double gradient_scale = 1;  // multiplies the gradient as it is read
};

// What one element needs, computed in double once a step.
template <class T>
struct Factors {
  T gradient_scale, weight1, beta2, weight2, decay, step_size, inverse_root, epsilon;
};

// `step` counts from 1.
template <class T>
Factors<T> factors(const Settings& s, double step) {
  const double correction1 = 1 - std::pow(s.beta1, step), correction2 = 1 - std::pow(s.beta2, step);
  return {T(s.gradient_scale),
          T(1 - s.beta1),
          T(s.beta2),
          T(1 - s.beta2),
          T(1 - s.learning_rate * s.weight_decay),
          T(s.learning_rate / correction1),
          T(1 / std::sqrt(correction2)),
          T(s.epsilon)};
}

// parameter, gradient, m (first moment), v (second moment): `count` elements each; all but the gradient are updated.
void update(Threads& threads, float* parameter, const float* gradient, float* m, float* v, int64_t count,
            const Factors<float>& factors);

// How moments are rounded to bf16: stochastically, keyed by the run's seed, a stream for each tensor and step, and the
// global index of the elements.
struct Rounding {
  uint64_t seed = 0, m_stream = 0, v_stream = 0;
  GlobalIndex global{};
};
// The same with a gradient and moments that may be of 16 bits, each of one type.
void update(Threads& threads, float* parameter, const void* gradient, DType gradient_type, void* m, void* v,
            DType moment_type, int64_t count, const Factors<float>& factors, const Rounding& rounding);

// The same, plainly, term by term as torch.optim.AdamW writes it.
template <class T>
void reference_update(T* parameter, const T* gradient, T* m, T* v, int64_t count, const Settings& s, double step) {
  const T step_size = T(s.learning_rate / (1 - std::pow(s.beta1, step)));
  const T root = T(std::sqrt(1 - std::pow(s.beta2, step)));
  for (int64_t i = 0; i < count; ++i) {
    const T g = gradient[i] * T(s.gradient_scale);
    parameter[i] *= T(1 - s.learning_rate * s.weight_decay);
    m[i] += T(1 - s.beta1) * (g - m[i]);
    v[i] = T(s.beta2) * v[i] + T(1 - s.beta2) * g * g;
    parameter[i] -= step_size * m[i] / (std::sqrt(v[i]) / root + T(s.epsilon));
  }
}

// The compressed stage of 1-bit Adam (Tang et al., arXiv 2102.02888, algorithm 1): ranks exchange momentum, and the
// second moment stays as it was at the end of step `frozen`. What a rank adds to the next first moment: its part of the
// old one, of which all have the same, and its gradient.
template <class T>
T contribution(T m, T gradient, T beta1, T share) {
  return beta1 * share * m + (1 - beta1) * gradient;
}
// With Adam's corrections, which the paper leaves out: they are 1 where a warm-up is as long as it should be.
template <class T>
struct FrozenFactors {
  T decay, step_size, inverse_root, epsilon;
};
template <class T>
FrozenFactors<T> frozen_factors(const Settings& s, double step, double frozen) {
  return {T(1 - s.learning_rate * s.weight_decay),
          T(s.learning_rate * s.gradient_scale / (1 - std::pow(s.beta1, step))),
          T(1 / std::sqrt(1 - std::pow(s.beta2, frozen))), T(s.epsilon)};
}
// `exchanged`: the sum of all contributions, which becomes m.
template <class T>
void frozen_update(T* parameter, const T* exchanged, T* m, const T* v, int64_t begin, int64_t end,
                   const FrozenFactors<T>& f) {
  for (int64_t i = begin; i < end; ++i) {
    m[i] = exchanged[i];
    parameter[i] = parameter[i] * f.decay - f.step_size * m[i] / (std::sqrt(v[i]) * f.inverse_root + f.epsilon);
  }
}

}  // namespace strata::adamw
