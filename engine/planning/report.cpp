// Renders a plan for people and for machines; see report.h.
#include "engine/planning/report.h"

#include <fmt/format.h>

#include <algorithm>

namespace strata {
namespace {

struct Held {
  int64_t bytes;
  std::string name;
  Role role;
};

// Everything that is in memory at the peak, largest first.
std::vector<Held> held_at_peak(const Program& program, const MemoryPlan& plan) {
  std::vector<Held> held;
  for (const Tensor& tensor : program.tensors)
    if (tensor.persistent) held.push_back({tensor.bytes(), tensor.name, tensor.role});
  for (const Buffer& buffer : plan.buffers)
    if (buffer.first <= plan.peak_op && plan.peak_op <= buffer.last)
      held.push_back({buffer.bytes, buffer.name, buffer.role});
  std::stable_sort(held.begin(), held.end(), [](const Held& a, const Held& b) { return a.bytes > b.bytes; });
  return held;
}

int64_t parameter_count(const Program& program) {
  int64_t count = 0;
  for (TensorId id : program.with_role(Role::parameter)) count += elements(program[id].shape);
  return count;
}

std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + "\"";
}

}  // namespace

std::string plan_text(const BuiltProgram& built, const MemoryPlan& plan) {
  const Program& program = built.program;
  std::string text = fmt::format(
      "parameters        {:>16}\ntokens a step     {:>16}\nops a step        {:>16}\nmodel FLOPs a step{:>16.4e}\n\n",
      parameter_count(program), built.tokens_per_step, program.ops.size(), built.model_flops);
  text += fmt::format("device memory at the peak\n");
  for (int r = 0; r < kRoles; ++r)
    if (plan.at_peak[r] > 0) text += fmt::format("  {:<18}{:>14}\n", name_of(Role(r)), bytes_text(plan.at_peak[r]));
  const int64_t at_peak = plan.persistent_bytes + plan.live_peak_bytes;
  text += fmt::format("  {:<18}{:>14}\n", "alive", bytes_text(at_peak));
  text += fmt::format("  {:<18}{:>14}   ({:.2f}% lost between tensors)\n\n", "arena", bytes_text(plan.total_bytes()),
                      100.0 * double(plan.total_bytes() - at_peak) / double(std::max<int64_t>(plan.total_bytes(), 1)));
  if (plan.peak_op >= 0)
    text += fmt::format("the peak is at op {}: {}\n", plan.peak_op, print(program, program.ops[plan.peak_op]));
  text += "largest there:\n";
  const std::vector<Held> held = held_at_peak(program, plan);
  for (size_t i = 0; i < held.size() && i < 10; ++i)
    text += fmt::format("  {:>12}  {:<16} {}\n", bytes_text(held[i].bytes), name_of(held[i].role), held[i].name);
  return text;
}

std::string plan_json(const BuiltProgram& built, const MemoryPlan& plan) {
  const Program& program = built.program;
  std::string categories, tensors;
  for (int r = 0; r < kRoles; ++r)
    categories += fmt::format("{}{}: {}", r ? ", " : "", quoted(name_of(Role(r))), plan.at_peak[r]);
  for (const Held& held : held_at_peak(program, plan))
    tensors += fmt::format("{}\n    {{\"name\": {}, \"category\": {}, \"bytes\": {}}}", tensors.empty() ? "" : ",",
                           quoted(held.name), quoted(name_of(held.role)), held.bytes);
  return fmt::format(
      "{{\n  \"parameters\": {},\n  \"tokens_per_step\": {},\n  \"ops\": {},\n  \"model_flops\": {:.17g},\n  "
      "\"tiers\": {{\"device\": "
      "{{\"arena_bytes\": {}, \"persistent_bytes\": {}, \"transient_bytes\": {}, \"live_peak_bytes\": {}, \"peak_op\": "
      "{}, "
      "\"at_peak\": {{{}}}}}}},\n  \"held_at_peak\": [{}\n  ]\n}}\n",
      parameter_count(program), built.tokens_per_step, program.ops.size(), built.model_flops, plan.total_bytes(),
      plan.persistent_bytes, plan.transient_bytes, plan.live_peak_bytes, plan.peak_op, categories, tensors);
}

}  // namespace strata
