// See parameter_rules.h.
#include "engine/planning/parameter_rules.h"

#include <algorithm>

#include "strata/pattern.h"

namespace strata {
namespace {

// One of the things that may be said of a parameter.
template <class Value>
class Said {
 public:
  Said(const char* option, const std::string& parameter) : option_(option), parameter_(parameter) {}

  void by(const ParameterRule& rule, const std::optional<Value>& value) {
    if (!value) return;
    if (rule_ && value_ != *value)
      throw Error(rule.place, "[parameters.\"" + rule.pattern + "\"] and [parameters.\"" + rule_->pattern +
                                  "\"] contradict each other in " + option_ + " of " + parameter_ +
                                  "; narrow one of them, or name what it does not mean in except.");
    if (!rule_) rule_ = &rule;
    value_ = *value;
  }
  void into(Value& target) const {
    if (rule_) target = value_;
  }

 private:
  const char* option_;
  const std::string& parameter_;
  Value value_{};
  const ParameterRule* rule_ = nullptr;  // the first that says it
};

}  // namespace

void ParameterRules::apply(Program& program) {
  if (rules_.empty()) return;
  for (TensorId id : program.with_role(Role::parameter)) {
    const std::string name = parameter_name(program, id);
    Said<bool> frozen("frozen", name);
    Said<double> rate("learning_rate_factor", name), decay("weight_decay_factor", name);
    bool any = false;
    for (const ParameterRule& rule : rules_) {
      if (!matches(rule.pattern, name)) continue;
      used_.insert(rule.pattern);
      const auto excepts = [&](const std::string& pattern) { return matches(pattern, name); };
      const auto excepted = std::find_if(rule.except.begin(), rule.except.end(), excepts);
      if (excepted != rule.except.end()) {
        for (const std::string& pattern : rule.except)
          if (excepts(pattern)) used_.insert(rule.pattern + "\n" + pattern);
        continue;
      }
      frozen.by(rule, rule.frozen), rate.by(rule, rule.learning_rate_factor), decay.by(rule, rule.weight_decay_factor);
      any = true;
    }
    if (!any) continue;
    program[id].lasting.change([&](Lasting& lasting) {
      frozen.into(lasting.frozen), rate.into(lasting.learning_rate_factor), decay.into(lasting.weight_decay_factor);
    });
  }
}

void ParameterRules::require_all_used(const Program& program) const {
  for (const ParameterRule& rule : rules_) {
    if (!used_.contains(rule.pattern))
      throw Error(rule.place,
                  "[parameters.\"" + rule.pattern + "\"] matches no parameter of the model" + names_like(program));
    for (const std::string& pattern : rule.except)
      if (!used_.contains(rule.pattern + "\n" + pattern))
        throw Error(rule.place, "[parameters.\"" + rule.pattern + "\"] excepts \"" + pattern +
                                    "\", which matches none of the parameters that it means" + names_like(program));
  }
}

}  // namespace strata
