// What a configuration comes to: every option of the engine and of the enabled plugins with its value, defaults filled
// in. Ranks of one run compare them at the start (engine/runtime/ranks.h).
#pragma once
#include <string>
#include <vector>

#include "strata/options.h"

namespace strata {

struct Setting {
  std::string key, value;  // "run.seed", "1337"
  bool per_rank = false;   // ranks may differ in it (Option::per_rank)
};
using Settings = std::vector<Setting>;

inline void add_settings(Settings& settings, const std::string& table, const Options& options) {
  for (const Option& option : options.all())
    settings.push_back({table + "." + option.name(), option.value_text(), option.is_per_rank()});
}

}  // namespace strata
