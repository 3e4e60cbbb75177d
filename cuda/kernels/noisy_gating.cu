// Routing by chance, and the losses of importance and load (engine/ops/noisy_gating.cpp), with the CPU's random
// numbers. Sums over tokens are made of parts in a fixed order.
#include "cuda/elementwise.h"
#include "cuda/philox.h"
#include "strata/layout.h"

namespace strata::cuda::noisy_gating_kernels {
namespace {

constexpr int kBlock = 128;

// The numbers of one op; seed and step are its last two inputs.
struct Draw {
  const double *seed, *step;
  uint64_t stream;
  int64_t first;       // element of this microbatch among the step's
  GlobalIndex global;  // of this rank's part in the microbatch
  explicit Draw(const Binding& b)
      : seed(b.in<double>(b.inputs() - 2)),
        step(b.in<double>(b.inputs() - 1)),
        stream(uint64_t(b.attributes().integer("stream"))),
        first(std::max(0, b.op().microbatch) * elements(b.output(0).full_shape())),
        global(b.output(0)) {}
  STRATA_DEVICE Words words(uint64_t block) const {
    return random_words(uint64_t(*seed), stream ^ (uint64_t(*step) * 0x9E3779B97F4A7C15ull), block);
  }
  STRATA_DEVICE double uniform(int64_t i) const {  // in [0, 1)
    const uint64_t at = uint64_t(first + global(i));
    return double(pick(words(at / 4), uint32_t(at % 4))) / 4294967296.0;
  }
  STRATA_DEVICE float normal(int64_t i) const {  // base/random.cpp
    const uint64_t at = uint64_t(first + global(i));
    const Words all = words(at / 4);
    const uint32_t pair = uint32_t(at % 4) / 2 * 2;
    const double u = (double(pick(all, pair)) + 0.5) / 4294967296.0;
    const double angle = 2 * 3.14159265358979323846 * (double(pick(all, pair + 1)) + 0.5) / 4294967296.0;
    const double radius = sqrt(-2 * log(u));
    return float(radius * (at % 2 == 0 ? cos(angle) : sin(angle)));
  }
};

STRATA_DEVICE float softplus(float x) { return (x > 0 ? x : 0.0f) + log1pf(expf(x < 0 ? x : -x)); }
STRATA_DEVICE float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }

struct Jitter {
  Draw draw;
  double epsilon;
  STRATA_DEVICE void operator()(const float (&x)[1], float (&y)[1], int64_t i) const {
    y[0] = x[0] * float(1 - epsilon + 2 * epsilon * draw.uniform(i));
  }
};
struct NoisyLogits {
  Draw draw;
  STRATA_DEVICE void operator()(const float (&x)[2], float (&y)[1], int64_t i) const {
    y[0] = x[0] + draw.normal(i) * softplus(x[1]);
  }
};
struct NoisyLogitsGradient {
  Draw draw;
  STRATA_DEVICE void operator()(const float (&x)[2], float (&y)[1], int64_t i) const {
    y[0] = x[0] * draw.normal(i) * logistic(x[1]);
  }
};

STRATA_KERNEL choose_second(const float* weights, const int32_t* choices, int32_t* out, int64_t count, Draw draw) {
  const int64_t i = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (i >= count) return;
  const bool stays = i % 2 == 0 || 2 * double(weights[i]) > draw.uniform(i);
  out[i] = stays ? choices[i] : -1;
}

// Of n sums x: their mean, the mean of squares, and the square of their coefficient of variation and its slope.
struct Variation {
  double mean, squares;
  int64_t n;
  STRATA_DEVICE Variation(const double* x, int64_t n) : mean(0), squares(0), n(n) {
    for (int64_t i = 0; i < n; ++i) mean += x[i] / double(n), squares += x[i] * x[i] / double(n);
  }
  STRATA_DEVICE double value() const { return squares / (mean * mean) - 1; }
  STRATA_DEVICE double slope(double x) const { return 2 / (double(n) * mean * mean) * (x - squares / mean); }
};

STRATA_KERNEL variation_loss(const double* sums, float* loss, int64_t experts, double scale) {
  *loss = float(scale * Variation(sums, experts).value());
}

// blockIdx.x: an expert, of which the threads sum the weights.
STRATA_KERNEL sum_importance(const float* weights, const int32_t* choices, double* sums, int64_t count) {
  __shared__ double parts[kBlock];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kBlock)
    if (choices[i] == int32_t(blockIdx.x)) sum += double(weights[i]);
  parts[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int p = 1; p < kBlock; ++p) sum += parts[p];
  sums[blockIdx.x] = sum;
}
STRATA_KERNEL importance_gradient(const int32_t* choices, const double* sums, const double* upstream, float* dw,
                                  int64_t count, int64_t experts, double scale) {
  __shared__ double shared[2];
  if (threadIdx.x == 0) {
    const Variation of(sums, experts);
    shared[0] = of.mean, shared[1] = of.squares;
  }
  __syncthreads();
  const int64_t i = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (i >= count) return;
  const double mean = shared[0], slope = 2 / (double(experts) * mean * mean) * (sums[choices[i]] - shared[1] / mean);
  dw[i] = float(scale * (upstream ? *upstream : 1.0) * slope);
}

