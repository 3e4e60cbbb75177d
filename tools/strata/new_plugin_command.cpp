// `new-plugin`: a folder with a working plugin of thirty lines to start from.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <filesystem>

#include "engine/plugin/loader.h"
#include "memory/atomic_file.h"
#include "tools/strata/commands.h"

namespace strata {
namespace {

namespace fs = std::filesystem;

constexpr const char* kCMake = R"(# Builds the plugin @NAME@ against an installed Strata:
#   cmake -B build -DCMAKE_PREFIX_PATH=<where Strata is installed> && cmake --build build && ctest --test-dir build
cmake_minimum_required(VERSION 3.25)
project(@NAME@ LANGUAGES CXX)
set(CMAKE_BUILD_TYPE Release CACHE STRING "")
find_package(Strata REQUIRED)
strata_add_plugin(@NAME@ @NAME@.cpp)

enable_testing()
add_test(NAME @NAME@ COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/test.sh $<TARGET_FILE:Strata::strata_command> $<TARGET_FILE_DIR:plugin_@NAME@>)
)";

constexpr const char* kSource = R"(// Clips every gradient element into [-limit, limit]. Replace by your own idea.
#include <strata/plugin.h>

class @CLASS@ final : public strata::Plugin {
 public:
  void options(strata::Options& o) override {
    o.add("limit", limit_, "largest absolute value of a gradient element").positive();
  }

  // Called once, when the step is planned: what is appended here runs every step, as soon as its gradient is final.
  void gradients(strata::GradientStage& stage) override {
    for (auto& gradient : stage.gradients()) stage.append("clamp", {gradient}, {{"limit", limit_}});
  }

 private:
  double limit_ = 1.0;
};

STRATA_PLUGIN(@CLASS@, "@NAME@", "0.1.0", "clips gradient elements")
)";

constexpr const char* kReadme = R"(# @NAME@

A plugin for Strata that clips every gradient element into [-limit, limit].

    cmake -B build -DCMAKE_PREFIX_PATH=<where Strata is installed>
    cmake --build build
    ctest --test-dir build --output-on-failure

Use it from a configuration:

    [run]
    plugin_path = ["<this folder>/build/lib/strata/plugins"]

    [plugins.@NAME@]
    limit = 0.5
)";

constexpr const char* kTest = R"(#!/usr/bin/env bash
# Trains a tiny model for a few steps with the plugin: test.sh STRATA PLUGIN_FOLDER
set -euo pipefail
strata=$1 plugins=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for i in $(seq 200); do echo "the quick brown fox jumps over the lazy dog $i"; done > "$work/text"
"$strata" data prepare "$work/text" --output "$work/data"
cat > "$work/config.toml" <<TOML
[run]
steps = 5
directory = "$work/run"
plugin_path = ["$plugins"]
[model]
plugin = "gpt"
layers = 1
hidden = 32
heads = 2
[data]
train = ["$work/data/train_*.bin"]
sequence_length = 16
global_batch = 4
micro_batch = 2
[plugins.adamw]
[plugins.@NAME@]
limit = 0.001
TOML
"$strata" plan "$work/config.toml" --program >"$work/program"
grep -q clamp "$work/program"
"$strata" train "$work/config.toml"
)";

std::string filled(std::string text, const std::string& name) {
  std::string class_name;
  for (size_t i = 0; i < name.size(); ++i)
    if (name[i] != '_') class_name += i == 0 || name[i - 1] == '_' ? char(std::toupper(name[i])) : name[i];
  for (const auto& [key, value] : {std::pair<std::string, std::string>{"@NAME@", name}, {"@CLASS@", class_name}})
    for (size_t at; (at = text.find(key)) != std::string::npos;) text.replace(at, key.size(), value);
  return text;
}

}  // namespace

int new_plugin_command_main(const NewPluginArguments& arguments) {
  const std::string& name = arguments.name;
  const bool valid = !name.empty() && std::islower(name[0]) && name.back() != '_' &&
                     name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_") == std::string::npos;
  if (!valid)
    throw Error("\"" + name +
                "\" is no name for a plugin: use lower-case letters, digits and _, beginning with a letter.");
  const std::vector<std::string> taken = plugin_names({});
  if (std::find(taken.begin(), taken.end(), name) != taken.end())
    throw Error("a plugin named \"" + name + "\" exists already (see `strata plugins " + name +
                "`), and would be found first; choose another name.");
  const fs::path folder = arguments.directory.empty() ? fs::path(name) : fs::path(arguments.directory);
  if (fs::exists(folder)) throw Error(folder.string() + ": exists already; choose another name or --directory.");
  std::error_code problem;
  fs::create_directories(folder, problem);
  if (problem) throw Error(folder.string() + ": cannot make the folder: " + problem.message() + ".");
  const auto write = [&](const std::string& file, const char* text) {
    AtomicFile out((folder / file).string());
    out.write(filled(text, name));
    out.commit();
  };
  write("CMakeLists.txt", kCMake);
  write(name + ".cpp", kSource);
  write("README.md", kReadme);
  write("test.sh", kTest);
  fs::permissions(folder / "test.sh", fs::perms(0755));
  fmt::print(
      "{}: CMakeLists.txt, {}.cpp, README.md, test.sh\nbuild it with: cmake -B {}/build -S {} && cmake --build "
      "{}/build && ctest --test-dir {}/build\n",
      folder.string(), name, folder.string(), folder.string(), folder.string(), folder.string());
  return int(ExitCode::done);
}

}  // namespace strata
