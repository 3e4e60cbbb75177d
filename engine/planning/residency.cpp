// Which tensors rest where, and under a budget which ones have to; see residency.h.
#include "engine/planning/residency.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <queue>
#include <set>

#include "engine/planning/materialize.h"
#include "engine/planning/spread_moves.h"
#include "strata/device.h"

namespace strata {
namespace {

constexpr int kMostRounds = 64;

bool in_pass(const Op& op) { return op.stage == Stage::forward || op.stage == Stage::backward; }

class Planner {
 public:
  Planner(Program& program, const Residency& settings) : program_(program), settings_(settings) {
    const size_t count = program.tensors.size();
    uses_.resize(count);
    visit_.assign(program.ops.size(), 0);
    producer_.assign(count, -1);
    const Op* before = nullptr;
    for (int32_t i = 0, visit = 0; i < int32_t(program.ops.size()); ++i) {
      const Op& op = program.ops[i];
      if (in_pass(op)) {
        if (before &&
            std::tie(op.block, op.microbatch, op.stage) != std::tie(before->block, before->microbatch, before->stage))
          ++visit;
        before = &op;
      }
      visit_[i] = visit;
      for (const auto* list : {&op.inputs, &op.outputs})
        for (TensorId id : *list)
          if (auto* uses = id ? &uses_[program.whole(id).value] : nullptr; uses && (uses->empty() || uses->back() != i))
            uses->push_back(i);
      for (TensorId id : op.outputs)
        if (producer_[id.value] < 0) producer_[id.value] = i;
    }
  }

  MemoryPlan run() {
    const Program original = program_;
    const int64_t alignment = program_.storage_directory.empty() ? kAlignment : kStorageAlignment;
    const MemoryPlan without = plan_memory(original, settings_.backend, settings_.threads, alignment);
    bytes_without_ = without.device().total_bytes();
    choose_homes();
    choose_update_tiers();
    decide_at_start();
    const Program start = program_;
    const Decisions decided = decisions_;
    const auto again = [&] {
      program_ = start;
      decisions_ = decided;
    };
    // Gaps between tensors take what liveness leaves free: after a plan that is too large, aim lower by as much.
    std::array<int64_t, kTiers> targets{settings_.device_budget, settings_.host_budget, 0};
    MemoryPlan plan = attempt(targets);
    for (int round = 0; round < 4 && over(plan); ++round) {
      const Tier beyond = *over(plan);
      targets[int(beyond)] -= plan[beyond].total_bytes() - budget(beyond);
      if (targets[int(beyond)] <= 0) break;
      again();
      plan = attempt(targets);
    }
    if (over(plan)) {  // at last, everything that can be given up is
      again();
      plan = attempt({settings_.device_budget > 0, settings_.host_budget > 0, 0});
      if (over(plan)) refuse(plan, *over(plan));
    }
    // Restoring needs memory too: never more than without. What is to be elsewhere goes there all the same.
    if (plan.device().total_bytes() > bytes_without_ && !over(without)) {
      if (!moves_any(original)) {
        program_ = original;
        return without;
      }
      Program larger = std::move(program_);
      again();
      std::erase_if(decisions_, [](const auto& decision) { return decision.second.form >= 0; });
      MemoryPlan moved = attempt(targets);
      if (!over(moved) && moved.device().total_bytes() < plan.device().total_bytes()) return moved;
      program_ = std::move(larger);
    }
    return plan;
  }

 private:
  // Decides, writes the decisions into the program, and plans its memory; moves are spread where that fits.
  MemoryPlan attempt(const std::array<int64_t, kTiers>& targets) {
    const Materialized now = fit(targets);
    program_ = now.program;
    verify(program_, "residency");
    const MemoryPlan before = measure_memory(program_, settings_.backend, settings_.threads);
    spread_moves(program_, before, settings_.rates, limits_of_spreading(before, targets));
    verify(program_, "spreading moves");
    MemoryPlan plan = plan_memory(program_, settings_.backend, settings_.threads);
    if (!over(plan) && plan.device().total_bytes() <= std::max(bytes_without_, targets[int(Tier::device)])) return plan;
    program_ = now.program;
    return plan_memory(program_, settings_.backend, settings_.threads);
  }

