// Which tensors rest where, and under a budget which ones have to; see residency.h.
#include "engine/planning/residency.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <queue>
#include <set>
#include <tuple>

#include "engine/planning/materialize.h"
#include "engine/planning/predict.h"
#include "engine/planning/spread_moves.h"
#include "strata/device.h"

namespace strata {
namespace {

constexpr int kMostRounds = 64;
constexpr size_t kManyOps = 20'000;  // planning such a program again and again takes seconds

// On one memory what both tiers may take is one budget.
std::array<int64_t, kTiers> budgets_of(const Residency& settings) {
  const auto left = [&](int64_t budget) { return budget > 0 ? std::max<int64_t>(1, budget - settings.beside) : 0; };
  if (settings.one_memory()) return {left(settings.device_budget + settings.host_budget), 0, 0};
  return {settings.device_budget, left(settings.host_budget), 0};
}

// What of a tier's budget is not the plan's.
int64_t beside(Tier tier, const Residency& settings) {
  return tier == (settings.one_memory() ? Tier::device : Tier::host) ? settings.beside : 0;
}

std::string option_of(Tier tier, const Residency& settings) {
  if (tier == Tier::nvme) return "the space for the NVMe tier";
  if (!settings.one_memory()) return tier == Tier::device ? "device.memory" : "host.memory";
  return settings.host_budget <= 0    ? "device.memory"
         : settings.device_budget > 0 ? "device.memory + host.memory"
                                      : "host.memory";
}

bool in_pass(const Op& op) { return op.stage == Stage::forward || op.stage == Stage::backward; }

class Planner {
 public:
  Planner(Program& program, const Residency& settings)
      : program_(program), settings_(settings), one_memory_(settings.one_memory()), budgets_(budgets_of(settings)) {
    budgets_[int(Tier::nvme)] = program.storage_limit;
    const size_t count = program.tensors.size();
    offloaded_.resize(count);
    for (size_t t = 0; t < count; ++t) {
      Tensor& tensor = program.tensors[t];
      offloaded_[t] = tensor.farthest != Tier::device;
      if (one_memory_)  // what would go to the host is there already
        for (Tier* tier : {&tensor.nearest, &tensor.farthest})
          if (*tier == Tier::host) *tier = Tier::device;
    }
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

  // Without budgets one plan, or of those that bring things back earlier or later the smallest that costs little. With
  // budgets the fastest of a series of plans that fits. The series does not depend on the budgets, so a larger one
  // never gives a slower plan, and what a refusal says is enough is enough.
  MemoryPlan run() {
    const int64_t alignment = program_.storage_directory.empty() ? kAlignment : kStorageAlignment;
    without_ = {program_, plan_memory(program_, settings_.backend, settings_.threads, alignment)};
    bytes_without_ = without_.memory.device().total_bytes();
    choose_homes();
    choose_update_tiers();
    decide_at_start();
    start_ = program_;
    decided_ = decisions_;
    const auto may_go = [](const Tensor& t) { return t.persistent && !t.part_of && t.home != t.farthest; };
    homes_may_go_ = one_memory_ && std::any_of(start_.tensors.begin(), start_.tensors.end(), may_go);
    const bool budgets = budget(Tier::device) > 0 || budget(Tier::host) > 0;
    Planned chosen = budgets ? within_budgets() : without_budgets();
    // What is to be elsewhere goes there all the same.
    if (!budgets && chosen.memory.device().total_bytes() > bytes_without_)
      if (Planned moved = without_restoring();
          moved.memory.device().total_bytes() < chosen.memory.device().total_bytes() && !over(moved.memory))
        chosen = std::move(moved);
    if (const auto beyond = over(chosen.memory)) refuse(chosen, *beyond);
    verify(chosen.program, "residency");
    program_ = std::move(chosen.program);
    return std::move(chosen.memory);
  }

 private:
  struct Planned {
    Program program{};
    MemoryPlan memory{};
    Prediction prediction{};
    bool last_resort = false;  // not what the plugins ask for, but it fits
  };

  // What one attempt aims at.
  struct Aim {
    std::array<int64_t, kTiers> targets{};  // bytes that each tier is relieved down to; 0: as it is
    int64_t room = 0;                       // bytes of the device for bringing back early; 0: the target
    bool homes_first = true;                // what has its home in memory goes before what waits there
    bool forms = true;
  };

  // Decides, writes the decisions into the program, and plans its memory; moves are spread where that fits.
  Planned attempt(const Aim& aim) {
    program_ = start_;
    decisions_ = decided_;
    if (!aim.forms) std::erase_if(decisions_, [](const auto& decision) { return decision.second.form >= 0; });
    homes_first_ = aim.homes_first;
    const Materialized now = fit(aim.targets);
    Planned plan{now.program, {}};
    const MemoryPlan before = measure_memory(plan.program, settings_.backend, settings_.threads);
    const auto limits = limits_of_spreading(before, aim);
    spread_moves(plan.program, before, settings_.rates, limits);
    plan.memory = plan_memory(plan.program, settings_.backend, settings_.threads);
    if (beyond(plan.memory, {limits[int(Tier::device)], aim.targets[int(Tier::host)], 0})) {
      plan.program = now.program;
      plan.memory = plan_memory(plan.program, settings_.backend, settings_.threads);
    }
    plan.prediction = predict(plan.program, plan.memory, settings_.rates);
    return plan;
  }

  // Where no budget says how far apart moves may be, the device stays within what it takes without any, and what is
  // staged on the host within half of what it would hold were it the farthest tier.
  std::array<int64_t, kTiers> limits_of_spreading(const MemoryPlan& before, const Aim& aim) const {
    std::array<int64_t, kTiers> limits = aim.targets;
    const TierPlan& host = before[Tier::host];
    int64_t &of_device = limits[int(Tier::device)], &of_host = limits[int(Tier::host)];
    if (of_device <= 0) of_device = bytes_without_;
    if (aim.room > 0) of_device = aim.room;
    if (of_host <= 0)
      of_host = std::max<int64_t>(
          1, host.persistent_bytes + std::max(host.live_peak_bytes, before[Tier::nvme].total_bytes() / 2));
    return limits;
  }

  // Where restoring takes more memory than it saves: the plain program, or the one that moves what it must.
  Planned without_restoring() {
    Planned plan;
    if (moves_any(without_.program)) {
      plan = attempt(
          {.targets = {budget(Tier::device) > 0 ? bytes_without_ : 0, budget(Tier::host) > 0, 0}, .forms = false});
    } else {
      plan = without_;
      plan.prediction = predict(plan.program, plan.memory, settings_.rates);
    }
    plan.last_resort = true;
    return plan;
  }

  Planned without_budgets() {
    Planned tight = attempt({.room = one_memory_ ? 1 : 0});
    const bool stored = tight.memory[Tier::nvme].total_bytes() > 0;
    if (!one_memory_ || !stored) return tight;
    // Half of what it would take without is enough for what is on its way; beyond that time buys memory.
    constexpr int kSteps = 4;
    constexpr double kLittle = 1.05;
    const int64_t least = tight.memory.device().total_bytes(), most = std::max(least, bytes_without_ / 2);
    std::vector<Planned> plans{std::move(tight)};
    for (int step = 1; step <= kSteps && most > least && plans.back().prediction.stalls.total() > 0; ++step)
      if (Planned plan = attempt({.room = least + (most - least) * step / kSteps});
          plan.memory.device().total_bytes() <= most)
        plans.push_back(std::move(plan));
    double fastest = plans.front().prediction.seconds;
    for (const Planned& plan : plans) fastest = std::min(fastest, plan.prediction.seconds);
    return std::move(*std::find_if(plans.begin(), plans.end(),
                                   [&](const Planned& plan) { return plan.prediction.seconds <= kLittle * fastest; }));
  }

  // The series: from a plan that gives up all it can to one that keeps everything, in even steps of the device's
  // memory.
  std::vector<int64_t> device_targets(int64_t least) const {
    const int steps = program_.ops.size() > kManyOps ? 4 : budget(Tier::host) > 0 || homes_may_go_ ? 8 : 16;
    std::vector<int64_t> targets;
    for (int step = 0; step <= steps; ++step) targets.push_back(least + (bytes_without_ - least) * step / steps);
    return bytes_without_ > least ? targets : std::vector{least};
  }

  // Whether `b` is to be preferred: one that takes no more than without any of this, then the faster one, and of equals
  // the one that gives up less.
  bool better(const Planned& b, const Planned& a) const {
    const auto rank = [&](const Planned& plan) {
      const int64_t bytes = plan.memory.device().total_bytes();
      return std::tuple(bytes > bytes_without_, plan.last_resort, plan.prediction.seconds, -bytes);
    };
    return rank(b) < rank(a);
  }

  Planned within_budgets() {
    // Whether the budgets can be met at all is a question to plans that give up on the host what they can; so the
    // answer for one budget does not hang on the other's series.
    const bool host = budget(Tier::host) > 0;
    const auto aims_of = [&](int64_t target, int64_t host_target) {
      std::vector<Aim> aims{{.targets = {target, host_target, 0}}};
      if (homes_may_go_) aims.push_back({.targets = {target, host_target, 0}, .homes_first = false});
      return aims;
    };
    std::vector<int64_t> targets{0};
    std::optional<Planned> best, refused;
    int64_t least_asked = INT64_MAX;  // bytes of the device, of plans that do what the plugins ask for
    const auto consider = [&](Planned plan) {
      if (!plan.last_resort && !beyond(plan.memory, {0, budget(Tier::host), budget(Tier::nvme)}))
        least_asked = std::min(least_asked, plan.memory.device().total_bytes());
      if (!over(plan.memory)) {
        if (!best || better(plan, *best)) best = std::move(plan);
      } else if (!refused || excess(plan.memory) < excess(refused->memory)) {
        refused = std::move(plan);
      }
    };
    consider(attempt(aims_of(1, host)[0]));
    if (budget(Tier::device) > 0) targets = device_targets((best ? best : refused)->memory.device().total_bytes());
    for (auto target = targets.rbegin(); target != targets.rend(); ++target)
      for (const Aim& aim : aims_of(*target, host)) consider(attempt(aim));
    Planned last = without_restoring();
    if (!best && over(last.memory)) {
      consider(std::move(last));
      return std::move(*refused);
    }
    for (auto target = targets.rbegin(); target != targets.rend() && host; ++target)
      consider(attempt(aims_of(*target, budget(Tier::host))[0]));
    // Restoring needs memory too: what is asked for and saves none need not be.
    last.last_resort = last.memory.device().total_bytes() > least_asked;
    consider(std::move(last));
    return std::move(*best);
  }

  // How far a plan is from fitting: beyond how many budgets, which one first, and what it takes there.
  std::tuple<int, int, int64_t> excess(const MemoryPlan& plan) const {
    int beyond = 0;
    for (int t = 0; t < kTiers; ++t) beyond += budgets_[t] > 0 && plan.tiers[t].total_bytes() > budgets_[t];
    return {beyond, int(*over(plan)), plan[*over(plan)].total_bytes()};
  }

  int64_t budget(Tier tier) const { return budgets_[int(tier)]; }
  // The first tier whose arena is beyond its budget.
  std::optional<Tier> over(const MemoryPlan& plan) const { return beyond(plan, budgets_); }
  static std::optional<Tier> beyond(const MemoryPlan& plan, const std::array<int64_t, kTiers>& limits) {
    for (int t = 0; t < kTiers; ++t)
      if (limits[size_t(t)] > 0 && plan.tiers[t].total_bytes() > limits[size_t(t)]) return Tier(t);
    return {};
  }
  // Where a tensor goes first: the near tier where a budget says how much fits there.
  Tier first_tier(const Tensor& tensor) const {
    return tensor.nearest != tensor.farthest && budget(one_memory_ ? Tier::device : Tier::host) > 0 ? tensor.nearest
                                                                                                    : tensor.farthest;
  }
  // Where a tensor that waits goes; the device: nowhere.
  Tier away_tier(const Tensor& tensor) const {
    return tensor.persistent ? tensor.home : one_memory_ ? tensor.farthest : first_tier(tensor);
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

  // Whether a tensor is not on the device when its update comes, or is let rest elsewhere where that is the same
  // memory.
  bool is_away(TensorId id) const {
    const TensorId whole = program_.whole(id);
    if (one_memory_) return offloaded_[size_t(whole.value)];
    return program_[id].persistent ? program_[whole].home != Tier::device : program_[id].farthest != Tier::device;
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
        const Tensor& tensor = program_[id];
        const bool written = std::find(op.outputs.begin(), op.outputs.end(), id) != op.outputs.end();
        (is_away(id) ? to_device : to_host) += tensor.bytes() * (written ? 2 : 1);
      }
      for (TensorId id : op.outputs)  // written without being read
        if (seen.insert(id).second && program_[id].persistent)
          (is_away(id) ? to_device : to_host) += program_[id].bytes();
      if (to_host >= to_device) continue;
      if (!one_memory_) op.tier = Tier::host;
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
          if (when == When::between_blocks || (when == When::unless_budget && budget(Tier::device) <= 0)) between = f;
        }
      const Tier tier = away_tier(tensor);
      const bool moves = movable(tensor) && tier != Tier::device && !tensor.step_output;
      if (always < 0 && between < 0 && !moves) continue;
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
                always, budget(Tier::device) > 0 || tensor.farthest == Tier::device ? Tier::device : tier, true};
        } else if (!last && budget(Tier::device) <= 0 && visit_[uses[u + 1]] - visit_[uses[u]] > 1) {
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

  [[noreturn]] void refuse(const Planned& plan, Tier tier) {
    std::string advice = settings_.advice ? settings_.advice(plan.memory) : "";
    for (Tier other : {Tier::host, Tier::nvme})
      if (other != tier && budget(other) > 0 && plan.memory[other].total_bytes() > budget(other))
        advice = " With it, " + option_of(other, settings_) + " must be " +
                 std::to_string(plan.memory[other].total_bytes() + beside(other, settings_)) + " bytes." + advice;
    refuse_budget(plan.program, plan.memory, tier, option_of(tier, settings_), budget(tier) + beside(tier, settings_),
                  beside(tier, settings_), advice);
  }

  struct Candidate {
    size_t waiting;
    Decision decision;
    int64_t bytes;
    double cost;  // seconds a byte, on a coarse scale, so that equal tensors tie
  };

  // Walks over the program and gives up waiting tensors wherever more is alive than `target`.
  bool relieve(const Materialized& now, const MemoryPlan& plan, Tier tier, int64_t target) {
    const bool homes_may_go = tier == Tier::host || one_memory_;
    const int64_t excess = plan[tier].total_bytes() - target;
    if (homes_may_go && homes_first_ && send_homes_away(tier, excess)) return true;
    bool changed = false;
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
    return changed || (homes_may_go && !homes_first_ && send_homes_away(tier, excess));
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
        offer({taken->form, away_tier(tensor), taken->forward_only}, kept_bytes(id.value, taken->form),
              move_seconds(away_tier(tensor), kept_bytes(id.value, taken->form)));
      else if (taken->forward_only)
        offer({taken->form, taken->tier, false}, tensor.bytes(), 1);
      return best;
    }
    if (const Tier tier = away_tier(tensor); waiting.gap.use != kNever && movable(tensor) && tier != Tier::device) {
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

  // Persistent tensors that may, from a tier to NVMe, until `bytes` are gone: those least often used first.
  bool send_homes_away(Tier from, int64_t bytes) {
    std::vector<std::pair<size_t, int32_t>> order;
    for (int32_t t = 0; t < int32_t(program_.tensors.size()); ++t) {
      const Tensor& tensor = program_.tensors[t];
      if (tensor.persistent && tensor.home == from && tensor.farthest == Tier::nvme)
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
  Program start_;  // what each attempt begins with
  Decisions decided_;
  Planned without_;  // were nothing to rest
  const bool one_memory_;
  bool homes_first_ = true, homes_may_go_ = false;
  std::array<int64_t, kTiers> budgets_;  // bytes; 0: none
  std::vector<char> offloaded_;          // by tensor: a plugin lets it rest elsewhere
  int64_t bytes_without_ = 0;            // of the device, were nothing to rest
};

}  // namespace

bool rests(const Program& program) {
  return !program.forms.empty() || std::any_of(program.tensors.begin(), program.tensors.end(), [](const Tensor& t) {
    return t.farthest != Tier::device || t.home != Tier::device;
  });
}

MemoryPlan plan_residency(Program& program, const Residency& settings) {
  program.direct_storage = settings.direct_storage;
  program.one_memory = settings.one_memory();
  const auto away = [](const auto& home) { return home.second != Tier::device; };
  if (rests(program) || (settings.homes && std::any_of(settings.homes->begin(), settings.homes->end(), away)))
    return Planner(program, settings).run();
  MemoryPlan plan = plan_memory(program, settings.backend, settings.threads);
  const int64_t budget = budgets_of(settings)[int(Tier::device)];
  if (budget > 0 && plan.device().total_bytes() > budget)
    refuse_budget(program, plan, Tier::device, option_of(Tier::device, settings),
                  budget + beside(Tier::device, settings), beside(Tier::device, settings),
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
