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

// Which of these cannot be enabled together, by what they declare: a sentence for each pair that conflicts and each
// plugin that conflicts with what a configuration can provide, and one for all that provide what there is one of. What
// depends on a model or a backend is refused by the plugins' stages.
std::vector<std::string> refusals(const std::vector<NamedPlugin>& plugins);

// Throws Error unless exactly one plugin provides `capability`; `remedy` says what to do when none does.
void require_exactly_one(const std::vector<NamedPlugin>& plugins, std::string_view capability, std::string_view remedy);

}  // namespace strata
