// Renders a plan for people and for machines; see report.h.
#include "engine/planning/report.h"

#include <fmt/format.h>

#include <algorithm>

#include "strata/json.h"

namespace strata {
namespace {

int64_t parameter_count(const Program& program) {
  int64_t count = 0;
  for (TensorId id : program.with_role(Role::parameter)) count += elements(program[id].full_shape());
  return count;
}

// What ZeRO's paper calls model states, on the device: parameters and states as they rest, and the most that gradients
// take while none is being made: between microbatches, and where all of them wait for something (clipping).
Json::Object model_states(const PlannedProgram& planned) {
  const Program& program = planned.built.program;
  int64_t parameters = 0, states = 0, gradients = 0;
  for (const Tensor& tensor : program.tensors) {
    if (!tensor.persistent || tensor.part_of || tensor.home != Tier::device) continue;
    if (tensor.role == Role::parameter) parameters += tensor.bytes();
    if (tensor.role == Role::optimizer_state) states += tensor.bytes();
  }
  const std::vector<Ledger> alive = timeline(program, planned.memory);
  for (size_t i = 0; i < program.ops.size(); ++i)
    if (program.ops[i].purpose == Purpose::work &&
        (program.ops[i].stage == Stage::forward || program.ops[i].stage == Stage::update))
      gradients = std::max(gradients, alive[i][int(Role::gradient)]);
  return {{"parameters", parameters}, {"gradients", gradients}, {"optimizer_state", states}};
}

}  // namespace

std::string plan_text(const PlannedProgram& planned) {
  const Program& program = planned.built.program;
  std::string text = fmt::format(
      "parameters        {:>16}\ntokens a step     {:>16}\nops a step        {:>16}\nmodel FLOPs a step{:>16.4e}\n",
      parameter_count(program), planned.built.tokens_per_step, program.ops.size(), planned.built.model_flops);
  if (planned.ranks > 1) text += fmt::format("ranks             {:>16}   (memory is that of one)\n", planned.ranks);
  for (int t = 0; t < kTiers; ++t) {
    const TierPlan& tier = planned.memory.tiers[t];
    if (tier.total_bytes() == 0) continue;
    text += fmt::format("\n{} memory at the peak\n", name_of(Tier(t)));
    for (int r = 0; r < kRoles; ++r)
      if (tier.at_peak[r] > 0) text += fmt::format("  {:<18}{:>14}\n", name_of(Role(r)), bytes_text(tier.at_peak[r]));
    const int64_t at_peak = tier.persistent_bytes + tier.live_peak_bytes;
    text += fmt::format("  {:<18}{:>14}\n", "alive", bytes_text(at_peak));
    text += fmt::format("  {:<18}{:>14}   ({:.2f}% lost between tensors)\n", "arena", bytes_text(tier.total_bytes()),
                        100.0 * double(tier.total_bytes() - at_peak) / double(tier.total_bytes()));
    if (const int64_t more = planned.arena_bytes[t]; more > tier.total_bytes())
      text += fmt::format("  {:<18}{:>14}\n", "with validation", bytes_text(more));
    if (tier.peak_op >= 0 && tier.live_peak_bytes > 0)
      text += fmt::format("the peak is at op {}: {}\n", tier.peak_op, print(program, program.ops[tier.peak_op]));
    text += "largest there:\n";
    const std::vector<Held> held = held_at(program, planned.memory, Tier(t), tier.peak_op);
    for (size_t i = 0; i < held.size() && i < 10; ++i)
      text += fmt::format("  {:>12}  {:<16} {}\n", bytes_text(held[i].bytes), name_of(held[i].role), held[i].name);
  }
  if (planned.snapshot_bytes > 0)
    text += fmt::format("\nhost memory beside, for saving behind training: {}\n", bytes_text(planned.snapshot_bytes));
  if (!planned.prediction) return text;
  const Stalls& stalls = planned.prediction->stalls;
  text += fmt::format(
      "\npredicted step      {:>10.3f} s\n  waiting for NVMe  {:>10.3f} s\n  waiting for copies{:>10.3f} s\n  running "
      "again     "
      "{:>10.3f} s\n",
      planned.prediction->seconds, stalls.storage(), stalls.copies(), stalls.restoring);
  if (planned.rates.assumed) text += "  with the rates of an H100's data sheet: there is no such device here\n";
  return text;
}

std::string plan_json(const PlannedProgram& planned) {
  const Program& program = planned.built.program;
  Json::Object tiers;
  for (int t = 0; t < kTiers; ++t) {
    const TierPlan& tier = planned.memory.tiers[t];
    if (Tier(t) != Tier::device && tier.total_bytes() == 0) continue;
    Json::Object categories;
    for (int r = 0; r < kRoles; ++r) categories.emplace_back(std::string(name_of(Role(r))), tier.at_peak[r]);
    Json::Array held;
    for (const Held& one : held_at(program, planned.memory, Tier(t), tier.peak_op))
      held.push_back(
          Json::Object{{"name", one.name}, {"category", std::string(name_of(one.role))}, {"bytes", one.bytes}});
    tiers.emplace_back(std::string(name_of(Tier(t))), Json::Object{{"arena_bytes", planned.arena_bytes[t]},
                                                                   {"persistent_bytes", tier.persistent_bytes},
                                                                   {"transient_bytes", tier.transient_bytes},
                                                                   {"live_peak_bytes", tier.live_peak_bytes},
                                                                   {"peak_op", int64_t(tier.peak_op)},
                                                                   {"at_peak", std::move(categories)},
                                                                   {"held_at_peak", std::move(held)}});
  }
  Json::Object all{{"ranks", int64_t(planned.ranks)},
                   {"parameters", parameter_count(program)},
                   {"tokens_per_step", planned.built.tokens_per_step},
                   {"ops", int64_t(program.ops.size())},
                   {"model_flops", planned.built.model_flops},
                   {"snapshot_bytes", planned.snapshot_bytes},
                   {"model_states", model_states(planned)},
                   {"tiers", std::move(tiers)}};
  if (planned.prediction) {
    const Stalls& stalls = planned.prediction->stalls;
    all.emplace_back("predicted", Json::Object{{"seconds", planned.prediction->seconds},
                                               {"waiting_for_nvme", stalls.storage()},
                                               {"waiting_for_copies", stalls.copies()},
                                               {"restoring", stalls.restoring}});
  }
  return Json(std::move(all)).dump(1) + "\n";
}

}  // namespace strata