  // Where no budget says how far apart moves may be, the device stays within what it takes without any, and what is
  // staged on the host within half of what it would hold were it the farthest tier.
  std::array<int64_t, kTiers> limits_of_spreading(const MemoryPlan& before, std::array<int64_t, kTiers> limits) const {
    const TierPlan& host = before[Tier::host];
    if (limits[int(Tier::device)] <= 0) limits[int(Tier::device)] = bytes_without_;
    if (limits[int(Tier::host)] <= 0)
      limits[int(Tier::host)] = std::max<int64_t>(
          1, host.persistent_bytes + std::max(host.live_peak_bytes, before[Tier::nvme].total_bytes() / 2));
    return limits;
  }

  int64_t budget(Tier tier) const {
    return tier == Tier::device ? settings_.device_budget
           : tier == Tier::host ? settings_.host_budget
                                : program_.storage_limit;
  }
  // The first tier whose arena is beyond its budget.
  std::optional<Tier> over(const MemoryPlan& plan) const {
    for (int t = 0; t < kTiers; ++t)
      if (budget(Tier(t)) > 0 && plan.tiers[t].total_bytes() > budget(Tier(t))) return Tier(t);
    return {};
  }
  // Where a tensor goes first: the near tier where a budget says how much fits there.
  Tier first_tier(const Tensor& tensor) const {
    return tensor.nearest != tensor.farthest && settings_.host_budget > 0 ? tensor.nearest : tensor.farthest;
  }
  static bool moves_any(const Program& program) {
    return std::any_of(program.tensors.begin(), program.tensors.end(), movable);
  }
  static bool movable(const Tensor& tensor) { return tensor.home != Tier::device || tensor.farthest != Tier::device; }

  void choose_homes() {
    for (size_t t = 0; t < program_.tensors.size(); ++t) {
      Tensor& tensor = program_.tensors[t];
      if (!tensor.persistent || tensor.part_of) continue;
      if (elements(tensor.shape) == 1) {  // the host reads and sets numbers such as a loss scale, and they are nothing to move
        tensor.nearest = tensor.farthest = Tier::device;
        continue;
      }
      if (settings_.homes) {
        const auto found = settings_.homes->find(tensor.name);
        if (found != settings_.homes->end()) tensor.home = found->second;
        tensor.nearest = tensor.farthest = tensor.home;
      } else if (tensor.farthest != Tier::device) {
        tensor.home = first_tier(tensor);
      }
    }
  }

  // An update runs where fewer bytes have to move: beside its states on the host, or on the device with the states
  // brought there (ZeRO-Offload, arXiv 2101.06840, section 4).
  void choose_update_tiers() {
    for (Op& op : program_.ops) {
      if (op.stage != Stage::update || op.tier != Tier::device || op.kind->exchange) continue;
      int64_t to_host = 0, to_device = 0;
      std::set<TensorId> seen;
      for (TensorId id : op.inputs) {
        if (!id || !seen.insert(id).second) continue;
        const Tensor &tensor = program_[id], &whole = program_[program_.whole(id)];
        const bool written = std::find(op.outputs.begin(), op.outputs.end(), id) != op.outputs.end();
        const bool away = tensor.persistent ? whole.home != Tier::device : tensor.farthest != Tier::device;
        (away ? to_device : to_host) += tensor.bytes() * (written ? 2 : 1);
      }
      for (TensorId id : op.outputs)  // written without being read
        if (seen.insert(id).second && program_[id].persistent)
          (program_[program_.whole(id)].home != Tier::device ? to_device : to_host) += program_[id].bytes();
      if (to_host >= to_device) continue;
      op.tier = Tier::host;
      if (settings_.host_stream) op.stream = Stream::host;
    }
  }

