// The plugin interface: everything a strategy, a model or an optimizer is written against.
// A plugin is one class and one STRATA_PLUGIN line in a shared library; nothing here names any plugin.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "strata/error.h"
#include "strata/fingerprint.h"
#include "strata/options.h"
#include "strata/stages.h"

namespace strata {

// What a plugin does to the numbers of a run, by which `strata verify` judges it.
struct Effect {
  enum class Kind {
    unsaid,    // verify refuses such a plugin
    program,   // says what is trained, as models, optimizers and clipping do: the run compared with has it, too
    exact,     // no bit changes, whatever else is enabled
    reorders,  // sums are taken in another order; with run.reproducible no bit changes
    lossy,     // numbers are rounded or left out; the loss stays near
  };
  Kind kind = Kind::unsaid;
  double loss_band = 0;  // of lossy ones: the most that a loss of the first steps differs by, relative to the loss
  static constexpr Effect program() { return {.kind = Kind::program}; }
  static constexpr Effect exact() { return {.kind = Kind::exact}; }
  static constexpr Effect reorders() { return {.kind = Kind::reorders}; }
  static constexpr Effect lossy(double loss_band) { return {.kind = Kind::lossy, .loss_band = loss_band}; }
};

// What a plugin cannot work beside, and why: the end of a sentence that begins with "because".
struct Conflict {
  std::string capability, reason;
};

// What a plugin gives, needs and cannot stand. Order within a stage follows from it: providers run first.
struct Capabilities {
  std::vector<std::string> provides{};
  std::vector<std::string> requires_{};
  std::vector<Conflict> conflicts{};
  std::vector<std::string> after{};  // as `requires_`, but only where something enabled provides it
  // Before those that do not say so. In the stages `backward` and `gradients` such a plugin sees gradients as this rank
  // made them; they are exchanged before the others see them.
  bool early = false;
  Effect effect{};
};

// The step loop as run-time hooks see it.
class StepContext {
 public:
  virtual ~StepContext() = default;
  virtual int64_t step() const = 0;   // 1 for the first step of the run, goes on after a resume
  virtual int64_t steps() const = 0;  // [run] steps
  // A scalar of the step's program, after the step; NaN where only programs of other phases have it, an Error where
  // none has.
  virtual double scalar(std::string_view name) const = 0;
  // Before the step: the value of a scalar that the program declared (Builder::scalar). Any other name is an Error.
  virtual void set_scalar(std::string_view name, double value) = 0;
  virtual void log(std::string_view name, double value) = 0;  // a field of the step's log line
};

// What a plugin keeps across a restart besides tensors: named strings in the checkpoint's manifest.
class CheckpointNotes {
 public:
  virtual ~CheckpointNotes() = default;
  virtual void put(std::string_view name, std::string_view value) = 0;
  virtual std::optional<std::string> get(std::string_view name) const = 0;
};

// How rows of a tensor in another ecosystem's file map to rows of one of our parameters.
struct ExternalTensor {
  std::string name;         // in the foreign file
  Shape shape;              // there, before transposing
  bool transposed = false;  // stored (in, out) there, (out, in) here
  struct Rows {             // of the foreign tensor after transposing; a vector counts as rows of one element
    int64_t from = 0;
    std::string parameter;
    int64_t to = 0;
    int64_t count = 0;
  };
  std::vector<Rows> rows;
};

// What a plugin adds to a model (capability "adds to the model"), in files of another ecosystem: adapters, in PEFT's.
struct ExternalAddition {
  std::string config_name, config;  // the JSON file beside the tensors, and its text
  std::string tensors_name;         // the safetensors file
  std::vector<ExternalTensor> tensors;
};

// Values of the parameters of a checkpoint, whole and in f32.
class ParameterValues {
 public:
  virtual ~ParameterValues() = default;
  virtual void read(const std::string& parameter, float* out) const = 0;
};

// Made whenever a configuration is read, so possibly several times in one process; constructors do no more than
// register op kinds (register_kind, op_kind.h), which may be said each time.
class Plugin {
 public:
  virtual ~Plugin() = default;
  virtual void options(Options&) {}
  virtual Capabilities capabilities() const { return {}; }

