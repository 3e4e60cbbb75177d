// What tests of whole programs share: a program built from TOML text and extra plugins, run step by step by hand.
#pragma once
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>

#include "engine/runtime/assembly.h"
#include "engine/runtime/ranks.h"
#include "engine/runtime/step_runner.h"
#include "strata/convert.h"
#include "strata/layout.h"

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

// The plan of training with a configuration, where only memory counts: no rates are measured.
inline PlannedProgram planned(const std::string& text) {
  const TemporaryFolder folder;
  Session session(write_file(folder / "config.toml", text), {});
  session.rates = Rates();
  return session.plan(Goal::train);
}

// The figure in "the smallest … that would do here is N bytes" of a refusal, or -1.
inline int64_t smallest_in(const std::string& message) {
  const std::string before = "would do here is ";
  const size_t at = message.find(before);
  return at == std::string::npos ? -1 : std::stoll(message.substr(at + before.size()));
}

// Puts what a rank holds of a tensor where it belongs in the whole one; `unit`: values of an element.
template <class T>
void put_together(const Tensor& tensor, const std::vector<T>& part, std::vector<T>& whole, int64_t unit = 1) {
  whole.resize(size_t(elements(tensor.full_shape()) * unit));
  GlobalIndex(tensor).runs(0, elements(tensor.shape), [&](int64_t local, int64_t global, int64_t count) {
    std::copy_n(part.begin() + local * unit, count * unit, whole.begin() + global * unit);
  });
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

// One program with its memory, assembled as `strata train` does, on tokens that a test gives.
class Runner final {
  TemporaryFolder folder_;
  Session session_;
  std::unique_ptr<World> alone_;  // unless there is a world
  Assembly assembly_;
  StepRunner steps_;

 public:
  // `more` plugins come after those of the configuration; `rates` instead of the machine's.
  Runner(const std::string& toml, std::vector<NamedPlugin> more = {}, Goal goal = Goal::train, Rates rates = {},
         World* world = nullptr, const std::string& backend = "", Device* device = nullptr)
      : session_(write_file(folder_ / "config.toml", toml), {}, world),
        alone_(single_world()),
        assembly_(session_, world ? *world : *alone_,
                  plans_of(session_, world ? *world : *alone_, more, goal, rates, backend), device),
        steps_(session_, assembly_) {
    storage->initialize(uint64_t(session_.run.seed), assembly_.threads);
  }

  // One step on tokens and targets (global_batch, sequence_length), the next one if not said; returns the loss. Targets
  // below 0 do not count. `documents`: where those of packed data begin.
  double run_step(const int32_t* tokens, const int32_t* targets, int64_t step = 0, const int32_t* documents = nullptr) {
    double loss = 0;
    const double weight = weight_of(targets);
    steps_.run(
        step > 0 ? step : steps_.step() + 1,
        [&] {
          feed(tokens, targets, documents);
          steps_.set_scalar(kLossWeight, weight);
        },
        [&] {
          std::vector<double> losses;
          for (TensorId id : steps_.executor().program().losses)
            losses.push_back(*static_cast<const float*>(steps_.executor().pointer(id)));
          if (session_.mesh.programs().size > 1) losses.resize(size_t(session_.batch(Goal::train).microbatches));
          if (!session_.mesh.counts()) std::fill(losses.begin(), losses.end(), 0.0);
          loss = sum_over_ranks(groups, std::move(losses)) * weight;
        },
        poisoned  ? StepMode::poisoned
        : in_loop ? StepMode::in_loop
                  : StepMode::whole);
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
    const std::vector<std::byte> bytes = storage->copy(tensor);
    std::vector<float> result(size_t(elements(tensor.shape)));
    if (is_half(tensor.dtype))
      to_f32(tensor.dtype, bytes.data(), result.data(), int64_t(result.size()));
    else
      std::memcpy(result.data(), bytes.data(), result.size() * sizeof(float));
    return result;
  }
  double scalar(std::string_view name) const { return steps_.scalar(name); }
  void set_scalar(std::string_view name, double value) { steps_.set_scalar(name, value); }

  void settle() { steps_.settle(); }  // where updates are made ahead: before anybody looks at what lasts
  bool in_loop = false;               // steps overlap: drain() comes before anybody looks at what lasts
  void drain() { steps_.drain(); }
  bool poisoned = false;  // released memory is overwritten: slow, in the order of the program
  const std::vector<NamedPlugin>& plugins = session_.plugins;
  const RunPlans& plans = assembly_.plans;
  const BuiltProgram& built = plans.main().built;  // of the first step, as are plan and executor
  const MemoryPlan& plan = plans.main().memory;
  Storage* const storage = &assembly_.storage;
  const Groups& groups = assembly_.groups;
  Executor* const executor = &assembly_.executor_of(0);

 private:
  static RunPlans plans_of(Session& session, const World& world, const std::vector<NamedPlugin>& more, Goal goal,
                           const Rates& rates, const std::string& backend) {
    if (!backend.empty()) session.device.backend = backend;
    session.plugins.insert(session.plugins.end(), more.begin(), more.end());
    session.rates = rates;
    RunPlans plans = session.plan_run(goal);
    make_own(plans, session, world);
    return plans;
  }

  double weight_of(const int32_t* targets) const {
    const BatchShape batch = session_.batch(Goal::train);
    const int64_t all = batch.sequences() * batch.sequence_length,
                  counted = std::count_if(targets, targets + all, [](int32_t target) { return target >= 0; });
    return !batch.weighted ? 1 : counted > 0 ? double(all) / double(counted) : 0;
  }
  void feed(const int32_t* tokens, const int32_t* targets, const int32_t* documents) {
    const Executor& executor = steps_.executor();
    const Program& program = executor.program();
    const BatchShape batch = session_.batch(Goal::train);
    const size_t count = size_t(batch.micro_batch * batch.sequence_length);
    for (int64_t m = 0; m < batch.microbatches; ++m) {
      const size_t global = size_t(m + batch.microbatches * session_.mesh["data"].coordinate);
      const auto put = [&](const std::string& name, const int32_t* from) {
        const TensorId id = program.find(name + "@" + std::to_string(m));
        if (!id) return;
        const Tensor& tensor = program[id];
        GlobalIndex(tensor).runs(0, elements(tensor.shape), [&](int64_t local, int64_t whole, int64_t run) {
          std::copy_n(from + global * count + size_t(whole), run, static_cast<int32_t*>(executor.pointer(id)) + local);
        });
      };
      put("tokens", tokens), put("targets", targets);
      if (documents) put("document_starts", documents);
    }
  }
};

}  // namespace strata::test