  // What happens without being asked for by a budget.
  void decide_at_start() {
    for (int32_t t = 0; t < int32_t(program_.tensors.size()); ++t) {
      const Tensor& tensor = program_.tensors[t];
      const auto& uses = uses_[t];
      const auto forms = program_.forms.find(t);
      int always = -1, between = -1;
      if (forms != program_.forms.end())
        for (int f = 0; f < int(forms->second.size()); ++f) {
          using When = RestingForm::When;
          const When when = forms->second[size_t(f)].when;
          if (when == When::after_forward && (always < 0 || kept_bytes(t, f) < kept_bytes(t, always))) always = f;
          if (when == When::between_blocks || (when == When::unless_budget && settings_.device_budget <= 0))
            between = f;
        }
      const bool moves = movable(tensor) && !tensor.step_output;
      if (always < 0 && between < 0 && !moves) continue;
      const Tier tier = tensor.persistent ? tensor.home : first_tier(tensor);
      for (size_t u = 0; u < uses.size(); ++u) {
        const bool last = u + 1 == uses.size();
        const bool leaves_forward = program_.ops[uses[u]].stage == Stage::forward &&
                                    (last || program_.ops[uses[u + 1]].stage != Stage::forward);
        if (between >= 0) {
          if (!last && visit_[uses[u + 1]] - visit_[uses[u]] > 1)
            decisions_[{t, uses[u + 1]}] = {between, Tier::device, false};
        } else if (always >= 0) {
          const bool nothing_kept = forms->second[always].rest.empty();
          if (leaves_forward && (!last || nothing_kept))
            decisions_[{t, last ? kNever : uses[u + 1]}] = {
                always, settings_.device_budget > 0 || tensor.farthest == Tier::device ? Tier::device : tier, true};
        } else if (!last && settings_.device_budget <= 0 && visit_[uses[u + 1]] - visit_[uses[u]] > 1) {
          decisions_[{t, uses[u + 1]}] = {-1, tier, false};
        }
      }
    }
  }

  int64_t kept_bytes(int32_t tensor, int form) const {
    int64_t bytes = 0;
    for (const Op& op : program_.forms.at(tensor)[size_t(form)].rest)
      for (TensorId id : op.outputs) bytes += program_[id].bytes();
    return bytes;
  }

  // Adds decisions until the live bytes of every tier are within `targets`, or nothing is left to give up.
  Materialized fit(const std::array<int64_t, kTiers>& targets) {
    for (int round = 0;; ++round) {
      for (Tensor& part : program_.tensors)
        if (part.part_of && part.persistent) part.home = program_[part.part_of].home;
      Materialized now =
          materialize(program_, decisions_, is_asynchronous(settings_.backend) && !program_.direct_storage);
      bool within = true, changed = false;
      const MemoryPlan plan = measure_memory(now.program, settings_.backend, settings_.threads);
      for (Tier tier : {Tier::device, Tier::host}) {
        const int64_t target = targets[int(tier)];
        if (target <= 0 || plan[tier].total_bytes() <= target) continue;
        within = false;
        changed |= relieve(now, plan, tier, target);
      }
      if (within || !changed || round == kMostRounds) return now;
    }
  }

  [[noreturn]] void refuse(const MemoryPlan& plan, Tier tier) {
    constexpr std::string_view options[] = {"device.memory", "host.memory", "the space for the NVMe tier"};
    refuse_budget(program_, plan, tier, options[int(tier)], budget(tier), plan[tier].total_bytes(),
                  settings_.advice ? settings_.advice(plan) : "");
  }

  struct Candidate {
    size_t waiting;
    Decision decision;
    int64_t bytes;
    double cost;  // seconds a byte, on a coarse scale, so that equal tensors tie
  };

