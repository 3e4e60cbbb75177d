// What every command starts from: the configuration read and checked, the plugins loaded, configured and ordered.
// Builds and plans programs on demand; runs nothing.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "engine/config/config.h"
#include "engine/config/sections.h"
#include "engine/planning/build.h"
#include "engine/planning/memory_plan.h"
#include "engine/plugin/loader.h"

namespace strata {

// A program with its memory plan.
struct PlannedProgram {
  BuiltProgram built;
  MemoryPlan memory;
  const Program& program() const { return built.program; }
};

class Session {
 public:
  // Throws Error for anything wrong in the file, the overrides ("key=value") or the plugins.
  Session(const std::string& config_path, const std::vector<std::string>& sets);

  Config config;
  RunSection run;
  DataSection data;
  DeviceSection device;
  std::vector<NamedPlugin> plugins;  // in the order their stages run
  Plugin& model() const { return *model_; }
  int threads() const;  // device.threads, or the number of processors

  BatchShape batch(Goal goal) const;
  // Builds, plans and checks device.memory.
  PlannedProgram plan(Goal goal) const;

 private:
  std::string advice(const MemoryPlan& plan) const;
  std::vector<LoadedPlugin> loaded_;
  Plugin* model_ = nullptr;
};

}  // namespace strata
