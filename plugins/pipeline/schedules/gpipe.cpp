// GPipe (Huang et al., arXiv 1811.06965): all forward passes, then all backward passes. Bubble (P - 1) / M; every stage
// keeps the activations of all microbatches. Backward passes come in the order of microbatches, in which one rank would
// sum gradients; the paper's order, last first, takes as long and keeps as much.
#include "plugins/pipeline/schedules/schedules.h"

namespace strata::pipeline {

Schedule gpipe(const Problem& problem) {
  require_chunks(problem, "gpipe", 1);
  std::vector<Pass> order;
  for (int m = 0; m < problem.microbatches; ++m) order.push_back(forward_pass(0, m));
  for (int m = 0; m < problem.microbatches; ++m) order.push_back(backward_pass(0, m));
  return {.stage_of = round_robin(problem.stages, 1),
          .order = std::vector<std::vector<Pass>>(size_t(problem.stages), order)};
}

}  // namespace strata::pipeline
