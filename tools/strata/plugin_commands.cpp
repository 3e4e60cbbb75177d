// `plugins`: what is there, and what one takes.
#include <fmt/format.h>

#include "engine/config/sections.h"
#include "engine/plugin/loader.h"
#include "engine/plugin/schema.h"
#include "tools/strata/commands.h"

namespace strata {
namespace {

void show(const std::string& name, const std::vector<std::string>& paths) {
  const LoadedPlugin plugin = load_plugin(name, paths);
  fmt::print("{} {}: {}\n", plugin.name(), plugin.version(), plugin.summary());
  const Capabilities capabilities = plugin->capabilities();
  const auto list = [](const char* title, const std::vector<std::string>& names) {
    if (!names.empty()) fmt::print("{}: {}\n", title, fmt::join(names, ", "));
  };
  list("provides", capabilities.provides);
  list("requires", capabilities.requires_);
  list("conflicts with", capabilities.conflicts);
  Options options;
  declare_options(plugin, options);
  fmt::print("\n{}", options_text(options));
}

}  // namespace

int plugins_command_main(const PluginsArguments& arguments) {
  if (arguments.schema) {
    fmt::print("{}", json_schema(arguments.paths));
    return int(ExitCode::done);
  }
  if (arguments.markdown) {
    fmt::print("{}", options_markdown(arguments.paths));
    return int(ExitCode::done);
  }
  if (!arguments.name.empty()) {
    show(arguments.name, arguments.paths);
    return int(ExitCode::done);
  }
  int status = int(ExitCode::done);
  for (const std::string& name : plugin_names(arguments.paths)) {
    try {
      const LoadedPlugin plugin = load_plugin(name, arguments.paths);
      fmt::print("{:<16} {:<8} {}\n", plugin.name(), plugin.version(), plugin.summary());
    } catch (const Error& error) {
      fmt::print("{:<16} cannot be loaded: {}\n", name, error.what());
      status = int(ExitCode::usage);
    }
  }
  return status;
}

}  // namespace strata
