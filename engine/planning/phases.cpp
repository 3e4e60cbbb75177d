// See phases.h and strata/phases.h.
#include "engine/planning/phases.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "engine/planning/guarded.h"

namespace strata {

std::string text(const Steps& steps) {
  const auto number = [](int64_t step) { return std::to_string(step); };
  if (steps.first == steps.last || steps.last - steps.first < steps.every) return "step " + number(steps.first);
  if (steps.every == 1)
    return steps.last == Steps::kEnd ? "from step " + number(steps.first) + " on"
                                     : "steps " + number(steps.first) + " to " + number(steps.last);
  const int64_t after = steps.last - steps.first;  // sums of what options say could be beyond 64 bits
  std::string text = "steps " + number(steps.first) + ", " + number(steps.first + steps.every);
  if (after / 2 >= steps.every) text += ", " + number(steps.first + 2 * steps.every);
  if (after / 3 >= steps.every) text += ", …";
  return steps.last == Steps::kEnd ? text : text + " up to " + number(steps.last);
}

void PhaseStage::declare(std::string name, const Steps& steps) {
  if (name.empty()) throw Error("a phase has no name.");
  if (steps.first < 1 || steps.last < steps.first || steps.every < 1)
    throw Error("phase \"" + name + "\": steps from " + std::to_string(steps.first) + " to " +
                std::to_string(steps.last) + ", every " + std::to_string(steps.every) +
                ", are none; expected 1 or more, the last not before the first.");
  for (const Declared& known : declared_)
    if (known.name == name)
      throw Error(known.by == plugin_ ? "phase \"" + name + "\" is declared twice."
                                      : "phase \"" + name + "\" is declared by plugin \"" + known.by +
                                            "\" too; enable only one of them, or give the phase another name.");
  declared_.push_back({std::move(name), steps, plugin_});
}

bool Phases::in(std::string_view name) const {
  for (const auto& [known, holds] : all_)
    if (known == name) return holds;
  if (!declared_) return false;
  std::vector<std::string> names;
  for (const auto& [known, holds] : all_) names.push_back(known);
  throw Error("no phase is named \"" + std::string(name) + "\"; plugins declare theirs in stage phases." +
              did_you_mean(name, names));
}

std::string Phases::text() const {
  if (all_.empty()) return "";
  std::string text;
  for (const auto& [name, holds] : all_)
    if (holds) text += (text.empty() ? "" : " + ") + name;
  return text.empty() ? "no phase" : text;
}

PhaseTable::PhaseTable(std::span<const NamedPlugin> plugins) {
  PhaseStage stage;
  for (const NamedPlugin& named : plugins) {
    stage.plugin_ = named.name;
    guarded(named, "phases", [&](Plugin& plugin) { plugin.phases(stage); });
  }
  declared_ = std::move(stage.declared_);
  find_combinations();
}

std::vector<char> PhaseTable::at(int64_t step) const {
  std::vector<char> holds;
  for (const PhaseStage::Declared& phase : declared_) holds.push_back(phase.steps.contain(step));
  return holds;
}

Phases PhaseTable::phases(const std::vector<char>& holds) const {
  Phases phases;
  phases.declared_ = true;
  for (size_t i = 0; i < declared_.size(); ++i) phases.all_.emplace_back(declared_[i].name, holds[i]);
  return phases;
}

Phases PhaseTable::of_program(size_t program) const {
  if (combinations_.empty()) return {};
  Phases of = phases(combinations_.at(program));
  of.has_first_step_ = program == 0;
  of.is_first_step_ = program == 0 && first_step_alone_;
  return of;
}

Phases PhaseTable::none() const {
  Phases none = phases(std::vector<char>(declared_.size(), false));
  none.has_first_step_ = false;
  return none;
}

// Between two steps at which a phase begins or ends for good, what holds repeats with the periods' common multiple.
void PhaseTable::find_combinations() {
  std::set<int64_t> borders{1};
  int64_t period = 1;
  std::string periodic;
  for (const PhaseStage::Declared& phase : declared_) {
    borders.insert(phase.steps.first);
    if (phase.steps.last < Steps::kEnd) borders.insert(phase.steps.last + 1);
    if (phase.steps.every == 1) continue;
    periodic +=
        (periodic.empty() ? "\"" : ", \"") + phase.name + "\" (every " + std::to_string(phase.steps.every) + ")";
    if (phase.steps.every > kLongest || (period = std::lcm(period, phase.steps.every)) > kLongest)
      throw Error("the phases " + periodic + " of the enabled plugins repeat only after more than " +
                  std::to_string(kLongest) + " steps; choose periods with a smaller common multiple.");
  }
  std::set<std::vector<char>> seen;
  const std::vector<char> first = at(1);
  first_step_alone_ = true;
  for (auto border = borders.begin(); border != borders.end(); ++border) {
    const int64_t end = std::next(border) == borders.end() ? Steps::kEnd : *std::next(border);
    for (int64_t i = 0; i < std::min(period, end - *border); ++i) {
      const int64_t step = *border + i;
      std::vector<char> holds = at(step);
      if (holds == first && (step > 1 || period < end - step)) first_step_alone_ = false;  // again a period later
      if (seen.insert(holds).second) combinations_.push_back(std::move(holds));
    }
    if (combinations_.size() > kMost)
      throw Error("the phases of the enabled plugins make more than " + std::to_string(kMost) +
                  " different programs:\n" + text() + "Enable fewer of them, or let their steps coincide.");
  }
}

size_t PhaseTable::of_step(int64_t step) const {
  if (combinations_.size() < 2) return 0;
  const auto found = std::find(combinations_.begin(), combinations_.end(), at(step));
  STRATA_CHECK(found != combinations_.end());
  return size_t(found - combinations_.begin());
}

std::string PhaseTable::text() const {
  std::string all;
  for (const PhaseStage::Declared& phase : declared_)
    all += "phase \"" + phase.name + "\" (of plugin \"" + phase.by + "\"): " + strata::text(phase.steps) + "\n";
  return all;
}

namespace {

std::string type_and_role(const Tensor& tensor) {
  std::string text = std::string(name_of(tensor.dtype)) + strata::text(tensor.full_shape()) + " among the " +
                     std::string(name_of(tensor.role));
  for (const Split& split : tensor.layout)
    text += ", dimension " + std::to_string(split.dimension) + " split over " + split.axis;
  return text;
}

bool same(const Tensor& a, const Tensor& b) {
  const Lasting &of_a = *a.lasting, &of_b = *b.lasting;
  return a.shape == b.shape && a.dtype == b.dtype && a.role == b.role && a.layout == b.layout &&
         of_a.initializer == of_b.initializer &&
         (of_a.rounded_from.empty() || of_b.rounded_from.empty() || of_a.rounded_from == of_b.rounded_from);
}

}  // namespace

void share_persistent(std::span<const SharingProgram> programs) {
  if (programs.size() < 2) return;
  std::vector<Tensor> all;                                      // in the order of the first program that has each
  std::map<std::string, std::pair<size_t, std::string>> known;  // by name: where in `all`, and in which program
  for (const auto& [name, program] : programs)
    for (const Tensor& tensor : program->tensors) {
      if (!tensor.persistent || tensor.part_of) continue;
      const auto [at, is_new] = known.emplace(tensor.name, std::pair(all.size(), name));
      if (is_new) {
        all.push_back(tensor);
        continue;
      }
      Tensor& first = all[at->second.first];
      if (!same(first, tensor))
        throw Error("the programs of a run share their persistent tensors, but \"" + tensor.name + "\" is " +
                    type_and_role(first) + " in " + at->second.second + " and " + type_and_role(tensor) + " in " +
                    name + "; plugins must declare it alike in all phases.");
      // The program of validation knows nothing of who trains apart.
      const std::string own_over = std::max(first.lasting->own_over, tensor.lasting->own_over);
      if (first.lasting->rounded_from.empty()) first.lasting = tensor.lasting;
      if (!own_over.empty()) first.lasting.change([&](Lasting& lasting) { lasting.own_over = own_over; });
    }
  for (const auto& [name, program] : programs)
    for (const Tensor& tensor : all)
      if (const TensorId id = program->find(tensor.name))
        (*program)[id].lasting = tensor.lasting;
      else
        program->add(tensor);
}

}  // namespace strata
