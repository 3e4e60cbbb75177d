// One configuration, its parts and their pairs; see verify.h.
#include "engine/verify/verify.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "engine/runtime/session.h"
#include "strata/json.h"

namespace strata::verifying {
std::string mesh_text(const Trial& trial) {
  std::vector<std::string> parts;
  for (const auto& [axis, size] : trial.mesh)
    if (size > 1) parts.push_back(fmt::format("{}={}", axis, size));
  if (trial.reproducible) parts.push_back("reproducible");
  if (parts.empty()) parts.push_back("one rank");
  for (const Mode& mode : trial.modes) parts.push_back(fmt::format("{}.{}={}", mode.plugin, mode.option, mode.value));
  return fmt::format("{}", fmt::join(parts, " "));
}

std::string_view name_of(Verdict::Kind kind) {
  switch (kind) {
    case Verdict::Kind::program:
      return "the plain program";
    case Verdict::Kind::same:
      return "bit for bit";
    case Verdict::Kind::within:
      return "within";
    case Verdict::Kind::outside:
      return "OUTSIDE";
    case Verdict::Kind::refused:
      return "refused";
  }
  return "";
}

std::string outcome_text(const Verdict& verdict) {
  const Difference& difference = verdict.difference;
  if (!verdict.reason.empty()) return fmt::format("{}: {}", name_of(verdict.kind), verdict.reason);
  if (difference.where.empty()) return std::string(name_of(verdict.kind));
  return fmt::format("{}: {} differs by {:.1e} of {:.1e}", name_of(verdict.kind), difference.where, difference.relative,
                     difference.bound);
}

Report verify(const Setup& setup, const std::function<void(const Verdict&)>& said) {
  const Session session(setup.config, setup.sets);
  Judge judge(setup);
  const MeshSection& mesh = session.mesh_section;
  const Trial whole{.plugins = {},
                    .mesh = {{"pipeline", mesh.pipeline},
                             {"data", mesh.data},
                             {"replicate", mesh.replicate},
                             {"expert", mesh.expert},
                             {"tensor", mesh.tensor},
                             {"sequence", mesh.sequence}},
                    .reproducible = session.run.reproducible,
                    .budgets = true};
  std::vector<std::string> optimizer, others;
  for (const NamedPlugin& named : session.plugins)
    if (named.plugin != &session.model())
      (judge.provides(named.name, "optimizer") ? optimizer : others).push_back(named.name);
  Report report;
  for (const NamedPlugin& named : session.plugins)
    if (named.plugin == &session.model()) report.program = named.name;

  std::set<std::string> failed;  // sets, so that none is told twice
  const auto add = [&](Trial trial, std::vector<std::string> plugins) {
    plugins.push_back(optimizer.front());
    trial.plugins = std::move(plugins);
    if (!trial.budgets) trial.mesh = judge.mesh_for(trial.plugins, trial.mesh);
    report.verdicts.push_back(judge.judge(trial));
    const Verdict& verdict = report.verdicts.back();
    if (trial.budgets && verdict.kind == Verdict::Kind::refused)  // the whole: nothing else is looked at
      throw Error("the configuration cannot run here: " + verdict.reason +
                  (verdict.reason.starts_with(kNoRoom) ? " " + std::string(kLess) : ""));
    if (said) said(verdict);
    if (verdict.kind != Verdict::Kind::outside) return;
    const Verdict smallest = judge.shrink(verdict);
    if (failed.insert(failure_of(smallest)).second) report.failures.push_back(smallest);
  };
  add(whole, others);
  report.program +=
      fmt::format(" and {} on one rank, {} steps, seed {}, {}", optimizer.front(), setup.steps, session.run.seed,
                  report.verdicts.front().has_data ? "data.train" : "made-up tokens: data.train is not there");
  Trial part = whole;
  part.budgets = false;
  for (const std::string& name : others) add(part, {name});
  for (size_t i = 0; i < others.size(); ++i)
    for (size_t j = i + 1; j < others.size(); ++j)
      if (others.size() > 2) add(part, {others[i], others[j]});
  return report;
}

std::string line_of(const Verdict& verdict) {
  return fmt::format("{:<48} {:<22} {:>10} {:>10}  {}", fmt::format("{}", fmt::join(verdict.trial.plugins, " + ")),
                     mesh_text(verdict.trial), verdict.planned_bytes ? bytes_text(verdict.planned_bytes) : "",
                     verdict.planned_bytes ? bytes_text(verdict.measured_bytes) : "", outcome_text(verdict));
}

std::string failure_of(const Verdict& verdict) {
  std::string text = fmt::format("{} ({})", fmt::join(verdict.trial.plugins, " + "), mesh_text(verdict.trial));
  if (!verdict.reason.empty()) return text + " did not finish: " + verdict.reason;
  return text + fmt::format(" differs from {} first in step {}, in {}: by {:.1e}, of {:.1e} that its bound allows",
                            verdict.beside, verdict.first_step, verdict.difference.where, verdict.difference.relative,
                            verdict.difference.bound);
}

Json to_json(const Verdict& verdict) {
  const auto finite = [](double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); };
  Json::Array plugins;
  for (const std::string& name : verdict.trial.plugins) plugins.emplace_back(name);
  Json::Object mesh;
  for (const auto& [axis, size] : verdict.trial.mesh) mesh.emplace_back(axis, size);
  Json::Array modes;
  for (const Mode& mode : verdict.trial.modes) modes.emplace_back(text(mode));
  return Json::Object{{"plugins", plugins},
                      {"modes", modes},
                      {"mesh", mesh},
                      {"reproducible", verdict.trial.reproducible},
                      {"ranks", verdict.ranks},
                      {"outcome", std::string(name_of(verdict.kind))},
                      {"beside", verdict.beside},
                      {"reason", verdict.reason},
                      {"where", verdict.difference.where},
                      {"difference", finite(verdict.difference.relative)},
                      {"bound", finite(verdict.difference.bound)},
                      {"first_step", verdict.first_step},
                      {"planned_bytes", verdict.planned_bytes},
                      {"measured_bytes", verdict.measured_bytes}};
}

std::string json_of(const Report& report) {
  const auto listed = [](const std::vector<Verdict>& verdicts) {
    Json::Array list;
    for (const Verdict& verdict : verdicts) list.push_back(to_json(verdict));
    return list;
  };
  return Json(Json::Object{{"program", report.program},
                           {"cells", listed(report.verdicts)},
                           {"failures", listed(report.failures)}})
             .dump(1) +
         "\n";
}

}  // namespace strata::verifying
