// One forward, one backward (PipeDream-flush; Narayanan et al., arXiv 2006.09503, section 3.2): a stage begins as many
// microbatches as there are stages from it to the last, then ends one for each that it begins. Bubble (P - 1) / M;
// stage p keeps the activations of P - p microbatches.
#include <algorithm>

#include "plugins/pipeline/schedules/schedules.h"

namespace strata::pipeline {

Schedule one_forward_one_backward(const Problem& problem) {
  require_chunks(problem, "1f1b", 1);
  Schedule schedule{.stage_of = round_robin(problem.stages, 1)};
  for (int stage = 0; stage < problem.stages; ++stage) {
    const int ahead = std::min(problem.microbatches, problem.stages - 1 - stage);
    std::vector<Pass> order;
    for (int m = 0; m < ahead; ++m) order.push_back(forward_pass(0, m));
    for (int m = 0; m < problem.microbatches; ++m) {
      if (m + ahead < problem.microbatches) order.push_back(forward_pass(0, m + ahead));
      order.push_back(backward_pass(0, m));
    }
    schedule.order.push_back(std::move(order));
  }
  return schedule;
}

}  // namespace strata::pipeline
