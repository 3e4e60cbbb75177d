// What tests of whole programs share: a program built from TOML text and extra plugins, run step by step by hand.
#pragma once
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>

#include "engine/planning/residency.h"
#include "engine/planning/localize.h"
#include "engine/runtime/executor.h"
#include "engine/runtime/ranks.h"
#include "engine/runtime/session.h"

namespace strata::test {

// A folder that is removed at the end.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "strata-test-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline std::string write_file(const std::string& path, const std::string& text) {
  std::ofstream(path) << text;
  return path;
}

// Whether one of many cases is left out: sanitizers take their time, and what they look for a third of the cases shows.
inline bool left_out([[maybe_unused]] size_t number) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return number % 3 != 0;
#else
  return false;
#endif
}

// Keeps the gradients readable after the step, by parameter name.
class KeepGradients final : public Plugin {
 public:
  void gradients(GradientStage& stage) override {
    for (Gradient& gradient : stage.gradients()) {
      stage.build().program()[gradient.tensor].step_output = true;
      tensors[stage.build()[gradient.parameter].name] = gradient.tensor;
    }
  }
  std::map<std::string, TensorId> tensors;
};

// One training program with its storage.
class Runner final : public StepContext {
 public:
  Runner(const std::string& toml, std::vector<NamedPlugin> more = {}, Goal goal = Goal::train, Rates rates = {},
         World* world = nullptr, const std::string& backend = "", Device* device = nullptr)
      : session_(write_file(folder_ / "config.toml", toml), {}, world), threads_(session_.threads(), session_.cut()) {
    if (!backend.empty()) session_.device.backend = backend;
    plugins = session_.plugins;
    plugins.insert(plugins.end(), more.begin(), more.end());
    built = build_program(plugins, session_.batch(goal), goal, session_.mesh.first());
    plan = plan_residency(built.program, {.backend = session_.device.backend,
                                          .threads = std::max(threads_.count(), int(session_.host.threads)),
                                          .host_stream = session_.host.threads > 0,
                                          .direct_storage = session_.device.direct_storage,
                                          .device_budget = session_.device.memory.count,
                                          .host_budget = session_.host.memory.count,
                                          .rates = rates});
    if (world) {
      groups = make_groups(*world, session_.mesh, device, session_.network, session_.run.reproducible);
      localize(built.program, session_.mesh, session_.batch(goal).microbatches);
      built.program.storage_directory = rank_directory(built.program.storage_directory, *world);
    }
    storage =
        std::make_unique<Storage>(built.program, plan, std::vector<const MemoryPlan*>{}, NvmeStore::Faults{}, device);
    executor = std::make_unique<Executor>(built.program, plan, *storage, session_.device.backend, threads_,
                                          int(session_.host.threads), &groups, patience(session_.network.timeout));
    storage->initialize(uint64_t(session_.run.seed), threads_);
  }

  // One step on tokens and targets (global_batch, sequence_length); returns the loss.
  double run_step(const int32_t* tokens, const int32_t* targets) {
    ++step_;
    set_scalar(kStepScalar, double(step_));
    set_scalar(kSeedScalar, double(session_.run.seed));
    set_scalar(kLearningRateFactor, 1);
    const Program& program = built.program;
    const BatchShape batch = session_.batch(Goal::train);
    const size_t count = size_t(batch.micro_batch * batch.sequence_length);
    for (int64_t m = 0; program.find("tokens@" + std::to_string(m)); ++m) {
      const size_t global = size_t(m + batch.microbatches * session_.mesh["data"].coordinate);
      std::copy_n(tokens + global * count, count,
                  static_cast<int32_t*>(executor->pointer(program.find("tokens@" + std::to_string(m)))));
      if (const TensorId id = program.find("targets@" + std::to_string(m)))
        std::copy_n(targets + global * count, count, static_cast<int32_t*>(executor->pointer(id)));
    }
    for (const NamedPlugin& named : plugins) named.plugin->step_start(*this);
    if (poisoned)
      executor->run_poisoned();
    else
      executor->run();
    std::vector<double> losses;
    for (TensorId id : program.losses) losses.push_back(*static_cast<const float*>(executor->pointer(id)));
    const double loss = sum_over_ranks(groups, std::move(losses));
    for (const NamedPlugin& named : plugins) named.plugin->step_end(*this);
    return loss;
  }

  std::vector<float> values(TensorId id) const {
    const float* data = static_cast<const float*>(executor->pointer(id));
    return {data, data + elements(built.program[id].shape)};
  }
  // A persistent tensor wherever it rests; any other by its memory on the device.
  std::vector<float> values(const std::string& name) const {
    const TensorId id = built.program.find(name);
    const Tensor& tensor = built.program[id];
    if (!tensor.persistent) return values(id);
    const float* data = static_cast<const float*>(storage->view(tensor));
    return {data, data + elements(tensor.shape)};
  }

  int64_t step() const override { return step_; }
  int64_t steps() const override { return session_.run.steps; }
  double scalar(std::string_view name) const override {
    return *static_cast<const double*>(executor->pointer(built.program.find(name)));
  }
  void set_scalar(std::string_view name, double value) override { storage->set_scalar(name, value); }
  void log(std::string_view, double) override {}

  bool poisoned = false;  // released memory is overwritten: slow, in the order of the program
  std::vector<NamedPlugin> plugins;
  BuiltProgram built;
  MemoryPlan plan;
  std::unique_ptr<Storage> storage;
  Groups groups;
  std::unique_ptr<Executor> executor;

 private:
  TemporaryFolder folder_;
  Session session_;
  Threads threads_;
  int64_t step_ = 0;
};

}  // namespace strata::test