int64_t importance_workspace(const OpView& v, int) { return v.attributes().integer("experts") * 8; }

Launch bind_importance(const Binding& b, bool gradient) {
  return [=, weights = b.in<float>(0), choices = b.in<int32_t>(1),
          upstream = gradient && b.has_input(2) ? b.in<double>(2) : nullptr, out = b.out<float>(0),
          sums = b.workspace<double>(), all = count(b.input(0)), experts = b.attributes().integer("experts"),
          scale = b.attributes().real("scale"), queue = b.queue()] {
    launch(sum_importance, dim3(unsigned(experts)), kBlock, 0, queue, weights, choices, sums, all);
    if (gradient)
      launch(importance_gradient, dim3(blocks(all, kBlock)), kBlock, 0, queue, choices, sums, upstream, out, all,
             experts, scale);
    else
      launch(variation_loss, dim3(1), 1, 0, queue, sums, out, experts, scale);
  };
}

// Of a row of noisy logits: what an expert's must be above to be chosen, the k-th largest of the others.
struct Thresholds {
  const int32_t* choices;
  int64_t k, last, next;
  STRATA_DEVICE Thresholds(const float* noisy, int64_t experts, const int32_t* choices, int64_t k)
      : choices(choices), k(k), last(choices[k - 1]), next(-1) {
    for (int64_t e = 0; e < experts; ++e)
      if (!chosen(e) && (next < 0 || noisy[e] > noisy[next])) next = e;
  }
  STRATA_DEVICE bool chosen(int64_t e) const {
    for (int64_t j = 0; j < k; ++j)
      if (choices[j] == e) return true;
    return false;
  }
  STRATA_DEVICE int64_t of(int64_t e) const { return chosen(e) ? next : last; }
};

struct Load {
  const float *clean, *spread, *noisy;
  const int32_t* choices;
  int64_t tokens, experts, k;
  explicit Load(const Binding& b)
      : clean(b.in<float>(0)),
        spread(b.in<float>(1)),
        noisy(b.in<float>(2)),
        choices(b.in<int32_t>(3)),
        tokens(b.rows(0)),
        experts(b.columns(0)),
        k(b.columns(3)) {}
};

// Of each expert what a block of tokens adds to the sum of the probability of being chosen.
STRATA_KERNEL sum_load(Load l, double* parts) {
  __shared__ int64_t last[kBlock], next[kBlock];
  const int64_t first = int64_t(blockIdx.x) * kBlock, n = l.tokens - first < kBlock ? l.tokens - first : kBlock;
  if (threadIdx.x < n) {
    const int64_t t = first + threadIdx.x;
    const Thresholds of(l.noisy + t * l.experts, l.experts, l.choices + t * l.k, l.k);
    last[threadIdx.x] = of.last, next[threadIdx.x] = of.next;
  }
  __syncthreads();
  for (int64_t e = threadIdx.x; e < l.experts; e += kBlock) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t t = first + i, at = t * l.experts;
      bool chosen = false;
      for (int64_t j = 0; j < l.k; ++j) chosen = chosen || l.choices[t * l.k + j] == e;
      const float above = l.noisy[at + (chosen ? next[i] : last[i])];
      const double z = double(l.clean[at + e] - above) / double(softplus(l.spread[at + e]));
      sum += 0.5 * erfc(-z / 1.41421356237309504880);
    }
    parts[blockIdx.x * l.experts + e] = sum;
  }
}
STRATA_KERNEL add_load(double* parts, int64_t count, int64_t experts) {
  const int64_t e = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (e >= experts) return;
  for (int64_t p = 1; p < count; ++p) parts[e] += parts[p * experts + e];
}

