// One pass over the program; see uses.h.
#include "engine/planning/uses.h"

#include <algorithm>
#include <tuple>

namespace strata {

namespace {

// Whether passes are of a block each. Then what lies before the first block and behind the last belongs to theirs: it
// comes again with the next microbatch.
bool passes_are_blocks(const Program& program) {
  std::vector<int> block;  // by chunk
  for (const Op& op : program.ops) {
    if (op.microbatch < 0 || op.chunk < 0) continue;
    if (size_t(op.chunk) >= block.size()) block.resize(size_t(op.chunk) + 1, -1);
    int& known = block[size_t(op.chunk)];
    if (op.block >= 0 && known >= 0 && known != op.block) return false;
    known = std::max(known, int(op.block));
  }
  return block.size() > 1;
}

// Sums and exchanges of gradients, which come between passes as soon as they can.
bool only_of_gradients(const Program& program, const Op& op) {
  return op.block < 0 && std::all_of(op.inputs.begin(), op.inputs.end(),
                                     [&](TensorId id) { return !id || program[id].role == Role::gradient; });
}

}  // namespace

Uses::Uses(const Program& program)
    : of(program.tensors.size()),
      visit(program.ops.size()),
      whole_visit(program.ops.size()),
      forms(program.tensors.size()),
      restores(program.tensors.size()) {
  const bool by_chunk = passes_are_blocks(program);
  const auto place = [&](const Op& op) {  // at the last block a microbatch turns back at once
    return by_chunk ? std::tuple(int(op.chunk), int(op.microbatch), StepPart::forward)
                    : std::tuple(int(op.block), int(op.microbatch), op.step_part);
  };
  const auto in_pass = [&](const Op& op) {  // nor what comes once a step, such as gathers of parameters
    return (op.step_part == StepPart::forward || op.step_part == StepPart::backward) &&
           (!by_chunk || (op.microbatch >= 0 && !only_of_gradients(program, op)));
  };
  const auto is_amid = [&](const Op& op, const Op* before) {
    return before && op.step_part == before->step_part &&
           ((op.microbatch < 0 && op.block == before->block) || only_of_gradients(program, op));
  };
  const Op *before = nullptr, *begun = nullptr;
  for (int32_t i = 0, count = 0, whole = 0; i < int32_t(program.ops.size()); ++i) {
    const Op& op = program.ops[i];
    if (in_pass(op)) {
      if (before && place(op) != place(*before)) ++count;
      before = &op;
      if (!is_amid(op, begun)) {
        if (begun && place(op) != place(*begun)) ++whole;
        begun = &op;
      }
    }
    visit[i] = count, whole_visit[i] = whole;
    for (const auto* list : {&op.inputs, &op.outputs})
      for (TensorId id : *list)
        if (auto* uses = id ? &of[program.whole(id).value] : nullptr; uses && (uses->empty() || uses->back() != i))
          uses->push_back(i);
  }
  for (const std::vector<int32_t>& uses : of) first_.push_back(first_.back() + uses.size() + 1);
  const auto first_use = [&](TensorId id) {
    const std::vector<int32_t>& uses = of[size_t(id.value)];
    return uses.empty() ? kNever : uses.front();
  };
  for (const auto& [tensor, forms_of_it] : program.forms) {
    forms[size_t(tensor)] = forms_of_it;
    for (const RestingForm& form : forms_of_it)
      for (const Op& op : form.restore)
        for (TensorId id : op.inputs)
          if (id) {
            restores[size_t(id.value)].push_back({tensor});
            inverts |= first_use(id) != kNever && first_use(id) > first_use({tensor});
          }
  }
}

}  // namespace strata
