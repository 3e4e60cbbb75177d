// The order in which the stages of several plugins run, from what they provide and require.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "strata/plugin.h"

namespace strata {

// A plugin under the name it was enabled by, in the order its stages run.
struct NamedPlugin {
  std::string name;
  Plugin* plugin = nullptr;
};

// What the configuration itself provides beside plugins, and what of it does, in words.
struct Provided {
  std::string capability, said;
};
// With [run] reproducible: "reproducible sums", and "reproducible sums over AXIS" of the axes of several ranks.
std::vector<Provided> provided_by_run(bool reproducible, const std::vector<std::string>& axes);

// Providers before those who require what they provide, otherwise in the order given. Throws Error with the names when
// a capability is missing or in conflict, or when requirements go in a circle.
std::vector<NamedPlugin> in_order(const std::vector<NamedPlugin>& plugins, const std::vector<Provided>& by_run = {});

// A reason for which plugins are refused, and whom it strikes: "a and b: each gradient would be summed twice".
struct Refusal {
  std::string reason;
  std::vector<std::string> cases;
};
// Which of these cannot be enabled together, or with what a configuration can provide, by what they declare, under at
// most four reasons: two for one thing, reproducible runs with exchanges that leave something out, reproducible runs
// with sums that ranks divide, and what one divides and another needs whole. `modes`: of the same plugins, with an
// option set otherwise, that conflict with more than the plugin does. What depends on a model or a backend is refused
// by the plugins' stages.
std::vector<Refusal> refusals(const std::vector<NamedPlugin>& plugins, const std::vector<NamedPlugin>& modes = {});

// Throws Error unless exactly one plugin provides `capability`; `remedy` says what to do when none does.
void require_exactly_one(const std::vector<NamedPlugin>& plugins, std::string_view capability, std::string_view remedy);

}  // namespace strata
