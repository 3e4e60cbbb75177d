// Updates made ahead of the norm of all gradients (post_validation of pipelines), stages as threads: bit for bit the
// run that waits for it, whether no step is clipped, all are, or some; beside strategies by chance; settled and resumed
// anywhere; what plans say of it, and what is refused.
//
// STRATA_SEED and STRATA_CASES choose what is drawn, to repeat a case or to look for longer.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <mutex>
#include <set>

#include "strata/json.h"
#include "tests/ordering.h"
#include "tests/planned_stages.h"
#include "tests/random_cases.h"
#include "tests/resumed_runs.h"

namespace strata::post_validation_test {
namespace {

using test::Random;

constexpr int kSequence = 12, kVocabulary = 61, kSteps = 5;

struct Case {
  std::string schedule = "1f1b", model = "tied = false\n", optimizer = "[plugins.adamw]\nlearning_rate = 1e-2\n",
              beside{}, run{};
  int stages = 2, chunks = 0, data = 1, tensor = 1, sequence = 1, microbatches = 4, layers = 4;
  double max_norm = 1;
  int ranks() const { return stages * data * tensor * sequence; }
  int batch() const { return microbatches * data; }
};

std::string text_of(const Case& c, bool ahead) {
  return "[run]\n" + c.run +
         "[model]\nplugin = \"gpt\"\nhidden = 24\nheads = 3\nffn = 42\ncontext = 16\nvocabulary = " +
         std::to_string(kVocabulary) + "\nlayers = " + std::to_string(c.layers) + "\n" + c.model +
         "[data]\ntrain = [\"none\"]\nsequence_length = " + std::to_string(kSequence) +
         "\nglobal_batch = " + std::to_string(c.batch()) +
         "\nmicro_batch = 1\n[device]\nthreads = 1\n[mesh]\npipeline = " + std::to_string(c.stages) +
         "\ndata = " + std::to_string(c.data) + "\ntensor = " + std::to_string(c.tensor) +
         "\nsequence = " + std::to_string(c.sequence) + "\n" + c.optimizer +
         (c.max_norm > 0 ? "[plugins.clip]\nmax_norm = " + std::to_string(c.max_norm) + "\n" : "") +
         "[plugins.pipeline]\nschedule = \"" + c.schedule + "\"\n" +
         (c.chunks > 0 ? "chunks = " + std::to_string(c.chunks) + "\n" : "") +
         (ahead ? "post_validation = true\n" : "") + c.beside;
}

// One more factor on all gradients: of a step that overflowed, of one that is scaled, and of others.
class Overflow final : public Plugin {
 public:
  void gradients(GradientStage& stage) override {
    const TensorId factor = stage.build().scalar("overflow");
    for (Gradient& gradient : stage.gradients()) stage.scale(gradient, factor);
  }
  void step_start(StepContext& context) override {
    context.set_scalar("overflow", context.step() == 2 ? NAN : context.step() == 3 ? 0.5 : 1);
  }
};

struct Outcome {
  std::vector<double> losses, norms;
  std::map<std::string, std::vector<std::byte>> tensors;  // whole: parameters and states, as checkpoints have them
  size_t repeats = 0;                                     // ops of the first stage that may run again
};

// The program's norm, of the step before where updates are made ahead.
std::optional<std::string> norm_of(const Program& program) {
  for (const Op& op : program.ops)
    if (op.kind->name == "clip_factor") return program[op.outputs[1]].name;
  return {};
}

// `settle_after`: steps after which somebody wants to see what a step made, as for a checkpoint. Every other step goes
// on behind the next one's beginning.
Outcome outcome(const std::string& text, int ranks, int batch, const std::set<int>& settle_after = {},
                bool poisoned = false, bool overflows = false) {
  Outcome result;
  std::mutex mutex;
  run_local(
      ranks,
      [&](World& world) {
        Overflow overflow;
        test::Runner runner(text,
                            overflows ? std::vector<NamedPlugin>{{"overflow", &overflow}} : std::vector<NamedPlugin>{},
                            Goal::train, Rates(), &world);
        runner.poisoned = poisoned;
        if (const Program& program = runner.built.program; program.again_if && world.rank() == 0)
          test::expect_ordered(program, runner.plan);
        const auto collect = [&](int step) {
          for (const Tensor& tensor : runner.storage->persistent_tensors()) {
            if (tensor.role == Role::scalar || tensor.lasting->unsaved || !tensor.lasting->rounded_from.empty())
              continue;
            const std::lock_guard lock(mutex);
            test::put_together(tensor, runner.storage->copy(tensor),
                               result.tensors[tensor.name + " after " + std::to_string(step)],
                               int64_t(size_of(tensor.dtype)));
          }
        };
        for (int step = 1; step <= kSteps; ++step) {
          Random random(uint64_t(step) * 7);
          std::vector<int32_t> tokens(size_t(batch * kSequence)), targets(tokens);
          for (auto* list : {&tokens, &targets})
            for (int32_t& token : *list) token = int32_t(test::draw(random, 0, kVocabulary - 1));
          const bool settles = step == kSteps || settle_after.contains(step);
          runner.in_loop = !settles;
          const double loss = runner.run_step(tokens.data(), targets.data(), step);
          if (world.rank() == 0) {
            result.losses.push_back(loss);
            if (const auto norm = norm_of(runner.built.program)) result.norms.push_back(runner.scalar(*norm));
          }
          if (!settles) continue;
          runner.settle();
          collect(step);
        }
        if (world.rank() == 0)
          for (const Op& op : runner.built.program.ops)
            result.repeats += op.purpose == Purpose::again && op.step_part == StepPart::forward;
      },
      60);
  return result;
}

void expect_equal(const Outcome& actual, const Outcome& expected) {
  EXPECT_EQ(actual.losses, expected.losses);
  ASSERT_FALSE(expected.tensors.empty());
  ASSERT_EQ(actual.tensors.size(), expected.tensors.size());
  for (const auto& [name, values] : expected.tensors) {
    ASSERT_TRUE(actual.tensors.contains(name)) << name;
    EXPECT_TRUE(actual.tensors.at(name) == values) << name;
  }
}

enum class Clips { never, always, sometimes };

// A limit that steps of a run so often exceed.
double limit_for(Case c, Clips clips) {
  if (clips == Clips::never) return 1e6;
  if (clips == Clips::always) return 1e-3;
  c.max_norm = 1e6;
  std::vector<double> norms = outcome(text_of(c, false), c.ranks(), c.batch()).norms;
  std::nth_element(norms.begin(), norms.begin() + kSteps / 2, norms.end());
  return norms[kSteps / 2];
}

void expect_same_with_and_without(Case c, Clips clips, const std::set<int>& settle_after = {}, bool poisoned = false) {
  c.max_norm = limit_for(c, clips);
  SCOPED_TRACE(text_of(c, true));
  const Outcome plain = outcome(text_of(c, false), c.ranks(), c.batch(), settle_after),
                ahead = outcome(text_of(c, true), c.ranks(), c.batch(), settle_after, poisoned);
  expect_equal(ahead, plain);
  // Norms are those of the step before, but of a step that nothing comes before.
  for (size_t i = 1; i < plain.norms.size(); ++i) EXPECT_EQ(ahead.norms[i], plain.norms[i - 1]) << i;
  EXPECT_GT(ahead.repeats, 0u);
  const auto clipped = [&](double norm) { return norm > c.max_norm; };
  if (clips == Clips::sometimes) {
    EXPECT_TRUE(std::any_of(plain.norms.begin(), plain.norms.end(), clipped));
    EXPECT_FALSE(std::all_of(plain.norms.begin(), plain.norms.end(), clipped));
  }
}

TEST(PostValidation, IsTheRunThatWaits) {
  size_t number = 0;
  for (const auto& [schedule, stages, chunks, microbatches] : {std::tuple{"1f1b", 2, 0, 4},
                                                               {"1f1b", 4, 0, 2},
                                                               {"gpipe", 3, 0, 5},
                                                               {"zero_bubble_h1", 3, 0, 4},
                                                               {"zero_bubble_h2", 4, 0, 5},
                                                               {"zero_bubble_v", 2, 2, 3},
                                                               {"interleaved", 3, 2, 4},
                                                               {"interleaved", 4, 2, 2},
                                                               {"breadth_first", 2, 2, 3}})
    for (const Clips clips : {Clips::sometimes, Clips::never, Clips::always}) {
      // Of most schedules the one that has both kinds of steps.
      if (clips != Clips::sometimes && std::string(schedule) != "zero_bubble_h2") continue;
      if (test::left_out(number++)) continue;
      Case c{.schedule = schedule,
             .model = "tied = false\ndropout = 0.1\n",
             .stages = stages,
             .chunks = chunks,
             .microbatches = microbatches,
             .layers = stages * std::max(chunks, 1) + 1};
      expect_same_with_and_without(c, clips, {2});
      if (HasFailure()) return;
    }
}

// A step that overflowed updates nothing, and passes read what they did before.
TEST(PostValidation, TakesBackUpdatesOfStepsThatOverflowed) {
  for (const char* precision : {"", "[plugins.mixed_precision]\n"}) {
    Case c{.schedule = "zero_bubble_h1", .beside = precision, .stages = 3, .max_norm = 1e6};
    const auto run = [&](bool ahead) { return outcome(text_of(c, ahead), c.ranks(), c.batch(), {2}, false, true); };
    expect_equal(run(true), run(false));
  }
}

Case draw_case(Random& random, const std::string& folder) {
  const auto pick = [&](const std::vector<std::string>& from) {
    return from[size_t(test::draw(random, 0, int64_t(from.size()) - 1))];
  };
  const auto one_in = [&](int n) { return test::draw(random, 1, n) == 1; };
  Case c;
  c.schedule = pick(
      {"gpipe", "1f1b", "interleaved", "breadth_first", "zero_bubble_h1", "zero_bubble_h2", "zero_bubble_v", "auto"});
  c.stages = int(test::draw(random, 2, 4));
  c.chunks = c.schedule == "interleaved" || c.schedule == "breadth_first" ? int(test::draw(random, 1, 2)) : 0;
  if (c.stages == 2 && one_in(6))
    c.tensor = 3;
  else if (c.stages < 4 && one_in(6))
    c.sequence = 2;
  else if (c.stages < 4 && one_in(2))
    c.data = 2;
  c.microbatches = int(test::draw(random, 1, 8));
  c.layers = c.stages * 2 + int(test::draw(random, 0, 2));
  c.model = pick({"tied = false\n", "tied = false\n", "tied = true\n"}) +
            pick({"", "dropout = 0.1\nattention_dropout = 0.1\n"}) + pick({"", "positions = \"rotary\"\n"}) +
            pick({"", "activation = \"swiglu\"\n"});
  if (c.tensor == 1 && c.sequence == 1) c.run = pick({"", "reproducible = true\n"});
  if (c.data > 1 && !c.run.empty()) c.microbatches = c.microbatches > 4 ? 8 : c.microbatches > 2 ? 4 : 2;
  c.optimizer = pick({"[plugins.adamw]\nlearning_rate = 1e-2\n", "[plugins.adafactor]\nlearning_rate = 1e-2\n",
                      "[plugins.sm3]\nlearning_rate = 1e-2\n", "[plugins.adamw8bit]\nlearning_rate = 1e-2\n"}) +
                pick({"", "[plugins.mixed_precision]\n", "[plugins.mixed_precision]\ngradients = \"bf16\"\n"}) +
                pick({"", "[plugins.schedule]\nwarmup = 3\n"});
  if (c.data > 1)
    c.beside = pick({"[plugins.data_parallel]\n", "[plugins.zero]\nstage = 1\n", "[plugins.zero]\nstage = 2\n",
                     "[plugins.zero]\nstage = 3\n"});
  if (c.tensor > 1) c.beside += "[plugins.tensor_parallel]\n";
  if (c.sequence > 1) c.beside += "[plugins.context_parallel]\n";
  c.beside += pick({"", "[plugins.recompute]\n", c.tensor > 1 ? "" : "[plugins.gist]\nminimum = 0\n",
                    "[parameters.\"embedding.weight\"]\nfrozen = true\n", "[plugins.lora]\nrank = 3\n",
                    "[plugins.moe]\nexperts = 3\nk = 1\nffn = 16\n"});
  if (one_in(3)) {
    const std::string tier = pick({"host", "nvme"});
    c.beside += "[plugins.offload]\nminimum = 0\ndirectory = \"" + folder + "\"\noptimizer = \"" + tier +
                "\"\nactivations = \"" + tier + "\"\n" + pick({"", "[host]\nthreads = 1\n"});
  }
  return c;
}

TEST(PostValidation, RandomRunsAreThoseThatWait) {
  const test::TemporaryFolder folder;
  const uint64_t base = test::first_seed();
  for (uint64_t seed = base; seed < base + uint64_t(test::cases(3)); ++seed) {
    Random random(seed);
    Case c = draw_case(random, folder.path());
    const auto clips = Clips(test::draw(random, 0, 2));
    std::set<int> settle_after;
    for (int step = 1; step < kSteps; ++step)
      if (test::draw(random, 0, 3) == 0) settle_after.insert(step);
    SCOPED_TRACE("STRATA_SEED=" + std::to_string(seed) + " STRATA_CASES=1");
    // Poisoned: in the order of the program, with what is released overwritten.
    expect_same_with_and_without(c, clips, settle_after, test::draw(random, 0, 3) == 0);
    if (HasFailure()) return;
  }
}

using PostValidationTraining = test::ResumedRuns;

// As training does it: with validation and checkpoints between steps, in which settled values are seen. Of each step
// the same is logged.
TEST_F(PostValidationTraining, LogsAndSavesWhatTheRunThatWaitsDoes) {
  // Of a run, what its log has.
  const auto logged = [&](const Case& c, bool ahead, const std::string& run) {
    train_to(test::write_file(path_of("config.toml"), text_of(c, ahead)), c.ranks(), run, 7, false,
             {"run.checkpoint_every=3", "run.keep=9", "run.validate_every=2", "run.validate_batches=2",
              "data.validation=[\"" + tokens() + "\"]"});
    std::vector<std::vector<double>> steps;
    std::ifstream log(path_of(run + "/log.jsonl"));
    for (std::string line; std::getline(log, line);) {
      const Json json = Json::parse(line, "log");
      steps.push_back({});
      for (const char* field : {"step", "loss", "gradient_norm", "validation_loss"})
        if (const Json* found = json.find(field)) steps.back().push_back(found->number(field));
    }
    return steps;
  };
  for (const char* more : {"", "[plugins.mixed_precision]\n"}) {
    Case c{.schedule = "zero_bubble_h2",
           .model = "tied = true\ndropout = 0.1\n",
           .beside = more,
           .stages = 3,
           .max_norm = 1e6};
    const std::string name = *more ? "narrow" : "wide";
    std::vector<double> norms;
    for (const auto& fields : logged(c, false, name)) norms.push_back(fields.at(2));
    std::nth_element(norms.begin(), norms.begin() + 3, norms.end());
    c.max_norm = norms.at(3);
    const auto plain = logged(c, false, name + " plain"), ahead = logged(c, true, name + " ahead");
    ASSERT_EQ(plain.size(), 7u);
    EXPECT_EQ(ahead, plain);
    std::set<bool> clipped;
    for (const auto& fields : plain) clipped.insert(fields.at(2) > c.max_norm);
    EXPECT_EQ(clipped.size(), 2u);
    for (int step : {3, 6, 7}) EXPECT_TRUE(files(name + " ahead", step) == files(name + " plain", step)) << step;
  }
}

TEST_F(PostValidationTraining, Resumes) {
  Case c{.model = "tied = false\n", .beside = "[plugins.zero]\nstage = 1\n", .data = 2, .max_norm = 0.5};
  expect_resumes(text_of(c, true), c.ranks(), 4, 3);
}

// Stages of equal cost but for embedding and head: the norm is waited for, or not.
TEST(PostValidation, PlansHaveTheBubbleOfARunWithoutClipping) {
  Rates rates;
  rates.flops = 1e8, rates.memory = rates.copy = 1e15, rates.launch = 1e-12;  // products and nothing else
  for (const char* schedule : {"zero_bubble_h2", "zero_bubble_v"}) {
    SCOPED_TRACE(schedule);
    Case c{.schedule = schedule, .stages = 4, .microbatches = 8, .layers = 16, .max_norm = 0};
    const auto bubble = [&](bool ahead) { return summary_of(test::planned_stages(text_of(c, ahead), rates)).bubble(); };
    const double without_clip = bubble(false);
    c.max_norm = 1;
    EXPECT_GT(bubble(false), without_clip + 0.03);
    EXPECT_LT(bubble(true), without_clip + 0.001);
  }
}

TEST(PostValidation, WhatCannotBeIsRefused) {
  const auto expect = [](const Case& c, const std::string& part) {
    const std::string found = test::refusal_of_stages(text_of(c, true));
    EXPECT_NE(found.find(part), std::string::npos) << found;
  };
  expect({.schedule = "2bw"}, "post_validation: schedule = \"2bw\" leaves passes to the next step anyway");
  expect({.beside = "[plugins.mixed_precision]\ndtype = \"fp16\"\n"}, "train without loss scaling");
  expect({.beside = "[plugins.offload]\nparameters = \"nvme\"\ndirectory = \"x\"\nminimum = 0\n"},
         "let what passes read stay in memory");
  std::string on_gpu = text_of({}, true);
  on_gpu.insert(on_gpu.find("threads = 1"), "backend = \"cuda\"\n");
  EXPECT_NE(test::refusal_of_stages(on_gpu).find("cuda"), std::string::npos) << test::refusal_of_stages(on_gpu);
}

// Without a norm nothing waits: the plan is the same, and says so.
TEST(PostValidation, ChangesNothingWhereNothingWaits) {
  const Case c{.max_norm = 0};
  const std::vector<RunPlans> with = test::planned_stages(text_of(c, true), Rates()),
                              without = test::planned_stages(text_of(c, false), Rates());
  for (size_t s = 0; s < with.size(); ++s) {
    EXPECT_EQ(print(with[s]), print(without[s]));
    ASSERT_FALSE(with[s].main().built.notes.empty());
    EXPECT_NE(with[s].main().built.notes.back().find("none is made ahead"), std::string::npos);
  }
}

}  // namespace
}  // namespace strata::post_validation_test
