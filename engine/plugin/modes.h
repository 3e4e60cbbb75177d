// What a plugin's options that name a mode can be: for the list of refusals, and for `strata verify --matrix`.
#pragma once
#include <string>
#include <vector>

#include "engine/plugin/loader.h"

namespace strata {

struct PluginMode {
  std::string option, value;  // in TOML syntax
  std::string with;           // "key=value" of the configuration that it needs beside a small model; empty: nothing
};
// Of options that list their values (Option::modes), and of those that do not, since other plugins add some, what the
// plugin's capabilities "mode OPTION=VALUE [with KEY=VALUE]" say.
std::vector<PluginMode> modes_of(const LoadedPlugin& plugin);

// The plugin once more, with the option set so. Throws Error where it cannot be.
LoadedPlugin in_mode(const LoadedPlugin& plugin, const std::string& option, const std::string& value,
                     const std::vector<std::string>& more_folders);

}  // namespace strata
