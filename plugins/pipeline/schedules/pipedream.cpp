// PipeDream with weight stashing (Harlap et al., arXiv 1806.03377, section 3): one forward pass, one backward pass, and
// no flush at a step's end. A stage leaves to the next step the backward passes of as many microbatches as there are
// stages after it; each reads the parameters that its forward pass has read, which are kept for it. So a stage's update
// is of the last M microbatches that have come back to it, some of the step before; there is no bubble, and stage p
// keeps the activations of P - p microbatches, as in 1F1B. A microbatch reads the parameters of one and the same step
// on all stages (the paper's vertical sync), as they are updated once a step. What is left is left for one step alone,
// and in the first step each stage has something to update with, so that M must be P at least.
#include "plugins/pipeline/schedules/schedules.h"

namespace strata::pipeline {

Schedule pipedream(const Problem& problem) {
  require_chunks(problem, "pipedream", 1);
  require_microbatches(problem, "pipedream", problem.stages);
  return without_flush(problem);
}

}  // namespace strata::pipeline
