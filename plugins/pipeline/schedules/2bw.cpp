// PipeDream-2BW (Narayanan et al., arXiv 2006.09503, section 3.1): one forward pass, one backward pass, and no flush at
// a step's end. A stage leaves to the next step the backward passes of as many microbatches as there are stages after
// it, and the sums of gradients so far; they read the parameters that their forward passes have read, of which a copy
// is kept, and the update at the end of the next step is of all microbatches of the step before and no others: W(t + 1)
// = W(t) - f'(W(t - 1)). No bubble, P - p microbatches on stage p.
//   What is left is left for one step alone. With fewer microbatches than P - 1 all backward passes of a step therefore
// run in the next one: the same update, with half the bubble of a flush and up to M + P - 1 microbatches. Early stages
// then begin with forward passes and late ones with backward passes, as both come from the ends.
#include <cstdlib>

#include "plugins/pipeline/schedules/schedules.h"

namespace strata::pipeline {

namespace {

Schedule from_both_ends(const Problem& problem) {
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

}  // namespace

Schedule two_buffered_weights(const Problem& problem) {
  require_chunks(problem, "2bw", 1);
  Schedule schedule = problem.microbatches >= problem.stages - 1 ? without_flush(problem) : from_both_ends(problem);
  schedule.sums_go_on = true;
  return schedule;
}

}  // namespace strata::pipeline
