// Which of a series of plans is taken; see residency.h. Single plans are attempts.h's: homes and tiers homes.h's, what
// rests without a budget decisions_at_start.h's, what has to under one relief.h's. local_search.h looks around them.
#include "engine/planning/residency.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "engine/planning/attempts.h"
#include "engine/planning/decisions_at_start.h"
#include "engine/planning/predict.h"
#include "strata/device.h"

namespace strata {
namespace {

constexpr size_t kFewOps = 3000;  // less is not worth threads

// How many plans are made: as many as 500,000 ops allow (planning takes 2 to 3 us an op and plan), within limits.
constexpr size_t kMostAttempts = 32;
size_t most_attempts(size_t ops) { return std::clamp<size_t>(500'000 / std::max<size_t>(1, ops), 4, kMostAttempts); }

// And of the local search; 0: the program is too large for one.
size_t most_of_search(size_t ops) {
  const size_t most = 25'000 / std::max<size_t>(1, ops);
  return most < 64 ? 0 : most;
}

class Planner {
 public:
  // `to_beat`: seconds; only a faster plan is wanted, if any. `least`: bytes of the device that plans are known to take
  // at least; without it they are looked for.
  Planner(Program& program, const ResidencySettings& settings, double to_beat = HUGE_VAL, int64_t least = INT64_MAX)
      : program_(program),
        settings_(settings),
        to_beat_(to_beat),
        homes_(program, settings),
        uses_(program),
        least_(least) {}

  // Without budgets one plan, or of those that bring things back earlier or later the smallest that costs little. With
  // budgets the fastest of a series of plans that fits. The series does not depend on the budgets, so a larger one
  // never gives a slower plan, and what a refusal says is enough is enough.
  std::optional<Planned> run() {
    const int64_t alignment = program_.storage_directories.empty() ? kAlignment : kStorageAlignment;
    without_.memory = plan_memory(program_, settings_.backend, settings_.threads, alignment);
    place_closely(program_, without_.memory);
    bytes_without_ = without_.memory.device().total_bytes();
    // Of small tensors the blocks of a disk take more than they hold: nobody who goes without the disk has those.
    plain_bytes_ = alignment == kAlignment
                       ? bytes_without_
                       : plan_memory(program_, settings_.backend, settings_.threads, kAlignment).device().total_bytes();
    moves_ = moves_any(program_);
    for (const auto& [tensor, forms] : program_.forms)
      for (const RestingForm& form : forms)
        must_restore_ |= !form.exact && form.when == RestingForm::When::after_forward;
    if (!moves_) without_.program = program_;
    const bool budgets = has_budgets();
    if (budgets) seconds_without_ = predict(program_, without_.memory, settings_.rates).seconds;
    homes_.choose_homes(program_);
    homes_.choose_update_tiers(program_);
    Choice start{.decisions = decisions_at_start(program_, uses_, homes_, budget(Tier::device) <= 0)};
    for (const Tensor& tensor : program_.tensors) start.homes.push_back(tensor.home);
    const auto may_go = [](const Tensor& t) { return t.persistent && !t.part_of && t.home != t.farthest; };
    homes_may_go_ = homes_.one_memory() && std::any_of(program_.tensors.begin(), program_.tensors.end(), may_go);
    starts_.push_back(std::move(start));
    const auto new_attempts = [&] {
      return std::make_unique<Attempts>(program_, settings_, homes_, uses_, bytes_without_);
    };
    attempts_ = new_attempts();
    const int at_once = program_.ops.size() < kFewOps ? 1 : settings_.plans_at_once;
    for (int i = 0; i < at_once && at_once > 1; ++i) makers_.push_back(new_attempts());
    std::optional<Planned> found = budgets ? within_budgets() : without_budgets();
    if (!found) return {};
    Planned& chosen = *found;
    // What is to be elsewhere goes there all the same.
    if (!budgets && !must_restore_ && chosen.memory.device().total_bytes() > bytes_without_)
      if (Planned moved = without_restoring();
          moved.memory.device().total_bytes() < chosen.memory.device().total_bytes() && !over(moved.memory))
        chosen = std::move(moved);
    if (const auto beyond = over(chosen.memory)) refuse(chosen, *beyond);
    verify(chosen.program, "residency");
    return found;
  }
  // What someone should know whose budget costs more than it saves, of a plan that takes so long.
  std::string notice(double seconds) {
    constexpr double kMuch = 3;
    if (!has_budgets() || seconds <= kMuch * seconds_without_) return "";
    char times[32];
    std::snprintf(times, sizeof times, "%.1f", seconds / seconds_without_);
    std::string text = "a step takes " + std::string(times) + " times as long as with memory for everything";
    std::stable_sort(beyond_.begin(), beyond_.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    const Bounds wanted{seconds / 2, {0, budget(Tier::host), budget(Tier::nvme)}};
    // More memory is hardly ever slower, so of those tried the smallest that will do is looked for by halves.
    std::optional<int64_t> enough;
    for (size_t first = 0, last = beyond_.size(), i = last - 1; first < last; i = (first + last) / 2) {
      Planned plan = attempt(beyond_[i].second, wanted);
      bool will_do = plan.is_made() && !beyond(plan.memory, wanted.bytes);
      if (will_do) predict_time(plan, settings_.rates), will_do = plan.seconds <= wanted.seconds;
      if (!will_do && !enough) break;
      if (will_do) enough = plan.memory.device().total_bytes();
      (will_do ? last : first) = will_do ? i : i + 1;
    }
    if (enough)
      text += "; with " + option_of(Tier::device, settings_) + " = " + std::to_string(*enough) + " (" +
              bytes_text(*enough) + ") it would take less than half of that";
    return text + ".";
  }

  int64_t least() const { return least_; }  // bytes of the device, of all plans under a budget

 private:
  Planned attempt(const Aim& aim, const std::optional<Bounds>& wanted = {}) {
    return attempts_->make(starts_[aim.start], aim, wanted);
  }
  // One after the other, while others of them are made ahead.
  AttemptsAhead attempts_ahead(std::vector<Aim> aims) const {
    return {makers_.empty() ? std::span(&attempts_, 1) : makers_, starts_, std::move(aims)};
  }

  // Where a plan is beyond one budget alone: no other that is as far beyond that is nearer to fitting.
  std::array<int64_t, kTiers> what_would_not_help(const Planned& refused) const {
    const auto [count, tier, bytes] = excess(refused.memory);
    std::array<int64_t, kTiers> limits{};
    if (count == 1) limits[size_t(tier)] = bytes;
    return limits;
  }
  // Where restoring takes more memory than it saves: the plain program, or the one that moves what it must.
  Planned without_restoring(const std::optional<Bounds>& wanted = {}) {
    Planned plan;
    if (moves_)
      plan = attempt(
          {.targets = {budget(Tier::device) > 0 ? bytes_without_ : 0, budget(Tier::host) > 0, 0}, .forms = false},
          wanted);
    else
      plan = without_;
    plan.last_resort = true;
    if (!moves_)
      for (int t = 0; t < kTiers; ++t) {
        const TierPlan& tier = plan.memory.tiers[t];
        plan.least[size_t(t)] = tier.persistent_bytes + tier.live_peak_bytes;
      }
    return plan;
  }

  Planned without_budgets() {
    Planned tight = attempt({.room = homes_.one_memory() ? 1 : 0});
    const bool stored = tight.memory[Tier::nvme].total_bytes() > 0;
    if (!homes_.one_memory() || !stored) return tight;
    // Half of what it would take without is enough for what is on its way; beyond that time buys memory.
    constexpr int kSteps = 4;
    constexpr double kLittle = 1.05;
    const int64_t least = tight.memory.device().total_bytes(), most = std::max(least, plain_bytes_ / 2);
    std::vector<Planned> plans;
    predict_time(plans.emplace_back(std::move(tight)), settings_.rates);
    for (int step = 1; step <= kSteps && most > least && plans.back().waits > 0; ++step)
      if (Planned plan = attempt({.room = least + (most - least) * step / kSteps});
          plan.memory.device().total_bytes() <= most)
        predict_time(plans.emplace_back(std::move(plan)), settings_.rates);
    double fastest = plans.front().seconds;
    for (const Planned& plan : plans) fastest = std::min(fastest, plan.seconds);
    return std::move(*std::find_if(plans.begin(), plans.end(),
                                   [&](const Planned& plan) { return plan.seconds <= kLittle * fastest; }));
  }

  // Simpler settings beside what plugins demand: recomputation by groups of blocks, in two levels, of cheap ops alone;
  // everything away that may go, with recomputation and without.
  void add_starts(size_t most) {
    const auto with = [&](Choice start, const Pattern* pattern, bool away) {
      if (pattern) add_pattern(program_, uses_, *pattern, start.decisions);
      if (away) start.decisions.add(decisions_at_start(program_, uses_, homes_, true));
      starts_.push_back(std::move(start));
    };
    const std::vector<Pattern> patterns = patterns_of(program_, most);
    if (moves_ && budget(Tier::device) > 0) {
      with(starts_[0], nullptr, true);
      for (size_t p : {0, 2, 3})  // groups of one block, nested ones, groups of two
        if (p < patterns.size()) with(starts_[0], &patterns[p], true);
    }
    away_ = starts_.size();
    for (const Pattern& pattern : patterns) with(starts_[0], &pattern, false);
  }

  // The series of aims, the most useful first, so that of large programs, of which fewer plans are made, the first
  // will do. It does not depend on the budget of the device: from `least` to everything kept, denser at the low end,
  // where a little memory makes much difference.
  std::vector<Aim> series(int64_t least, int64_t host_target) const {
    std::vector<Aim> aims;
    const auto add = [&](double share, size_t start, bool again_first = false) {
      if (start >= starts_.size()) return;
      const int64_t target = least + int64_t(double(bytes_without_ - least) * share);
      for (bool homes_first : {true, false})
        if (homes_first || (homes_may_go_ && start == 0))
          aims.push_back({.targets = {share < 0 ? 0 : target, host_target, 0},
                          .homes_first = homes_first,
                          .again_first = again_first,
                          .start = start});
    };
    constexpr double kAsItIs = -1;
    if (budget(Tier::device) <= 0) {
      add(kAsItIs, 0);
      return aims;
    }
    const size_t starts = starts_.size(), groups = away_, selective = away_ + 1, nested = away_ + 2;
    // Of the largest programs four aims are all: everything kept, what is demanded in the least memory, everything away
    // with each block made again (of what is away alone each microbatch moves all activations), and what lies between.
    const size_t again = away_ > 1 ? 2 : groups;
    if (bytes_without_ > least) {
      for (double share : {1.0, 0.0}) add(share, 0);
      for (size_t start : {again, selective}) add(kAsItIs, start);
      for (double share : {0.25, 0.5}) add(share, 0);
    } else {
      add(0, 0);
    }
    for (size_t start = 1; start < std::min(starts, away_ + 3); ++start)
      if ((start != again && start != selective) || bytes_without_ <= least) add(kAsItIs, start);
    if (bytes_without_ > least) {
      for (double share : {0.1, 0.03}) {
        for (size_t start = 1; start < away_; ++start) add(share, start);
        for (size_t start : {groups, nested}) add(share, start);
        add(share, 0);
      }
      for (double share : {0.75, 0.125, 0.015}) add(share, 0);
      for (size_t start : {groups, nested, selective}) add(0.25, start);
      for (size_t start : {groups, nested}) add(0.01, start), add(0, start);
      for (double share : {0.0, 0.01, 0.03, 0.1}) add(share, 0, true);
    }
    for (size_t start = away_ + 3; start < starts; ++start) add(kAsItIs, start);
    if (bytes_without_ > least)
      for (double share : {0.875, 0.625, 0.375, 0.3125, 0.1875, 0.0625}) add(share, 0);
    return aims;
  }

  // Where something fits: the most that does, from what is demanded, in steps of 4% beyond the least, since more room
  // is hardly ever slower; and simpler settings as they are, or relieved so far.
  std::vector<Aim> nearest(int64_t least, int64_t host_target) const {
    const double all = double(bytes_without_ - least), room = double(budget(Tier::device) - least);
    if (all <= 0 || room <= 0) return {};
    constexpr double kSteps = 16;  // by which it doubles
    const double share = std::min(1.0, std::exp2(-std::ceil(kSteps * std::log2(all / room)) / kSteps));
    const int64_t target = least + int64_t(all * share);
    std::vector<Aim> aims{{.targets = {target, host_target, 0}, .by_budget = true}};
    const bool many = most_attempts(program_.ops.size()) == kMostAttempts;  // the series has simpler settings as well
    const bool small = most_of_search(program_.ops.size()) > 0;
    const size_t again = away_ > 1 ? 2 : away_, in_twos = away_ > 4 ? 4 : away_, selective = away_ + 1;
    for (size_t start : many && !small ? std::vector{away_} : std::vector{again, in_twos, away_, selective})
      if (start < starts_.size() && start != aims.back().start)
        aims.push_back({.targets = {many ? target : 0, host_target, 0},
                        .start = start,
                        .by_budget = true,
                        .otherwise = many ? 0 : target});
    for (size_t i = 0, first = aims.size(); small && i < first; ++i)
      for (int steps = 1; steps < 6; ++steps) {
        aims.push_back(aims[i]);
        aims.back().targets[0] = least + int64_t(all * share * std::exp2(-steps / kSteps));
      }
    for (size_t i = 0, first = aims.size(); many && i < first; ++i)
      aims.push_back(aims[i]), aims.back().again_first = true;
    return aims;
  }

  // Whether `b` is to be preferred: one that takes no more than without any of this, then the faster one, and of equals
  // the one that gives up less.
  bool better(const Planned& b, const Planned& a) const {
    const auto rank = [&](const Planned& plan) {
      const int64_t bytes = plan.memory.device().total_bytes();
      return std::tuple(bytes > bytes_without_, plan.last_resort, plan.seconds, -bytes);
    };
    return rank(b) < rank(a);
  }

  std::optional<Planned> within_budgets() {
    const bool host = budget(Tier::host) > 0;
    size_t left = settings_.plans > 0 ? size_t(settings_.plans) : most_attempts(program_.ops.size());
    add_starts(left / 2);
    std::optional<Planned> best, refused;
    int64_t& least = least_;
    int64_t least_asked = INT64_MAX;  // the same of plans that do what the plugins ask for, where the host has room
    std::vector<std::pair<int64_t, Aim>> skipped;  // of such plans that were not planned to their end: bytes at least
    const auto count_asked = [&](const MemoryPlan& plan) {
      if (!beyond(plan, {0, budget(Tier::host), budget(Tier::nvme)}))
        least_asked = std::min(least_asked, plan.device().total_bytes());
    };
    const auto consider = [&](Planned plan, bool by_budget = false) {
      least = std::min(least, plan.least[int(Tier::device)]);
      if (!plan.is_made()) return;  // it would not be taken
      if (!plan.last_resort && !by_budget) count_asked(plan.memory);
      if (!over(plan.memory)) {
        predict_time(plan, settings_.rates);
        if (!best || better(plan, *best)) best = std::move(plan);
      } else if (!refused || excess(plan.memory) < excess(refused->memory)) {
        refused = std::move(plan);
      }
    };
    // Whether the i-th was considered: not what would give a plan again.
    const auto consider_aim = [&](AttemptsAhead& ahead, size_t i) {
      const Aim& aim = ahead[i];
      const auto [same_from, is_new] =
          same_from_.try_emplace({aim.start, aim.homes_first, aim.targets[int(Tier::host)]}, INT64_MAX);
      const int64_t target = aim.targets[int(Tier::device)];
      if ((target > 0 ? target : bytes_without_) >= same_from->second) return false;
      const bool settled = best && best->memory.device().total_bytes() <= bytes_without_;
      std::optional<Bounds> wanted;
      if (settled)
        wanted = {best->seconds, homes_.budgets()};
      else if (to_beat_ < HUGE_VAL)
        wanted = {to_beat_, homes_.budgets()};
      else if (refused && !best)  // what does not fit either is of use where it takes less
        wanted = {HUGE_VAL, what_would_not_help(*refused)};
      Planned plan = ahead.take(i, wanted);
      Aim asked = aim;
      const auto bytes_of = [&](Tier tier) {
        return plan.is_made() ? plan.memory[tier].total_bytes() : plan.least[size_t(tier)];
      };
      const bool as_it_is = aim.otherwise > 0;  // which the series has, too
      if (as_it_is && bytes_of(Tier::device) > budget(Tier::device)) {
        beyond_.push_back({bytes_of(Tier::device), aim});
        if (plan.is_made())
          count_asked(plan.memory);
        else
          skipped.push_back({plan.least[int(Tier::device)], aim});
        asked.targets[int(Tier::device)] = aim.otherwise;
        plan = attempt(asked, wanted);
      }
      // What was relieved enough by what is alive may lie a little apart: relieved by so much more, it fits. Not so on
      // the device while nothing fits: the smallest budget that does is not to depend on the one that is asked about.
      // Nor where it is too slow already.
      Aim tighter = asked;
      for (int again = settings_.same_series ? 2 : 0; again < 2; ++again) {
        const auto beyond_by = [&](Tier tier) {
          const int64_t target = asked.targets[size_t(tier)];
          return target > 1 && bytes_of(tier) > budget(tier) ? bytes_of(tier) - target : 0;
        };
        const int64_t of_device = best ? beyond_by(Tier::device) : 0, of_host = beyond_by(Tier::host);
        const bool is_slow = !plan.is_made() && !exceeds(plan.least, wanted->bytes);
        if (of_device + of_host == 0 || is_slow) break;
        tighter.targets[int(Tier::device)] -= (again + 1) * of_device;
        tighter.targets[int(Tier::host)] -= (again + 1) * of_host;
        if (std::min(tighter.targets[0], tighter.targets[1]) < 0) break;
        plan = attempt(tighter, wanted);
      }
      same_from->second = std::min(same_from->second, plan.same_from);
      const bool is_made = plan.is_made();
      const int64_t bytes = bytes_of(Tier::device);
      if (budget(Tier::device) > 0 && target != 1 && bytes > budget(Tier::device)) beyond_.push_back({bytes, aim});
      const bool by_budget = aim.by_budget && !(as_it_is && asked.targets[int(Tier::device)] == 0);
      if (!is_made && !by_budget) skipped.push_back({plan.least[int(Tier::device)], aim});
      consider(std::move(plan), by_budget);
      return true;
    };
    // The least of all: from what is demanded, from everything away, from recomputation in two levels.
    if (least == INT64_MAX) {
      std::vector<Aim> smallest;
      for (size_t start : {size_t{0}, size_t{1}, away_ + 2})
        if (start == 0 || (start < starts_.size() && (start != 1 || away_ > 1)))
          smallest.push_back({.targets = {1, host, 0}, .start = start});
      smallest.push_back({.targets = {1, host, 0}, .again_first = true});
      AttemptsAhead of_smallest = attempts_ahead(std::move(smallest));
      for (size_t i = 0; i < of_smallest.size(); ++i) consider_aim(of_smallest, i);
    }
    const size_t most = host ? left / 2 : left;
    struct Series {
      std::vector<Aim> aims;
      size_t next = 0, made = 0;
    };
    const auto begin = [&](int64_t host_target) {
      Series begun{series(least, host_target)};
      std::vector<Aim>& aims = begun.aims;
      // What is relieved to more than the budget does not fit.
      if (best && budget(Tier::device) > 0 && !settings_.same_series) {
        const std::vector<Aim> first = nearest(least, host_target);
        const auto too_much = std::stable_partition(aims.begin(), aims.end(), [&](const Aim& aim) {
          return aim.targets[int(Tier::device)] <= budget(Tier::device);
        });
        for (auto aim = too_much; aim != aims.end(); ++aim) beyond_.push_back({aim->targets[int(Tier::device)], *aim});
        aims.erase(too_much, aims.end());
        const auto comes_first = [&](const Aim& aim) {
          return std::any_of(first.begin(), first.end(), [&](const Aim& other) { return makes_the_same(aim, other); });
        };
        const size_t would_be_made = std::min(aims.size(), most - std::min(most, first.size()));
        begun.made = size_t(std::count_if(aims.begin(), aims.begin() + int64_t(would_be_made), comes_first));
        std::erase_if(aims, comes_first);
        aims.insert(aims.begin(), first.begin(), first.end());
      }
      return begun;
    };
    const auto go_on = [&](Series& begun, bool until_one_fits = false) {
      AttemptsAhead ahead = attempts_ahead({begun.aims.begin() + int64_t(begun.next), begun.aims.end()});
      for (size_t i = 0; i < ahead.size() && begun.made < most && !(until_one_fits && best); ++i, ++begun.next)
        begun.made += consider_aim(ahead, i) || settings_.same_series;
    };
    // Whether the budgets can be met at all is a question to plans that give up on the host what they can; so the
    // answer for one budget does not hang on the other's series. Once one fits, those that use the host's budget are
    // faster, and fewer of the others are worth planning to their end.
    Series least_on_host = begin(host);
    go_on(least_on_host, host);
    const bool one_fits = best.has_value();
    const auto use_host = [&] {
      Series all_of_host = begin(budget(Tier::host));
      go_on(all_of_host);
    };
    if (host && one_fits) {
      use_host();
      go_on(least_on_host);
    }
    if (budget(Tier::device) > 0)
      if (auto found = search_around(least)) consider(attempts_->make(*found, {.room = found->room}, {}));
    const bool must = to_beat_ == HUGE_VAL;
    std::optional<Planned> last;
    const bool settled = best && best->memory.device().total_bytes() <= bytes_without_ && !best->last_resort;
    const double beaten_by = settled ? best->seconds : best ? HUGE_VAL : to_beat_;
    if (!must_restore_)
      last = without_restoring(beaten_by < HUGE_VAL ? std::optional(Bounds{beaten_by, {}}) : std::nullopt);
    if (last && !last->is_made()) last.reset();  // slower than what there is
    if (!best && must && (!last || over(last->memory))) {
      if (last) consider(std::move(*last));
      return std::move(best ? *best : *refused);
    }
    if (host && !one_fits) use_host();
    if (last) {
      // Restoring needs memory too: what is asked for and saves none need not be. Whether it does is not to hang on
      // which plans were looked into under this budget.
      const int64_t bytes = last->memory.device().total_bytes();
      predict_time(*last, settings_.rates);
      if (!over(last->memory) && last->seconds < (best ? best->seconds : to_beat_))
        for (const auto& [at_least, aim] : skipped)
          if (least_asked >= bytes && at_least < bytes) count_asked(attempt(aim).memory);
      last->last_resort = bytes > least_asked;
      consider(std::move(*last));
    }
    if (!must && best && (best->last_resort || best->seconds >= to_beat_)) best.reset();
    return best;
  }

  // Of small programs: what a local search finds that fits, the fastest; where nothing does, the smallest.
  std::optional<Choice> search_around(int64_t least) {
    const size_t most = settings_.plans > 0 ? 0 : most_of_search(program_.ops.size());
    if (most == 0) return {};
    std::vector<Choice> begin = starts_;
    const int64_t host = budget(Tier::host) > 0;
    for (double share : {1.0, 0.5, 0.25, 0.1, 0.0})
      for (bool homes_first : {true, false})
        if (homes_first || homes_may_go_) {
          const int64_t target = least + int64_t(double(std::max(bytes_without_ - least, int64_t{0})) * share);
          for (bool again_first : {false, true})
            begin.push_back(
                *attempt({.targets = {target, host, 0}, .homes_first = homes_first, .again_first = again_first})
                     .choice);
        }
    LocalSearch search(program_, uses_, homes_, starts_[0].decisions, bytes_without_);
    search.run(begin, most, [&](const Choice& choice) -> std::optional<LocalSearch::Reached> {
      Planned plan = attempts_->make(choice, {.room = choice.room}, {});
      if (plan.memory.device().total_bytes() > bytes_without_) return {};
      predict_time(plan, settings_.rates);
      LocalSearch::Reached reached{.seconds = plan.seconds, .limited = plan.limited};
      for (int t = 0; t < kTiers; ++t) reached.bytes[size_t(t)] = plan.memory.tiers[t].total_bytes();
      return reached;
    });
    const auto rank = [&](const LocalSearch::Point& point) {
      const auto& bytes = point.reached.bytes;
      auto beyond = homes_.budgets();
      for (size_t t = 0; t < size_t(kTiers); ++t)
        beyond[t] = beyond[t] > 0 ? std::max<int64_t>(0, bytes[t] - beyond[t]) : 0;
      return std::tuple(beyond[1] + beyond[2], beyond[0], point.reached.seconds, bytes);
    };
    const auto& front = search.front();
    const auto best =
        std::min_element(front.begin(), front.end(), [&](const auto& a, const auto& b) { return rank(a) < rank(b); });
    if (best == front.end()) return {};
    return best->choice;
  }

  // How far a plan is from fitting: beyond how many budgets, which one first, and what it takes there.
  std::tuple<int, int, int64_t> excess(const MemoryPlan& plan) const {
    int beyond = 0;
    for (int t = 0; t < kTiers; ++t) {
      const int64_t most = homes_.budgets()[t];
      beyond += most > 0 && plan.tiers[t].total_bytes() > most;
    }
    return {beyond, int(*over(plan)), plan[*over(plan)].total_bytes()};
  }

  int64_t budget(Tier tier) const { return homes_.budget(tier); }
  bool has_budgets() const { return budget(Tier::device) > 0 || budget(Tier::host) > 0; }
  // The first tier whose arena is beyond its budget.
  std::optional<Tier> over(const MemoryPlan& plan) const { return beyond(plan, homes_.budgets()); }

  [[noreturn]] void refuse(const Planned& plan, Tier tier) {
    std::string advice = settings_.advice ? settings_.advice(plan.memory) : "";
    for (Tier other : {Tier::host, Tier::nvme})
      if (other != tier && budget(other) > 0 && plan.memory[other].total_bytes() > budget(other))
        advice = " With it, " + option_of(other, settings_) + " must be " +
                 std::to_string(plan.memory[other].total_bytes() + beside(other, settings_)) + " bytes." + advice;
    refuse_budget(plan.program, plan.memory, tier, option_of(tier, settings_), budget(tier) + beside(tier, settings_),
                  beside(tier, settings_), advice);
  }

  Program& program_;
  const ResidencySettings& settings_;
  const double to_beat_;
  const Homes homes_;
  const Uses uses_;
  std::unique_ptr<Attempts> attempts_;
  std::vector<std::unique_ptr<Attempts>> makers_;  // of those that are made ahead; none: attempts_
  std::vector<Choice> starts_;                     // what plugins demand; from 1 on simpler settings added to it
  size_t away_ = 1;                                // of them, the first that leaves things where they are
  bool moves_ = false;                             // tensors may be elsewhere
  bool must_restore_ = false;                      // with forms that are not exact, also where that saves nothing
  Planned without_;                                // were nothing to rest; its program only where nothing moves
  bool homes_may_go_ = false;
  std::vector<std::pair<int64_t, Aim>> beyond_;  // tried, and beyond the budget of the device: bytes, or at least
  // By start, order of homes and target of the host: Planned::same_from of what was tried.
  std::map<std::tuple<size_t, bool, int64_t>, int64_t> same_from_;
  double seconds_without_ = 0;  // of a step, were nothing to rest
  int64_t least_;               // bytes of the device, of all plans under a budget
  int64_t bytes_without_ = 0;   // of the device, were nothing to rest
  int64_t plain_bytes_ = 0;     // the same without a disk, whose blocks tensors fill
};

// The plan of a program of which nothing rests anywhere.
MemoryPlan plan_plainly(const Program& program, const ResidencySettings& settings) {
  MemoryPlan plan = plan_memory(program, settings.backend, settings.threads);
  place_closely(program, plan);
  const int64_t budget = budgets_of(settings)[int(Tier::device)];
  if (budget > 0 && plan.device().total_bytes() > budget)
    refuse_budget(program, plan, Tier::device, option_of(Tier::device, settings),
                  budget + beside(Tier::device, settings), beside(Tier::device, settings),
                  settings.advice ? settings.advice(plan) : "");
  return plan;
}

// Where a device has room for states that rest elsewhere, they need not move: some are kept on it, and what is faster
// takes the place of `chosen`. `given` is the program as it was before any plan. So that more memory never gives a
// slower plan, shares of all states are tried that do not depend on the budget; in large programs, of which few plans
// are made, as many as there is room for, three quarters and half of that, until something is faster.
void keep_states(const Program& given, const ResidencySettings& settings, int64_t least, Planned& chosen) {
  constexpr size_t kPlans = 10;  // of each
  const size_t most = most_attempts(given.ops.size());
  ResidencySettings few = settings;
  few.plans = int(std::min(most, kPlans));
  few.same_series = most == kMostAttempts;
  const int64_t room = std::max<int64_t>(0, settings.device_budget - least);
  std::vector<int64_t> amounts{room, room / 4 * 3, room / 2};
  if (few.same_series) {
    Program all = given;
    const int64_t bytes = keep_on_device(all, INT64_MAX);
    amounts = {bytes};
    for (int sixteenths : {12, 8, 6, 4, 2, 1}) amounts.push_back(bytes / 16 * sixteenths);
  }
  int64_t before = 0;
  for (int64_t amount : amounts) {
    if (amount > settings.device_budget) continue;
    Program kept = given;
    const int64_t bytes = keep_on_device(kept, amount);
    if (bytes == 0 || bytes == before) continue;
    before = bytes;
    if (auto faster = Planner(kept, few, chosen.seconds, few.same_series ? INT64_MAX : least + bytes).run()) {
      chosen = std::move(*faster);
      if (!few.same_series) return;
    }
  }
}

}  // namespace

bool rests(const Program& program) {
  return !program.forms.empty() || std::any_of(program.tensors.begin(), program.tensors.end(), [](const Tensor& t) {
    return t.farthest != Tier::device || t.home != Tier::device;
  });
}

MemoryPlan plan_residency(Program& program, const ResidencySettings& settings) {
  program.direct_storage = settings.direct_storage;
  program.one_memory = settings.one_memory();
  const auto away = [](const auto& home) { return home.second != Tier::device; };
  if (!rests(program) && !(settings.homes && std::any_of(settings.homes->begin(), settings.homes->end(), away)))
    return plan_plainly(program, settings);
  const bool may_keep = !settings.one_memory() && settings.device_budget > 0 && !settings.homes;
  const Program given = may_keep ? program : Program();
  Planner planner(program, settings);
  Planned chosen = *planner.run();
  if (may_keep) keep_states(given, settings, planner.least(), chosen);
  chosen.memory.notice = planner.notice(chosen.seconds);
  program = std::move(chosen.program);
  return std::move(chosen.memory);
}

std::map<std::string, Tier> homes_of(const Program& program) {
  std::map<std::string, Tier> homes;
  for (const Tensor& tensor : program.tensors)
    if (tensor.persistent) homes[tensor.name] = tensor.home;
  return homes;
}

}  // namespace strata
