// Modes from options and capabilities; see modes.h.
#include "engine/plugin/modes.h"

#include <algorithm>
#include <string_view>

#include "engine/config/config.h"

namespace strata {

std::vector<PluginMode> modes_of(const LoadedPlugin& plugin) {
  constexpr std::string_view kMode = "mode ", kWith = " with ";
  Options options;
  declare_options(plugin, options);
  std::vector<PluginMode> modes;
  for (const Option& option : options.all())
    for (const std::string& value : option.modes()) modes.push_back({option.name(), value, ""});
  for (const std::string& capability : plugin->capabilities().provides) {
    const size_t equals = capability.find('='), with = std::min(capability.find(kWith), capability.size());
    if (!capability.starts_with(kMode) || equals > with) continue;
    modes.push_back({capability.substr(kMode.size(), equals - kMode.size()),
                     capability.substr(equals + 1, with - equals - 1),
                     with < capability.size() ? capability.substr(with + kWith.size()) : ""});
  }
  return modes;
}

LoadedPlugin in_mode(const LoadedPlugin& plugin, const std::string& option, const std::string& value,
                     const std::vector<std::string>& more_folders) {
  const Config config = Config::parse("[plugins." + plugin.name() + "]\n" + option + " = " + value + "\n", "mode", {});
  LoadedPlugin again = load_plugin(plugin.name(), more_folders);
  Options options;
  declare_options(again, options);
  options.read(*config.root().table("plugins")->table(plugin.name()));
  return again;
}

}  // namespace strata
