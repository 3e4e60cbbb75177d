// The update rule of PipeDream-2BW (Narayanan et al., arXiv 2006.09503, section 3.1), W(t + 1) = W(t) - f'(W(t - 1)),
// without flush: all backward passes of a step's microbatches run in the next step, on the parameters that their
// forward passes have read, and that step's update takes their gradients and no others. The paper's own order sums a
// gradient over the end of a step, which programs of steps cannot; it keeps P - p microbatches without a bubble. This
// one keeps up to M + P - 1, with half the bubble of a flush. Early stages begin with forward passes and late ones with
// backward passes, as both come from the ends.
#include <cstdlib>

#include "plugins/pipeline/schedules/schedules.h"

namespace strata::pipeline {

Schedule two_buffered_weights(const Problem& problem) {
  require_chunks(problem, "2bw", 1);
  const int microbatches = problem.microbatches;
  Schedule schedule{.stage_of = round_robin(problem.stages, 1)};
  for (int stage = 0; stage < problem.stages; ++stage) {
    const int lead = problem.stages - 1 - 2 * stage;  // of forward passes, or if negative, of backward passes
    std::vector<Pass> order;
    int forwards = 0, backwards = 0;
    const auto forward = [&] {
      if (forwards < microbatches) order.push_back(forward_pass(0, forwards++));
    };
    const auto backward = [&] {
      if (backwards < microbatches) order.push_back(backward_pass(0, backwards++ - microbatches));
    };
    for (int i = 0; i < std::abs(lead); ++i) lead > 0 ? forward() : backward();
    while (forwards < microbatches || backwards < microbatches) {
      lead > 0 ? backward() : forward();
      lead > 0 ? forward() : backward();
    }
    schedule.first.push_back(without_begun(order));
    schedule.order.push_back(std::move(order));
  }
  return schedule;
}

}  // namespace strata::pipeline