  // Walks over the program and gives up waiting tensors wherever more is alive than `target`.
  bool relieve(const Materialized& now, const MemoryPlan& plan, Tier tier, int64_t target) {
    bool changed = tier == Tier::host && send_homes_away(plan[tier].total_bytes() - target);
    if (changed) return true;
    std::vector<std::vector<Candidate>> begins(now.program.ops.size());
    for (size_t w = 0; w < now.waiting.size(); ++w) {
      const Waiting& waiting = now.waiting[w];
      if (waiting.tier != tier || waiting.from + 1 >= waiting.to) continue;
      if (const auto candidate = best(waiting))
        begins[size_t(waiting.from) + 1].push_back({w, candidate->decision, candidate->bytes, candidate->cost});
    }
    const std::vector<Ledger> live = timeline(now.program, plan, tier);
    // Cheapest first; of equals the one whose next use is farthest.
    const auto later = [&](const Candidate& a, const Candidate& b) {
      return std::tuple(a.cost, -now.waiting[a.waiting].to) > std::tuple(b.cost, -now.waiting[b.waiting].to);
    };
    std::priority_queue<Candidate, std::vector<Candidate>, decltype(later)> open(later);
    std::vector<int64_t> back(now.program.ops.size() + 1, 0);  // bytes that are needed again from this op on
    int64_t saved = 0;
    for (int32_t i = 0; i < int32_t(live.size()); ++i) {
      saved -= back[i];
      for (const Candidate& candidate : begins[i]) open.push(candidate);
      int64_t bytes = plan[tier].persistent_bytes - saved;
      for (int64_t role : live[i]) bytes += role;
      while (bytes > target && !open.empty()) {
        const Candidate chosen = open.top();
        open.pop();
        const Waiting& waiting = now.waiting[chosen.waiting];
        if (waiting.to <= i) continue;
        decisions_[waiting.gap] = chosen.decision;
        changed = true;
        bytes -= chosen.bytes;
        saved += chosen.bytes;
        back[waiting.to] += chosen.bytes;
      }
    }
    return changed;
  }

  // The cheapest thing that could be done about a tensor that waits and is not done yet.
  std::optional<Candidate> best(const Waiting& waiting) {
    const TensorId id{waiting.gap.tensor};
    const Tensor& tensor = program_[id];
    if (tensor.step_output) return {};
    const auto found = decisions_.find(waiting.gap);
    const Decision* taken = found == decisions_.end() ? nullptr : &found->second;
    std::optional<Candidate> best;
    const auto offer = [&](Decision decision, int64_t bytes, double seconds) {
      if (bytes <= 0) return;
      const double cost = std::round(std::log2(seconds / double(bytes)) * 4);
      if (!best || cost < best->cost) best = Candidate{0, decision, bytes, cost};
    };
    const bool in_forward = waiting.gap.use != kNever && is_forward_gap(waiting.gap);
    const auto offer_forms = [&](bool only_without_bytes) {
      const auto forms = program_.forms.find(id.value);
      if (forms == program_.forms.end()) return;
      for (int f = 0; f < int(forms->second.size()); ++f) {
        const RestingForm& form = forms->second[size_t(f)];
        if (!form.rest.empty() && (only_without_bytes || waiting.gap.use == kNever)) continue;
        double seconds = 0;
        for (const auto* list : {&form.rest, &form.restore})
          for (const Op& op : *list) seconds += seconds_of(OpView(program_, op), settings_.rates);
        offer({f, Tier::device, in_forward || waiting.gap.use == kNever}, tensor.bytes() - kept_bytes(id.value, f),
              seconds);
      }
    };
    if (waiting.tier == Tier::host) {  // farther away, or not kept at all
      if (tensor.persistent || !taken || taken->tier != Tier::host) return {};
      Decision farther = *taken;
      farther.tier = Tier::nvme;
      if (tensor.farthest == Tier::nvme)
        offer(farther, tensor.bytes(), double(tensor.bytes()) / settings_.rates.write);
      else
        offer_forms(true);
      return best;
    }
    if (taken) {
      // Given up in the forward pass and back already, or kept in another form: give up again, or move what is kept.
      if (taken->form >= 0 && taken->tier == Tier::device && tensor.farthest != Tier::device &&
          kept_bytes(id.value, taken->form) > 0)
        offer({taken->form, first_tier(tensor), taken->forward_only}, kept_bytes(id.value, taken->form),
              move_seconds(first_tier(tensor), kept_bytes(id.value, taken->form)));
      else if (taken->forward_only)
        offer({taken->form, taken->tier, false}, tensor.bytes(), 1);
      return best;
    }
    if (waiting.gap.use != kNever && movable(tensor)) {
      const Tier tier = tensor.persistent ? tensor.home : first_tier(tensor);
      offer({-1, tier, false}, tensor.bytes(), move_seconds(tier, tensor.bytes()));
    }
    offer_forms(false);
    return best;
  }

