// Breadth-first (Lamy-Poirier, arXiv 2211.05953): a microbatch goes around the stages once a chunk, as in interleaved,
// but a stage runs all microbatches of a chunk before the next chunk. Bubble (P - 1) / (V M), where there are as many
// microbatches as stages; every stage keeps the activations of all microbatches. A parameter is read, and its gradient
// done, in one piece of the step: the order for parameters that are split or offloaded.
#include "plugins/pipeline/schedules/schedules.h"

namespace strata::pipeline {

Schedule breadth_first(const Problem& problem) {
  std::vector<Pass> order;
  for (int c = 0; c < problem.chunks; ++c)
    for (int m = 0; m < problem.microbatches; ++m) order.push_back(forward_pass(c, m));
  for (int c = problem.chunks; c-- > 0;)
    for (int m = 0; m < problem.microbatches; ++m) order.push_back(backward_pass(c, m));
  return {.stage_of = round_robin(problem.stages, problem.chunks),
          .order = std::vector<std::vector<Pass>>(size_t(problem.stages), order)};
}

}  // namespace strata::pipeline
