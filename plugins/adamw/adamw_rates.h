// Numbers of a step of Adam in f64, for its kernels on the GPU: powers in f64 take a GPU longer than the rest of an
// update, so one thread of a block makes them, and a block goes on where others have ended.
#pragma once
#include <algorithm>

#include "cuda/bind.h"

namespace strata::cuda {

struct AdamRates {
  float step_size, root, decay;
};

// By a block of at least 64 threads, all of which get them. `s`: scalars of an update (strata/optimizer.h) with beta1
// and beta2; `gradient_scale`: what the first moment still lacks; `exponent`: of the second moment's correction.
template <class Settings>
STRATA_DEVICE AdamRates adam_rates(const Settings& s, double gradient_scale, double exponent) {
  __shared__ AdamRates rates;
  if (threadIdx.x == 0) {
    const double rate = s.rate();
    rates.step_size = float(rounded_product(rate, gradient_scale) / (1 - pow(s.beta1, s.step())));
    rates.decay = float(1 - rounded_product(rate, s.weight_decay));
  }
  if (threadIdx.x == 32) rates.root = float(1 / sqrt(1 - pow(s.beta2, exponent)));
  __syncthreads();
  return rates;
}

// Blocks for so many pieces of work: at most eight for each multiprocessor of the largest GPUs.
inline dim3 adam_grid(int64_t pieces) { return dim3(unsigned(std::min<int64_t>(1056, pieces))); }

}  // namespace strata::cuda
