// See repeats.h.
#include "engine/planning/repeats.h"

#include <algorithm>
#include <set>
#include <utility>

#include "engine/planning/memory_plan.h"

namespace strata {

RepeatedOps repeated_ops(const Program& program) {
  RepeatedOps result;
  if (!program.again_if) return result;
  const auto& ops = program.ops;
  for (size_t i = 0; i < ops.size(); ++i)
    if (ops[i].purpose == Purpose::again) result.at = i + 1;
  result.is.assign(ops.size(), false);
  std::set<int32_t> read, written;  // of what lives within the step
  const auto lives = [&](TensorId id) { return id && !program[program.whole(id)].persistent; };
  const auto any = [&](const TensorIds& ids, const std::set<int32_t>& of) {
    return std::any_of(ids.begin(), ids.end(),
                       [&](TensorId id) { return lives(id) && of.contains(program.whole(id).value); });
  };
  for (bool more = true; std::exchange(more, false);)
    for (size_t i = 0; i < result.at; ++i) {
      const Op& op = ops[i];
      const bool is = op.purpose == Purpose::work
                          ? op.step_part == StepPart::forward
                          : op.purpose != Purpose::again && (any(op.outputs, read) || any(op.inputs, written));
      if (!is || result.is[i]) continue;
      result.is[i] = more = true;
      for (TensorId id : op.inputs)
        if (lives(id)) read.insert(program.whole(id).value);
      for (TensorId id : op.outputs)
        if (lives(id)) written.insert(program.whole(id).value);
    }
  return result;
}

void add_repeats(Program& program, MemoryPlan& plan) {
  const RepeatedOps repeated = repeated_ops(program);
  std::vector<Op> copies;
  std::vector<int32_t> workspaces;
  for (size_t i = 0; i < repeated.at; ++i) {
    if (!repeated.is[i]) continue;
    copies.push_back(program.ops[i]);
    copies.back().purpose = Purpose::again;
    workspaces.push_back(plan.workspace_of[i]);
  }
  const int32_t at = int32_t(repeated.at), count = int32_t(copies.size());
  program.ops.insert(program.ops.begin() + at, copies.begin(), copies.end());
  plan.workspace_of.insert(plan.workspace_of.begin() + at, workspaces.begin(), workspaces.end());
  for (Buffer& buffer : plan.buffers)
    for (int32_t* op : {&buffer.first, &buffer.last})
      if (*op >= at) *op += count;
  for (TierPlan& tier : plan.tiers)
    if (tier.peak_op >= at) tier.peak_op += count;
  if (count > 0) verify(program, "repeating passes");
}

}  // namespace strata
