// What tables [parameters."PATTERN"] of a configuration say of a model's parameters, put into the parameters of a
// program (Lasting), where autodiff, plugins and optimizers find it.
#pragma once
#include <set>
#include <span>
#include <vector>

#include "engine/config/sections.h"
#include "strata/program.h"

namespace strata {

class ParameterRules {
 public:
  // `rules` must live as long.
  explicit ParameterRules(std::span<const ParameterRule> rules) : rules_(rules) {}
  // Of all parameters that the program has; may be called again when there are more. Throws Error, at the later table,
  // where two say different things of one parameter.
  void apply(Program& program);
  // Throws Error for a pattern that matched none.
  void require_all_used(const Program& program) const;

 private:
  std::span<const ParameterRule> rules_;
  std::set<std::string> used_;  // patterns
};

}  // namespace strata
