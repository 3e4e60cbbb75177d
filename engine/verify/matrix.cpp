// What cells there are, and running them; see matrix.h.
#include "engine/verify/matrix.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <random>
#include <set>

#include "base/clock.h"
#include "engine/plugin/loader.h"
#include "engine/runtime/session.h"
#include "engine/verify/balance.h"

namespace strata::verifying {
namespace {

using Names = std::vector<std::string>;
constexpr int64_t kMostRanks = 8;

// Options of plugins that the configuration does not have are for sets with them, and do not enable them.
std::vector<std::string> without_more_plugins(const Setup& setup) {
  const Config config = Config::load(setup.config, {});
  const ConfigTable* plugins = config.root().table("plugins");
  std::vector<std::string> sets = setup.sets;
  for (const std::string& set : setup.sets) {
    const std::string_view prefix = "plugins.";
    if (!set.starts_with(prefix) || set.ends_with(".enabled=true")) continue;
    const std::string name = set.substr(prefix.size(), set.find_first_of(".=", prefix.size()) - prefix.size());
    if (!plugins || !plugins->table(name)) sets.push_back("plugins." + name + ".enabled=false");
  }
  return sets;
}

class Maker {
 public:
  explicit Maker(const MatrixSetup& setup) : setup_(setup), judge_(setup.setup), random_(setup.seed) {
    const Session session(setup.setup.config, without_more_plugins(setup.setup));
    matrix_.setup = setup;
    for (const NamedPlugin& named : session.plugins)
      if (judge_.provides(named.name, "optimizer")) matrix_.optimizer = named.name;
    for (const std::string& name : plugin_names(session.run.plugin_path))
      if (name != kSumsPlugin && !judge_.provides(name, "model")) matrix_.plugins.push_back(name);
    if (matrix_.plugins.size() < 2) throw Error("no plugins are found beside the optimizer; there is nothing to pair.");
  }

  Matrix make(const std::function<void(const Cell&)>& said) {
    const double began = seconds_now();
    std::vector<Cell> cells;
    for (const std::string& backend : setup_.backends) {
      for (const Names& set : setup_.only.empty() ? pairs() : given()) add(cells, set, backend);
      if (setup_.only.empty() && setup_.modes) add_modes(cells, backend);
    }
    if (setup_.cells > 0) {
      std::shuffle(cells.begin(), cells.end(), random_);
      cells.resize(std::min(cells.size(), size_t(setup_.cells)));
    }
    for (Cell& cell : cells) judge(cell, said);
    if (setup_.only.empty())
      for (const std::string& backend : setup_.backends)
        for (Cell& cell : larger(backend)) judge(cell, said);
    matrix_.seconds = seconds_now() - began;
    return std::move(matrix_);
  }

 private:
  std::vector<Names> pairs() const {
    std::vector<Names> sets;
    const Names& all = matrix_.plugins;
    for (size_t i = 0; i < all.size(); ++i) {
      sets.push_back({all[i]});
      for (size_t j = i + 1; j < all.size(); ++j) sets.push_back({all[i], all[j]});
    }
    return sets;
  }

  std::vector<Names> given() const {
    std::vector<Names> sets;
    for (const std::string& text : setup_.only) {
      std::set<std::string> set;
      for (size_t at = 0; at <= text.size();) {
        const size_t end = std::min(text.find('+', at), text.size());
        const std::string name = text.substr(at, end - at);
        if (std::find(matrix_.plugins.begin(), matrix_.plugins.end(), name) == matrix_.plugins.end())
          throw Error("--only " + text + ": no plugin is named \"" + name + "\"." +
                      did_you_mean(name, matrix_.plugins));
        set.insert(name);
        at = end + 1;
      }
      sets.emplace_back(set.begin(), set.end());
    }
    return sets;
  }

  // The cells of a set: over the smallest mesh that all of it takes part in, over those of more ranks for the data, up
  // to eight ranks in all where it is not one plugin's mode, and each with both kinds of sums.
  void add(std::vector<Cell>& cells, const Names& set, const std::string& backend,
           const std::vector<Mode>& modes = {}) {
    Trial trial{.plugins = set, .sets = {"device.backend=" + backend}, .modes = modes};
    for (const Mode& mode : modes)
      if (!mode.with.empty()) trial.sets.push_back(mode.with);
    if (std::none_of(set.begin(), set.end(), [&](const auto& name) { return judge_.provides(name, "optimizer"); }))
      trial.plugins.push_back(matrix_.optimizer);
    const Sizes all{{"pipeline", 2}, {"data", 2}, {"expert", 2}, {"tensor", 2}, {"sequence", 2}};
    const Sizes smallest = judge_.mesh_for(trial.plugins, all);
    const auto ranks = [](const Sizes& mesh) {
      int64_t count = 1;
      for (const auto& [axis, size] : mesh) count *= axis == "expert" ? 1 : size;  // which is part of data
      return count;
    };
    std::vector<Sizes> meshes{smallest};
    const Names& few = setup_.smallest;
    const bool one = std::find(few.begin(), few.end(), backend) != few.end();
    const int64_t most = one ? 0 : modes.empty() ? kMostRanks : kMostRanks / 2;
    for (Sizes more = smallest; more.contains("data") && 2 * ranks(more) <= most;) {
      more["data"] *= 2;
      meshes.push_back(more);
    }
    for (const Sizes& mesh : meshes)
      for (const bool reproducible : {false, true}) {
        if (ranks(mesh) > kMostRanks) continue;
        trial.mesh = mesh, trial.reproducible = reproducible;
        cells.push_back({set, backend, {.trial = trial}});
      }
  }

