// What every command starts from: the configuration read and checked, the plugins loaded, configured and ordered.
// Builds and plans programs on demand; runs nothing.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "engine/config/config.h"
#include "engine/config/sections.h"
#include "engine/planning/report.h"
#include "engine/planning/residency.h"
#include "engine/plugin/loader.h"
#include "memory/nvme_store.h"

namespace strata {

class Session {
 public:
  // Throws Error for anything wrong in the file, the overrides ("key=value") or the plugins.
  Session(const std::string& config_path, const std::vector<std::string>& sets);

  Config config;
  RunSection run;
  DataSection data;
  DeviceSection device;
  HostSection host;
  NvmeStore::Faults storage_faults;  // what tests break on purpose
  std::vector<NamedPlugin> plugins;  // in the order their stages run
  Plugin& model() const { return *model_; }
  int threads() const;  // device.threads, or the number of processors

  BatchShape batch(Goal goal) const;
  // Builds and plans under the memory budgets. `training` is the plan that decided where persistent tensors rest, for
  // programs that share them.
  PlannedProgram plan(Goal goal, const PlannedProgram* training = nullptr) const;

 private:
  std::string advice(const MemoryPlan& plan) const;
  std::vector<LoadedPlugin> loaded_;
  Plugin* model_ = nullptr;
};

}  // namespace strata
