// Post-validation (Qi et al., arXiv 2401.10241, section 4): no update waits for what all programs of a job sum
// together, such as the norm of all gradients. A step ends with updates as if that made no difference, of a copy that
// its passes read; the next step begins with some of its passes, learns the sum, and makes the right updates from the
// gradients that were kept. Where they are others, it runs those passes again. So every step computes what it would
// have. All of it follows from who reads what: nothing here knows clipping, optimizers or pipelines.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "strata/mesh.h"
#include "strata/stages.h"

namespace strata {

// What runs before a step knows whether the updates that it begins with are right: forward passes, and what is received
// for such passes.
struct PassesAhead {
  std::vector<Pass> passes{}, receives{};
};

struct UpdatesAhead {
  // What is left of a step when no other follows at once: the right updates, and nothing else. Before anybody but the
  // next step looks at parameters and states. Running it again changes nothing.
  Program settling;
  std::vector<std::string> late;  // step outputs that are those of the step before
};

// Rewrites the program of a step, as all plugins have left it. `factors`: what updates multiply gradients by
// (Gradient::scale). None where no update waits. Throws Error for what cannot be known a step late.
std::optional<UpdatesAhead> update_ahead(Program& step, const PassesAhead& passes, const std::vector<TensorId>& factors,
                                         const Mesh& mesh);

}  // namespace strata