  // Each mode of each plugin alone, and beside one drawn of those that sum gradients, so that there are ranks; of
  // plugins that do so themselves beside one of all.
  void add_modes(std::vector<Cell>& cells, const std::string& backend) {
    const auto sums = [this](const std::string& name) { return judge_.provides(name, "summed_gradients"); };
    for (const std::string& name : matrix_.plugins) {
      Names partners = matrix_.plugins;
      std::erase_if(partners, [&](const auto& other) { return other == name || (!sums(name) && !sums(other)); });
      for (const Mode& mode : judge_.modes_of(name)) {
        add(cells, {name}, backend, {mode});
        if (partners.empty()) continue;
        Names pair{name, partners[random_() % partners.size()]};
        std::sort(pair.begin(), pair.end());
        add(cells, pair, backend, {mode});
      }
    }
  }

  // Sets by chance that hold no pair all of whose cells were refused.
  std::vector<Cell> larger(const std::string& backend) {
    std::vector<Cell> cells;
    for (int64_t tries = 0; int64_t(cells.size()) < setup_.larger && tries < 100 * setup_.larger; ++tries) {
      Names set = matrix_.plugins;
      std::shuffle(set.begin(), set.end(), random_);
      set.resize(std::min(set.size(), size_t(3 + random_() % 4)));
      std::sort(set.begin(), set.end());
      if (holds_refused(set)) continue;
      std::vector<Cell> of_set;
      add(of_set, set, backend);
      if (!of_set.empty()) cells.push_back(of_set[random_() % of_set.size()]);
    }
    return cells;
  }

  bool holds_refused(const Names& set) const {
    return std::any_of(refused_.begin(), refused_.end(), [&](const auto& entry) {
      return entry.second && std::includes(set.begin(), set.end(), entry.first.begin(), entry.first.end());
    });
  }

  void judge(Cell& cell, const std::function<void(const Cell&)>& said) {
    cell.verdict = judge_.judge(cell.verdict.trial);
    const auto [refused, is_new] = refused_.try_emplace(cell.plugins, true);
    refused->second = refused->second && cell.verdict.kind == Verdict::Kind::refused;
    matrix_.cells.push_back(cell);
    if (said) said(cell);
    if (cell.verdict.kind != Verdict::Kind::outside) return;
    Cell smallest = cell;
    smallest.verdict = judge_.shrink(cell.verdict);
    smallest.plugins.clear();
    for (const std::string& name : smallest.verdict.trial.plugins)
      if (name != matrix_.optimizer) smallest.plugins.push_back(name);
    if (smallest.plugins.empty()) smallest.plugins.push_back(matrix_.optimizer);
    std::sort(smallest.plugins.begin(), smallest.plugins.end());
    if (failed_.insert(command_of(smallest, setup_)).second) matrix_.failures.push_back(smallest);
  }

  const MatrixSetup& setup_;
  Judge judge_;
  std::mt19937_64 random_;
  Matrix matrix_;
  std::map<Names, bool> refused_;  // by set: whether all its cells were
  std::set<std::string> failed_;
};

}  // namespace

int64_t Matrix::count(Verdict::Kind kind) const {
  return std::count_if(cells.begin(), cells.end(), [&](const Cell& cell) { return cell.verdict.kind == kind; });
}

std::string command_of(const Cell& cell, const MatrixSetup& of) {
  std::string command = fmt::format("strata verify --matrix {}--only {}", of.config.empty() ? "" : of.config + " ",
                                    fmt::join(cell.plugins, "+"));
  if (cell.backend != "cpu") command += " --devices " + cell.backend;
  if (of.setup.steps != Setup().steps) command += fmt::format(" --steps {}", of.setup.steps);
  for (const std::string& set : of.setup.sets) command += " --set '" + set + "'";
  for (const Mode& mode : cell.verdict.trial.modes)
    command += " --set '" + text(mode) + "'" + (mode.with.empty() ? "" : " --set " + mode.with);
  return command;
}

Matrix run_matrix(const MatrixSetup& setup, const std::function<void(const Cell&)>& said) {
  return Maker(setup).make(said);
}

}  // namespace strata::verifying
