// PipeDream with weight stashing (Harlap et al., arXiv 1806.03377, section 3): one forward pass, one backward pass, and
// no flush at a step's end. A stage leaves to the next step the backward passes of as many microbatches as there are
// stages after it; each reads the parameters that its forward pass has read, which are kept for it. So a stage's update
// is of the last M microbatches that have come back to it, some of the step before; there is no bubble, and stage p
// keeps the activations of P - p microbatches, as in 1F1B. What is left is left for one step alone, so that M must be
// P - 1 at least; the paper's M = 1 is two stages here.
#include "plugins/pipeline/schedules/schedules.h"

namespace strata::pipeline {

Schedule pipedream(const Problem& problem) {
  require_chunks(problem, "pipedream", 1);
  require_microbatches(problem, "pipedream", problem.stages - 1);
  Schedule schedule{.stage_of = round_robin(problem.stages, 1)};
  for (int stage = 0; stage < problem.stages; ++stage) {
    const int left = problem.stages - 1 - stage;
    std::vector<Pass> order;
    for (int m = 0; m < problem.microbatches; ++m) {
      order.push_back(forward_pass(0, m));
      order.push_back(backward_pass(0, m - left));
    }
    schedule.first.push_back(without_begun(order));
    schedule.order.push_back(std::move(order));
  }
  return schedule;
}

}  // namespace strata::pipeline
