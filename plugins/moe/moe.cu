// What the plugin counts and sums, on the GPU (report.cpp, bias.cpp): small, one input after the other, so that any
// number of them will do.
#include <vector>

#include "cuda/bind.h"

namespace strata::cuda::moe_kernels {
namespace {

constexpr int kBlock = 128;

STRATA_KERNEL fill(double* out, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (i < count) out[i] = 0;
}
template <class T>
STRATA_KERNEL add_loss(const T* loss, double* sum) {
  *sum += double(*loss);
}

STRATA_KERNEL rows_of(const int32_t* offsets, double* counts, int64_t experts) {
  const int64_t e = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (e < experts) counts[e] = double(offsets[e + 1] - offsets[e]);
}

Launch bind_tally(const Binding& b) {
  const int losses = int(b.attributes().integer("losses"));
  std::vector<const float*> loss;
  for (int i = 0; i < losses; ++i) loss.push_back(b.in<float>(i));
  return [=, offsets = b.in<int32_t>(losses), sum = b.out<double>(0), counts = b.out<double>(1),
          experts = count(b.output(1)), queue = b.queue()] {
    launch(fill, dim3(1), kBlock, 0, queue, sum, int64_t(1));
    for (const float* one : loss) launch(add_loss<float>, dim3(1), 1, 0, queue, one, sum);
    launch(rows_of, dim3(blocks(experts, kBlock)), kBlock, 0, queue, offsets, counts, experts);
  };
}

// The dropped share of `choices`, and the load of the busiest expert.
STRATA_KERNEL add_counts(const double* counts, double* dropped, double* load, int64_t experts, double choices,
                         double share) {
  double most = 0, all = 0;
  for (int64_t e = 0; e < experts; ++e) {
    all += counts[e];
    most = counts[e] > most ? counts[e] : most;
  }
  *dropped += (1 - all / choices) * share;
  *load += most / choices * double(experts) * share;
}

Launch bind_report(const Binding& b) {
  const int64_t losses = b.attributes().integer("losses");
  std::vector<const double*> loss, counts;
  for (int i = 0; i < b.inputs(); ++i) (i < losses ? loss : counts).push_back(b.in<double>(i));
  return
      [=, sum = b.out<double>(0), dropped = b.out<double>(1), load = b.out<double>(2),
       experts = counts.empty() ? int64_t(0) : count(b.input(int(losses))),
       choices = double(b.attributes().integer("choices")), share = b.attributes().real("share"), queue = b.queue()] {
        for (double* out : {sum, dropped, load}) launch(fill, dim3(1), kBlock, 0, queue, out, int64_t(1));
        for (const double* one : loss) launch(add_loss<double>, dim3(1), 1, 0, queue, one, sum);
        for (const double* one : counts)
          launch(add_counts, dim3(1), 1, 0, queue, one, dropped, load, experts, choices, share);
      };
}

STRATA_KERNEL add_load(const double* counts, double* out, int64_t experts, double even) {
  const int64_t e = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (e < experts) out[e] += counts[e] * even;
}

Launch bind_load(const Binding& b) {
  const int64_t experts = b.attributes().integer("experts");
  const std::string rows = b.attributes().string("rows");
  std::vector<std::pair<const double*, double*>> added;
  size_t at = 0;
  for (int i = 0; i < b.inputs(); ++i) {
    added.emplace_back(b.in<double>(i), b.out<double>(0) + std::stoll(rows.substr(at)) * experts);
    at = rows.find(' ', at) + 1;
  }
  const double even = double(experts) / double(b.attributes().integer("choices")) * b.attributes().real("share");
  return [=, out = b.out<double>(0), all = count(b.output(0)), queue = b.queue()] {
    launch(fill, dim3(blocks(all, kBlock)), kBlock, 0, queue, out, all);
    for (const auto& [counts, row] : added)
      launch(add_load, dim3(blocks(experts, kBlock)), kBlock, 0, queue, counts, row, experts, even);
  };
}

// blockIdx.x: an expert.
STRATA_KERNEL count_choices(const int32_t* choices, double* counts, int64_t count) {
  __shared__ float scratch[32];
  float mine = 0;  // below 2^24: whole numbers
  double all = 0;
  for (int64_t i = threadIdx.x; i < count; i += kBlock) mine += choices[i] == int32_t(blockIdx.x) ? 1.0f : 0.0f;
  all = double(block_sum(mine, scratch));
  if (threadIdx.x == 0) counts[blockIdx.x] += all;
}

Launch bind_counts(const Binding& b) {
  return [choices = b.in<int32_t>(0), all = count(b.input(0)), adds = b.accumulates(0), out = b.out<double>(0),
          experts = count(b.output(0)), queue = b.queue()] {
    if (!adds) launch(fill, dim3(blocks(experts, kBlock)), kBlock, 0, queue, out, experts);
    launch(count_choices, dim3(unsigned(experts)), kBlock, 0, queue, choices, out, all);
  };
}

STRATA_KERNEL step_bias(const float* bias, const double* counts, float* out, int64_t experts, float rate) {
  double mean = 0;
  for (int64_t e = 0; e < experts; ++e) mean += counts[e] / double(experts);
  for (int64_t e = threadIdx.x; e < experts; e += kBlock)
    out[e] = bias[e] + (counts[e] < mean ? rate : counts[e] > mean ? -rate : 0.0f);
}

const Registration kinds[] = {{"expert_tally", bind_tally},
                              {"expert_report", bind_report},
                              {"expert_load", bind_load},
                              {"expert_counts", bind_counts},
                              {"balance_bias", [](const Binding& b) -> Launch {
                                 return [bias = b.in<float>(0), counts = b.in<double>(1), out = b.out<float>(0),
                                         experts = count(b.input(0)), rate = float(b.attributes().real("rate")),
                                         queue = b.queue()] {
                                   launch(step_bias, dim3(1), kBlock, 0, queue, bias, counts, out, experts, rate);
                                 };
                               }}};

}  // namespace
}  // namespace strata::cuda::moe_kernels
