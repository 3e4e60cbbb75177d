// ZB-H1 and ZB-H2 (Qi et al., arXiv 2401.10241, section 2): 1F1B whose weight gradients, for which nobody waits, are
// made later and fill the bubbles. With forward pass F, input gradient B and weight gradient W the bubble is
// (P - 1)(F + B - W) for H1, a third of 1F1B's where all three take the same, and every stage keeps at most P
// microbatches. H2 begins more microbatches before the first backward pass: (P - 1)(F + B - 2 W), none where all take
// the same (and M >= 2 P - 1), and at most 2 P - 1 microbatches. It is a step from its stage's own first pass to its
// last: the next one begins before the last stage has ended this one.
#include <algorithm>

#include "plugins/pipeline/schedules/schedules.h"

namespace strata::pipeline {
namespace {

// `ahead`: microbatches begun before the first one is ended; `late`: weight gradients that wait until the end.
std::vector<Pass> order_of(int microbatches, int ahead, int late) {
  std::vector<Pass> order;
  int forwards = 0, weights = 0;
  for (; forwards < std::min(ahead, microbatches); ++forwards) order.push_back(forward_pass(0, forwards));
  for (int m = 0; m < microbatches; ++m) {
    if (forwards < microbatches) order.push_back(forward_pass(0, forwards++));
    order.push_back(input_gradient(0, m));
    if (m >= late) order.push_back(weight_gradient(0, weights++));
  }
  while (weights < microbatches) order.push_back(weight_gradient(0, weights++));
  return order;
}

Schedule with(const Problem& problem, int times) {
  Schedule schedule{.stage_of = round_robin(problem.stages, 1)};
  for (int stage = 0; stage < problem.stages; ++stage)
    schedule.order.push_back(order_of(problem.microbatches, times * (problem.stages - 1 - stage), times * stage));
  return schedule;
}

}  // namespace

Schedule zero_bubble_h1(const Problem& problem) {
  require_chunks(problem, "zero_bubble_h1", 1);
  return with(problem, 1);
}

Schedule zero_bubble_h2(const Problem& problem) {
  require_chunks(problem, "zero_bubble_h2", 1);
  return with(problem, 2);
}

}  // namespace strata::pipeline
