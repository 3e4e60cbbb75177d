// Decisions that budgets do not ask for; see decisions_at_start.h.
#include "engine/planning/decisions_at_start.h"

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

int64_t kept_bytes(const Program& program, int32_t tensor, int form) {
  int64_t bytes = 0;
  for (const Op& op : program.forms.at(tensor)[size_t(form)].rest)
    for (TensorId id : op.outputs) bytes += program[id].bytes();
  return bytes;
}

Decisions decisions_at_start(const Program& program, const Uses& all, const Homes& homes) {
  Decisions decisions;
  for (int32_t t = 0; t < int32_t(program.tensors.size()); ++t) {
    const Tensor& tensor = program.tensors[t];
    const auto& uses = all.of[t];
    const auto forms = program.forms.find(t);
    int always = -1, between = -1;
    if (forms != program.forms.end())
      for (int f = 0; f < int(forms->second.size()); ++f) {
        using When = RestingForm::When;
        const When when = forms->second[size_t(f)].when;
        if (when == When::after_forward && (always < 0 || kept_bytes(program, t, f) < kept_bytes(program, t, always)))
          always = f;
        if (when == When::between_blocks || (when == When::unless_budget && homes.budget(Tier::device) <= 0))
          between = f;
      }
    const Tier tier = homes.away_tier(tensor);
    const bool moves = movable(tensor) && tier != Tier::device && !tensor.step_output;
    if (always < 0 && between < 0 && !moves) continue;
    for (size_t u = 0; u < uses.size(); ++u) {
      const bool last = u + 1 == uses.size();
      const bool leaves_forward = program.ops[uses[u]].step_part == StepPart::forward &&
                                  (last || program.ops[uses[u + 1]].step_part != StepPart::forward);
      if (between >= 0) {
        if (!last && all.visit[uses[u + 1]] - all.visit[uses[u]] > 1)
          decisions[{t, uses[u + 1]}] = {between, Tier::device, false};
      } else if (always >= 0) {
        const bool nothing_kept = forms->second[always].rest.empty();
        if (leaves_forward && (!last || nothing_kept))
          decisions[{t, last ? kNever : uses[u + 1]}] = {
              always, homes.budget(Tier::device) > 0 || tensor.farthest == Tier::device ? Tier::device : tier, true};
      } else if (!last && homes.budget(Tier::device) <= 0 && all.visit[uses[u + 1]] - all.visit[uses[u]] > 1) {
        decisions[{t, uses[u + 1]}] = {-1, tier, false};
      }
    }
  }
  return decisions;
}

}  // namespace strata
