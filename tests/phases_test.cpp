// Phases: runs of plugins that declare some (local_steps.h) against the same steps put together by hand, a run without
// phases for each, persistent tensors carried from one to the next; bit for bit. Resume within every phase.
#include <cstring>
#include <random>

#include "tests/backends.h"
#include "tests/harness.h"
#include "tests/local_steps.h"
#include "tests/resumed_runs.h"

namespace strata::phases_test {
namespace {

using test::LocalSteps;
using test::SumParameters;
namespace local_steps {
STRATA_PLUGIN(LocalSteps, "local_steps", "1", "updates every few steps")
}
namespace sum_parameters {
STRATA_PLUGIN(SumParameters, "sum_parameters", "1", "sums parameters from a step on")
}

constexpr int kVocabulary = 61, kSequence = 16, kBatch = 4;
const std::string kPhases = "[plugins.local_steps]\n[plugins.sum_parameters]\n";

std::string toml(int ranks, const std::string& plugins, const std::string& more = "", int layers = 2) {
  return more + "[model]\nplugin = \"gpt\"\nlayers = " + std::to_string(layers) +
         "\nhidden = 32\nheads = 4\nffn = 71\nvocabulary = 61\ncontext = 16\ndropout = 0.1\n[data]\ntrain = "
         "[\"none\"]\nsequence_length = 16\nglobal_batch = 4\nmicro_batch = 1\n[mesh]\ndata = " +
         std::to_string(ranks) + "\n[plugins.adamw]\n" + plugins;
}

// Everything that survives a step but scalars, by name.
using State = std::map<std::string, std::vector<std::byte>>;

void take(test::Runner& runner, State& state) {
  for (const Tensor& tensor : runner.storage->persistent_tensors())
    if (tensor.role != Role::scalar) state[tensor.name] = runner.storage->copy(tensor);
}

void give(test::Runner& runner, const State& state) {
  for (const Tensor& tensor : runner.storage->persistent_tensors())
    if (const auto found = state.find(tensor.name); found != state.end())
      runner.storage->fill(tensor, [&](void* memory, int64_t first, int64_t count) {
        const int64_t size = size_of(tensor.dtype);
        std::memcpy(memory, found->second.data() + first * size, size_t(count * size));
      });
  runner.storage->release_piece();
}

struct Outcome {
  std::vector<double> losses;
  State state;  // of this rank
};

// A rank's run, and where it runs.
struct Place {
  World* world = nullptr;
  std::string backend = "cpu";
  Device* device = nullptr;
  bool poisoned = false;
};

class Tokens {
 public:
  void next() {
    for (auto* list : {&tokens, &targets})
      for (int32_t& token : *list) token = int32_t(random_() % kVocabulary);
  }
  std::vector<int32_t> tokens = std::vector<int32_t>(size_t(kBatch * kSequence)), targets = tokens;

