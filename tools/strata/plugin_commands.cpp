// `plugins`: what is there, and what one takes.
#include <fmt/format.h>

#include "engine/config/sections.h"
#include "engine/plugin/loader.h"
#include "engine/plugin/modes.h"
#include "engine/plugin/order.h"
#include "engine/plugin/schema.h"
#include "tools/strata/commands.h"

namespace strata {
namespace {

std::string text_of(const Effect& effect) {
  switch (effect.kind) {
    case Effect::Kind::unsaid:
      return "not said; nothing can be held to it";
    case Effect::Kind::program:
      return "part of the program that is trained";
    case Effect::Kind::exact:
      return "exact: no bit changes";
    case Effect::Kind::reorders:
      return "reorders sums; with run.reproducible no bit changes";
    case Effect::Kind::lossy:
      return fmt::format("lossy: losses stay within {:g} of the plain run's", effect.loss_band);
  }
  return "";
}

void show(const std::string& name, const std::vector<std::string>& paths) {
  const LoadedPlugin plugin = load_plugin(name, paths);
  fmt::print("{} {}: {}\n", plugin.name(), plugin.version(), plugin.summary());
  const Capabilities capabilities = plugin->capabilities();
  const auto list = [](const char* title, const std::vector<std::string>& names) {
    if (!names.empty()) fmt::print("{}: {}\n", title, fmt::join(names, ", "));
  };
  list("provides", capabilities.provides);
  list("requires", capabilities.requires_);
  for (const Conflict& conflict : capabilities.conflicts)
    fmt::print("conflicts with: {}, because {}\n", conflict.capability, conflict.reason);
  fmt::print("effect: {}\n", text_of(capabilities.effect));
  Options options;
  declare_options(plugin, options);
  fmt::print("\n{}", options_text(options));
}

// Reasons, numbered, and under each the plugins that it strikes.
void show_refusals(const std::vector<std::string>& paths) {
  std::vector<LoadedPlugin> plugins, others;
  for (const std::string& name : plugin_names(paths)) plugins.push_back(load_plugin(name, paths));
  std::vector<NamedPlugin> named, modes;
  const auto capabilities_of = [](const LoadedPlugin& plugin) {
    std::vector<std::string> all;
    for (const Conflict& conflict : plugin->capabilities().conflicts) all.push_back(conflict.capability);
    return all;
  };
  std::vector<std::string> names;
  for (const LoadedPlugin& plugin : plugins) {
    named.push_back({plugin.name(), &*plugin});
    for (const auto& [option, value, with] : modes_of(plugin)) {
      LoadedPlugin other = in_mode(plugin, option, value, paths);
      if (capabilities_of(other) == capabilities_of(plugin) || capabilities_of(other).empty()) continue;
      others.push_back(std::move(other));
      names.push_back(fmt::format("{} ({} = {})", plugin.name(), option, value));
    }
  }
  for (size_t i = 0; i < others.size(); ++i) modes.push_back({names[i], &*others[i]});
  int number = 0;
  for (const Refusal& refusal : refusals(named, modes)) {
    fmt::print("{}. {}.\n", ++number, refusal.reason);
    for (const std::string& one : refusal.cases) fmt::print("   - {}.\n", one);
  }
  fmt::print(
      "{}. a backend without a kernel for what a plugin adds; planning names both (`strata plan` with "
      "device.backend).\n",
      ++number);
}

}  // namespace

int plugins_command_main(const PluginsArguments& arguments) {
  if (arguments.refusals) {
    show_refusals(arguments.paths);
    return int(ExitCode::done);
  }
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
