// One pass over the program; see uses.h.
#include "engine/planning/uses.h"

#include <tuple>

namespace strata {

Uses::Uses(const Program& program) : of(program.tensors.size()), visit(program.ops.size()) {
  const auto in_pass = [](const Op& op) {
    return op.step_part == StepPart::forward || op.step_part == StepPart::backward;
  };
  const Op* before = nullptr;
  for (int32_t i = 0, count = 0; i < int32_t(program.ops.size()); ++i) {
    const Op& op = program.ops[i];
    if (in_pass(op)) {
      if (before && std::tie(op.block, op.microbatch, op.step_part) !=
                        std::tie(before->block, before->microbatch, before->step_part))
        ++count;
      before = &op;
    }
    visit[i] = count;
    for (const auto* list : {&op.inputs, &op.outputs})
      for (TensorId id : *list)
        if (auto* uses = id ? &of[program.whole(id).value] : nullptr; uses && (uses->empty() || uses->back() != i))
          uses->push_back(i);
  }
}

}  // namespace strata
