// Runs sets of plugins over meshes beside the plain program, and says of each whether it does to numbers what its
// plugins say (Effect). The plain program: the model, the optimizer and those plugins of the set that say what is
// trained, on one rank, without budgets. A set with plugins that are exact is run without them, too, over the same
// mesh: taking them out may not change a bit. Of plugins that say so (capabilities "feedback PATTERN", "sums within
// BOUND", "sums late by STEPS") the sums of gradients over all steps are looked at, too (balance.h).
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engine/verify/balance.h"
#include "engine/verify/compare.h"
#include "strata/plugin.h"

namespace strata::verifying {

using Sizes = std::map<std::string, int64_t>;  // of [mesh], by key; what is not named is 1

// An option of a plugin, and its value in TOML syntax.
struct Mode {
  std::string plugin, option, value;
  std::string with{};  // "key=value" that it needs beside the matrix's model
};
std::string text(const Mode& mode);  // "plugins.zero.stage=3"

// What a plugin that changes losses says of sums of gradients.
struct HeldSums {
  std::string kept{};            // a pattern of its states that hold what has not crossed
  double bound = kBalanceBound;  // how far sums may be off, as a part of a gradient's norm
  int64_t late = 0;              // steps: sums are those of so many steps less
  bool at_most = false;          // or lie between those and those of all steps
};

// What is run.
struct Trial {
  std::vector<std::string> plugins;  // of [plugins], the optimizer among them
  Sizes mesh{};
  bool reproducible = false, budgets = false;  // budgets: those of the configuration hold
  std::vector<std::string> sets{};             // "key=value", what else is set otherwise
  std::vector<Mode> modes{};                   // of plugins, wherever they are enabled
};

struct Verdict {
  enum class Kind {
    program,  // the plain program itself: nothing to compare
    same,     // bit for bit
    within,   // of its bound
    outside,  // of it, or not finished
    refused,  // by the engine or a plugin, with a reason
  } kind = Kind::program;
  Trial trial{};
  int ranks = 1;
  Difference difference{};  // the largest; of `outside` the first
  std::string reason{};     // of `refused`, and of an `outside` that did not finish
  std::string beside{};     // what it was compared with
  int64_t first_step = 0;   // of `outside`, where it begins; 0: it did not finish
  int64_t planned_bytes = 0, measured_bytes = 0;
  bool has_data = false;  // of the configuration; otherwise tokens were made up
};

class Judge {
 public:
  // Throws Error where the configuration cannot be read.
  explicit Judge(Setup setup);

  // Throws Error where a plugin does not say its effect, and where the plain program cannot run.
  Verdict judge(const Trial& trial);
  // The smallest part of a set that is outside, too: plugins are left out one by one, with the axes that are theirs.
  Verdict shrink(const Verdict& verdict);
  // The part of a mesh that these plugins divide work over.
  Sizes mesh_for(const std::vector<std::string>& plugins, const Sizes& mesh) const;
  bool provides(const std::string& plugin, const std::string& capability) const;
  // What its options that name a mode can be (Option::modes).
  std::vector<Mode> modes_of(const std::string& plugin) const;
  // What of the configuration is set otherwise for a trial, as "key=value".
  std::vector<std::string> sets_of(const Trial& trial) const;
  const Setup& setup() const { return setup_; }

 private:
  struct Plain {
    Outcome outcome;
    Sensitivity sensitivity;
    bool is_sensitive = false;
  };
  // How far an outcome of so many steps may be from another.
  struct Measure {
    enum class Kind { bits, sums, losses } kind = Kind::bits;
    double band = 0;
  };
  Difference compare(const Measure& measure, const Outcome& actual, const Trial& beside, int64_t steps);
  void find_beginning(Verdict& verdict, const Measure& measure, const Trial& beside);
  std::optional<Verdict> unbalanced(const Verdict& verdict, const std::string& name, const HeldSums& held);
  Plain& plain(const Trial& trial, int64_t steps);
  const Outcome& outcome(const Trial& trial);
  std::string key_of(const Trial& trial, int64_t steps) const;

  Setup setup_;
  std::vector<std::string> tables_;  // of [plugins]
  std::vector<std::string> plugin_path_;
  std::map<std::string, Plain> plain_;
  std::map<std::string, Outcome> outcomes_;     // without bytes
  std::map<std::string, Difference> balances_;  // of error feedback
};

}  // namespace strata::verifying