// A thread a token.
STRATA_KERNEL load_gradient(Load l, const double* sums, const double* upstream, float* dclean, float* dspread,
                            float* dnoisy, double scale) {
  const int64_t t = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (t >= l.tokens) return;
  const int64_t row = t * l.experts;
  const float *clean = l.clean + row, *spread = l.spread + row, *noisy = l.noisy + row;
  dclean += row, dspread += row, dnoisy += row;
  const Variation variation(sums, l.experts);
  const Thresholds thresholds(noisy, l.experts, l.choices + t * l.k, l.k);
  const double factor = scale * (upstream ? *upstream : 1.0);
  for (int64_t e = 0; e < l.experts; ++e) dnoisy[e] = 0;
  for (int64_t e = 0; e < l.experts; ++e) {
    const int64_t above = thresholds.of(e);
    const double width = double(softplus(spread[e])), z = double(clean[e] - noisy[above]) / width;
    const double density = exp(-0.5 * z * z) / 2.50662827463100050242;
    const double slope = factor * variation.slope(sums[e]) * density / width;
    dclean[e] = float(slope);
    dspread[e] = float(-slope * z * double(logistic(spread[e])));
    dnoisy[above] -= float(slope);
  }
}

int64_t load_workspace(const OpView& v, int) { return int64_t(blocks(v.rows(0), kBlock)) * v.columns(0) * 8; }

Launch bind_load(const Binding& b, bool gradient) {
  const Load load(b);
  return [=, upstream = gradient && b.has_input(4) ? b.in<double>(4) : nullptr, out = b.out<float>(0),
          dspread = gradient ? b.out<float>(1) : nullptr, dnoisy = gradient ? b.out<float>(2) : nullptr,
          parts = b.workspace<double>(), scale = b.attributes().real("scale"), queue = b.queue()] {
    const unsigned count = blocks(load.tokens, kBlock);
    launch(sum_load, dim3(count), kBlock, 0, queue, load, parts);
    launch(add_load, dim3(blocks(load.experts, kBlock)), kBlock, 0, queue, parts, int64_t(count), load.experts);
    if (gradient)
      launch(load_gradient, dim3(count), kBlock, 0, queue, load, parts, upstream, out, dspread, dnoisy, scale);
    else
      launch(variation_loss, dim3(1), 1, 0, queue, parts, out, load.experts, scale);
  };
}

const Registration kinds[] = {
    {"jitter",
     [](const Binding& b) {
       return bind_apply<1, 1>(b, Jitter{Draw(b), b.attributes().real("epsilon")});
     }},
    {"noisy_logits", [](const Binding& b) { return bind_apply<2, 1>(b, NoisyLogits{Draw(b)}); }},
    {"noisy_logits_gradient", [](const Binding& b) { return bind_apply<2, 1>(b, NoisyLogitsGradient{Draw(b)}); }},
    {"second_by_chance",
     [](const Binding& b) -> Launch {
       return [weights = b.in<float>(0), choices = b.in<int32_t>(1), out = b.out<int32_t>(0), all = count(b.input(0)),
               draw = Draw(b), queue = b.queue()] {
         launch(choose_second, dim3(blocks(all, kBlock)), kBlock, 0, queue, weights, choices, out, all, draw);
       };
     }},
    {"importance_loss", [](const Binding& b) { return bind_importance(b, false); }, importance_workspace},
    {"importance_loss_gradient", [](const Binding& b) { return bind_importance(b, true); }, importance_workspace},
    {"load_loss", [](const Binding& b) { return bind_load(b, false); }, load_workspace},
    {"load_loss_gradient", [](const Binding& b) { return bind_load(b, true); }, load_workspace}};

}  // namespace
}  // namespace strata::cuda::noisy_gating_kernels