  bool is_forward_gap(const Gap& gap) const {
    const auto& uses = uses_[gap.tensor];
    const auto at = std::lower_bound(uses.begin(), uses.end(), gap.use);
    return at != uses.begin() && program_.ops[*std::prev(at)].stage == Stage::forward;
  }

  // A transfer costs time only where it does not hide; most of it does.
  double move_seconds(Tier tier, int64_t bytes) const {
    constexpr double kExposed = 0.25;
    const Rates& r = settings_.rates;
    return kExposed * double(bytes) * (tier == Tier::host ? 2 / r.copy : 1 / r.read + 1 / r.write);
  }

  // Persistent tensors that may, from host to NVMe, until `bytes` are gone: those least often used first.
  bool send_homes_away(int64_t bytes) {
    std::vector<std::pair<size_t, int32_t>> order;
    for (int32_t t = 0; t < int32_t(program_.tensors.size()); ++t) {
      const Tensor& tensor = program_.tensors[t];
      if (tensor.persistent && tensor.home == Tier::host && tensor.farthest == Tier::nvme)
        order.push_back({uses_[t].size(), t});
    }
    std::stable_sort(order.begin(), order.end(), [&](const auto& a, const auto& b) { return a.first < b.first; });
    bool changed = false;
    for (size_t i = 0; i < order.size() && bytes > 0; ++i) {
      Tensor& tensor = program_.tensors[order[i].second];
      tensor.home = Tier::nvme;
      bytes -= tensor.bytes();
      changed = true;
    }
    return changed;
  }

  Program& program_;
  const Residency& settings_;
  std::vector<std::vector<int32_t>> uses_;  // by tensor
  std::vector<int32_t> visit_;              // by op: counts stretches of one block, microbatch and pass
  std::vector<int32_t> producer_;           // by tensor
  Decisions decisions_;
  int64_t bytes_without_ = 0;  // of the device, were nothing to rest
};

}  // namespace

bool rests(const Program& program) {
  return !program.forms.empty() || std::any_of(program.tensors.begin(), program.tensors.end(), [](const Tensor& t) {
    return t.farthest != Tier::device || t.home != Tier::device;
  });
}

MemoryPlan plan_residency(Program& program, const Residency& settings) {
  program.direct_storage = settings.direct_storage;
  const auto away = [](const auto& home) { return home.second != Tier::device; };
  if (rests(program) || (settings.homes && std::any_of(settings.homes->begin(), settings.homes->end(), away)))
    return Planner(program, settings).run();
  MemoryPlan plan = plan_memory(program, settings.backend, settings.threads);
  if (settings.device_budget > 0 && plan.device().total_bytes() > settings.device_budget)
    refuse_budget(program, plan, Tier::device, "device.memory", settings.device_budget, plan.device().total_bytes(),
                  settings.advice ? settings.advice(plan) : "");
  return plan;
}

std::map<std::string, Tier> homes_of(const Program& program) {
  std::map<std::string, Tier> homes;
  for (const Tensor& tensor : program.tensors)
    if (tensor.persistent) homes[tensor.name] = tensor.home;
  return homes;
}

}  // namespace strata