 private:
  std::mt19937 random_{7};
};

Outcome with_phases(const std::string& text, int steps, const Place& place) {
  test::Runner runner(text, {}, Goal::train, {}, place.world, place.backend, place.device);
  runner.poisoned = place.poisoned;
  EXPECT_EQ(runner.plans.phases.programs(), 6u);
  Outcome result;
  Tokens tokens;
  for (int step = 0; step < steps; ++step) {
    tokens.next();
    result.losses.push_back(runner.run_step(tokens.tokens.data(), tokens.targets.data()));
  }
  take(runner, result.state);
  for (Tier tier : {Tier::device, Tier::host, Tier::nvme})
    EXPECT_EQ(runner.storage->bytes(tier), runner.plans.main().arena_bytes[size_t(tier)]) << name_of(tier);
  return result;
}

// A run for one step, whose plugins know of no phases.
struct Single {
  Single(const std::string& text, int64_t step, const Place& place)
      : local(step),
        sums(step),
        runner(text, {{"local_steps", &local}, {"sum_parameters", &sums}}, Goal::train, {}, place.world, place.backend,
               place.device) {}
  LocalSteps local;
  SumParameters sums;
  test::Runner runner;
};

Outcome by_hand(const std::string& text, int steps, const Place& place) {
  Outcome result;
  Tokens tokens;
  for (int step = 1; step <= steps; ++step) {
    tokens.next();
    Single run(text, step, place);
    give(run.runner, result.state);
    result.losses.push_back(run.runner.run_step(tokens.tokens.data(), tokens.targets.data(), step));
    take(run.runner, result.state);
  }
  return result;
}

void expect_equal(const Outcome& a, const Outcome& b) {
  EXPECT_EQ(a.losses, b.losses);
  ASSERT_FALSE(b.state.empty());
  EXPECT_EQ(a.state.size(), b.state.size());
  for (const auto& [name, bytes] : b.state) {
    ASSERT_TRUE(a.state.contains(name)) << name;
    EXPECT_TRUE(a.state.at(name) == bytes) << name;
  }
}

void expect_equal_by_hand(int ranks, const std::string& plugins, int steps = 10, bool poisoned = false) {
  SCOPED_TRACE(std::to_string(ranks) + " ranks\n" + plugins);
  std::vector<Outcome> phases(static_cast<size_t>(ranks)), hand(phases);
  const auto all = [&](const std::string& text, std::vector<Outcome>& outcomes, auto&& run) {
    run_local(
        ranks,
        [&](World& world) {
          outcomes[size_t(world.rank())] =
              run(text, steps, Place{.world = ranks > 1 ? &world : nullptr, .poisoned = poisoned});
        },
        120);
  };
  const std::string threads = "[device]\nthreads = 1\n";
  all(toml(ranks, plugins + kPhases, threads), phases, with_phases);
  all(toml(ranks, plugins, threads), hand, by_hand);
  for (int r = 0; r < ranks; ++r) expect_equal(phases[size_t(r)], hand[size_t(r)]);
}

TEST(Phases, EqualRunsPutTogetherByHand) {
  expect_equal_by_hand(1, "");
  expect_equal_by_hand(1, "[plugins.clip]\nmax_norm = 0.1\n[plugins.mixed_precision]\n");
}

TEST(Phases, EqualRunsPutTogetherByHandOnRanks) {
  expect_equal_by_hand(2, "[plugins.clip]\nmax_norm = 0.1\n");
  expect_equal_by_hand(4, "[plugins.mixed_precision]\n");
}

TEST(Phases, RestWhereOtherProgramsDo) {
  const test::TemporaryFolder folder;
  const auto offload = [&](const std::string& where) {
    return "[plugins.recompute]\n[plugins.offload]\nminimum = 0\ndirectory = \"" + folder.path() +
           "\"\noptimizer = \"" + where + "\"\nparameters = \"" + where + "\"\nactivations = \"" + where + "\"\n";
  };
  expect_equal_by_hand(1, offload("nvme"));
  if (!test::left_out(1)) expect_equal_by_hand(1, offload("host"), 7, true);
  if (!test::left_out(2)) expect_equal_by_hand(2, offload("nvme"));
}

// What programs rest under budgets, they rest together: all of them have the same persistent tensors at the same places
// and are within the budget; only what moves differs.
TEST(Phases, AreWithinOneBudget) {
  const test::TemporaryFolder folder;
  const std::string offload = "[plugins.offload]\nminimum = 0\ndirectory = \"" + folder.path() +
                              "\"\noptimizer = \"nvme\"\nparameters = \"nvme\"\nactivations = \"nvme\"\n";
  const auto text = [&](int64_t budget) {
    return toml(1, offload + kPhases, "[device]\nthreads = 1\nmemory = \"" + std::to_string(budget) + "B\"\n");
  };
  const Outcome plain = with_phases(toml(1, kPhases, "[device]\nthreads = 1\n"), 9, {});
  test::Runner without(toml(1, kPhases, "[device]\nthreads = 1\n"));
  const int64_t all = without.plans.main().arena_bytes[int(Tier::device)];
  size_t number = 0;
  for (const int64_t budget : {all * 6 / 10, all * 9 / 10}) {
    if (test::left_out(number++)) continue;
    SCOPED_TRACE(budget);
    auto run = std::make_unique<test::Runner>(text(budget));
    const test::Runner& runner = *run;
    EXPECT_LE(runner.storage->bytes(Tier::device) + runner.storage->bytes(Tier::host), budget);
    EXPECT_GT(runner.storage->bytes(Tier::nvme), 0);
    const auto& programs = runner.plans.programs;
    for (const PlannedProgram& planned : programs)
      for (const Tensor& tensor : programs[0].program().tensors)
        if (tensor.persistent && !tensor.part_of) {
          const TensorId id = planned.program().find(tensor.name);
          ASSERT_TRUE(id) << tensor.name << " in " << planned.title();
          EXPECT_EQ(planned.program()[id].home, tensor.home) << tensor.name;
        }
    run.reset();  // one run at a time has the folder
    expect_equal(with_phases(text(budget), 9, {}), plain);
  }
}

TEST(Phases, ArePlannedAndTold) {
  const test::TemporaryFolder folder;
  Session session(test::write_file(folder / "config.toml", toml(2, kPhases)), {});
  session.rates = Rates();
  const RunPlans plans = session.plan_run();
  ASSERT_EQ(plans.programs.size(), 6u);
  EXPECT_EQ(plans.main().title(), "phase local steps: first");
  EXPECT_EQ(plans.programs[1].title(), "no phase");
  EXPECT_EQ(plans.programs[5].title(), "phase local steps: first + sum of parameters");
  for (const PlannedProgram& planned : plans.programs) {
    EXPECT_GT(planned.prediction.value().seconds, 0);
    const bool exchanges = planned.phases.in("local steps: exchange");
    EXPECT_EQ(planned.prediction->wire_bytes > 0, exchanges) << planned.title();
  }
  const std::string text = plan_text(plans), json = plan_json(plans);
  EXPECT_NE(text.find("phase \"local steps: exchange\" (of plugin \"local_steps\"): steps 3, 6, 9, …\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("  phase local steps: exchange + sum of parameters "), std::string::npos) << text;
  EXPECT_NE(json.find("\"program\": \"no phase\""), std::string::npos) << json;
  // What ranks compare has the steps of each phase and every program.
  Session other(test::write_file(folder / "other.toml", toml(2, kPhases)), {"plugins.sum_parameters.from=7"});
  other.rates = Rates();
  EXPECT_NE(print(plans), print(other.plan_run()));
  for (const PlannedProgram& planned : plans.programs)
    EXPECT_NE(print(plans).find("# " + planned.title() + "\n"), std::string::npos);
}

// A gradient that nobody sums is refused with the phase's name.
class SumsAtTimes final : public Plugin {
 public:
  Capabilities capabilities() const override { return {.provides = {"summed_gradients"}}; }
  void phases(PhaseStage& stage) override { stage.declare("sums", {.every = 2}); }
  void exchange(ExchangeStage& stage) override {
    if (stage.phases().in("sums"))
      for (const Gradient& gradient : stage.gradients()) stage.want(gradient, {});
  }
};
TEST(Phases, ARefusalNamesThePhase) {
  const test::TemporaryFolder folder;
  SumsAtTimes plugin;
  Session session(test::write_file(folder / "config.toml", toml(2, "")), {});
  session.plugins.push_back({"at_times", &plugin});
  try {
    session.plan_run();
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("program of no phase: mesh.data asks for several ranks"),
              std::string::npos)
        << error.what();
  }
}

#if defined(STRATA_GPU) || defined(STRATA_EMULATED_CUDA)
// On a device each program is a graph of its own from its second step on.
TEST(Cuda, PhasesEqualRunsPutTogetherByHand) {
  STRATA_NEEDS_GPU();
  const Place place{.backend = "cuda", .device = test::gpu()};
  const std::string more = "[device]\nthreads = 1\n", clip = "[plugins.clip]\nmax_norm = 0.1\n";
  const auto text = [&](const std::string& plugins) { return toml(1, clip + plugins, more, 1); };
  expect_equal(with_phases(text(kPhases), 10, place), by_hand(text(""), 10, place));
}
#endif

using PhasesTraining = test::ResumedRuns;

// Tensors of each rank, losses and validation losses after a resume behind every step, those of a run that was never
// interrupted: in step 2 nothing has been updated and gradients wait, in step 4 nothing has been summed yet.
TEST_F(PhasesTraining, ResumesWithinEveryPhase) {
  for (int ranks : {1, 2})
    expect_resumes(toml(ranks, "[plugins.clip]\n" + kPhases, "[device]\nthreads = 1\n"), ranks, 8, ranks == 2 ? 5 : 7,
                   {"run.validate_every=2", "data.validation=[\"" + tokens() + "\"]"});
}

}  // namespace
}  // namespace strata::phases_test