  // Ways to plan a run that give the same results to the bit, in words, `order = "block"`; the engine plans the run in
  // each and takes the one that is predicted to be fastest. Way 0 is the plain one, which is taken where no other can
  // be planned: a stage that throws Error takes no more than the way away. None: there is nothing to choose.
  virtual std::vector<std::string> ways(const BatchShape&, const Mesh&) const { return {}; }
  // Planning begins, in one of these ways.
  virtual void take_way(size_t) {}

  // Planning, in this order; phases once, what follows for each program (phases.h), one program after the other.
  // Throwing Error refuses the plan; the engine adds the plugin's name.
  virtual void phases(PhaseStage&) {}
  virtual void model(ModelStage&) {}
  virtual void forward(ProgramStage&) {}
  virtual void exchange(ExchangeStage&) {}
  virtual void backward(ProgramStage&) {}
  virtual void schedule(ScheduleStage&) {}
  virtual void gradients(GradientStage&) {}
  virtual void update(UpdateStage&) {}
  virtual void placement(ProgramStage&) {}

  // Run time, on the thread of the step loop. Stages are called where the program has ops of theirs, load and publish
  // always. They overlap: an update runs as soon as its gradient is final, so update begins before backward ends.
  virtual void step_start(StepContext&) {}
  virtual void part_start(StepContext&, StepPart) {}
  virtual void part_end(StepContext&, StepPart) {}
  virtual void step_end(StepContext&) {}
  virtual void save(CheckpointNotes&) {}
  virtual void restore(const CheckpointNotes&) {}

  // Model plugins: exchange with the Hugging Face ecosystem. TOML text of a [model] table, its comments for the user.
  virtual std::optional<std::string> import_config(std::string_view config_json) {
    (void)config_json;
    return {};
  }
  virtual std::optional<std::string> export_config() const { return {}; }
  virtual std::vector<ExternalTensor> external_tensors() const { return {}; }

  // Plugins that add parameters to the model, for programs that do not know them. Called when stage forward has been,
  // of a program for logits. Puts what was added into a parameter of the model that is exported: `values`, of `shape`,
  // in place.
  virtual void merge(const std::string& parameter, const Shape& shape, const ParameterValues& all,
                     float* values) const {
    (void)parameter, (void)shape, (void)all, (void)values;
  }
  // What was added alone; `model`: the model's external_tensors. None: there is no such format.
  virtual std::optional<ExternalAddition> external_addition(const std::vector<ExternalTensor>& model) const {
    (void)model;
    return {};
  }
  // A folder with such files from which the added parameters of a new run begin; empty: they begin by themselves.
  virtual std::string addition_to_begin_with() const { return ""; }
  // Throws Error unless the configuration beside those tensors, of the file `where`, fits what this plugin adds.
  virtual void check_addition(std::string_view config_json, const std::string& where) const {
    (void)config_json, (void)where;
  }
};

inline constexpr int kPluginApi = 1;  // the major version is part of the entry point's name

// What crosses the library border before anything is known to agree: plain data, its own size first.
struct PluginEntry {
  uint32_t size;
  const char* fingerprint;  // of headers, compiler and standard library; compared before any C++ object crosses
  const char* name;
  const char* version;
  const char* summary;
  Plugin* (*create)();
  void (*destroy)(Plugin*);
};

// Plugins built into the program register here before main.
struct StaticPlugin {
  explicit StaticPlugin(const PluginEntry& entry);
};

}  // namespace strata

#define STRATA_PLUGIN_ENTRY_(Class, name, version, summary)                                                \
  {                                                                                                        \
    sizeof(::strata::PluginEntry), STRATA_FINGERPRINT, name, version, summary,                             \
        []() -> ::strata::Plugin* { return new Class(); }, [](::strata::Plugin* plugin) { delete plugin; } \
  }

#ifdef STRATA_STATIC_PLUGIN
#define STRATA_PLUGIN(Class, name, version, summary) \
  static const ::strata::StaticPlugin strata_static_plugin_(STRATA_PLUGIN_ENTRY_(Class, name, version, summary));
#else
#define STRATA_PLUGIN(Class, name, version, summary)                                                  \
  extern "C" __attribute__((visibility("default"))) const ::strata::PluginEntry* strata_plugin_v1() { \
    static const ::strata::PluginEntry entry STRATA_PLUGIN_ENTRY_(Class, name, version, summary);     \
    return &entry;                                                                                    \
  }
#endif
