// Pipelines without flush (2bw, pipedream), stages as threads: against their update rules written by hand on one rank,
// against one rank whose passes are in an order that gives the same rule, beside strategies by chance; resumed while
// microbatches are under way; what plans say of them, and what is refused. Everything bit for bit.
//
// STRATA_SEED and STRATA_CASES choose what is drawn, to repeat a case or to look for longer.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <span>

#include "tests/descent.h"
#include "tests/outcome.h"
#include "tests/planned_stages.h"
#include "tests/random_cases.h"
#include "tests/resumed_runs.h"

namespace strata::flushless_test {
namespace {

using test::kRate, test::step_down, test::Random;
using Values = std::map<std::string, std::vector<float>>;

constexpr int kSequence = 12, kVocabulary = 61;

// On one rank, orders of passes that give the update rules of pipelines of some stages.
class RuleOnOneRank final : public Plugin {
 public:
  void options(Options& o) override {
    o.add("rule", rule_, "whose").choices({"2bw", "pipedream"});
    o.add("first", first_, "the first blocks of stages");
  }
  void phases(PhaseStage& stage) override { stage.declare("rule: filling", {.last = 1}); }
  void schedule(ScheduleStage& stage) override {
    stage.cut({first_.begin(), first_.end()});
    const int stages = int(first_.size()), count = stage.microbatches;
    stage.order.clear();
    for (int m = 0; m < count; ++m) {
      for (int p = 0; p < stages; ++p) stage.order.push_back({Pass::Part::forward, p, m});
      for (int p = stages; p-- > 0;)
        stage.order.push_back({Pass::Part::backward, p, m - (rule_ == "2bw" ? count : stages - 1 - p)});
    }
    if (stage.phases.in("rule: filling"))
      std::erase_if(stage.order, [](const Pass& pass) { return pass.microbatch < 0; });
  }

 private:
  std::string rule_ = "2bw";
  std::vector<int64_t> first_{0};
};
namespace rule_on_one_rank {
STRATA_PLUGIN(RuleOnOneRank, "rule_on_one_rank", "1", "update rules of pipelines")
}

struct Case {
  std::string schedule = "2bw", model = "tied = false\n", optimizer = "[plugins.adamw]\nlearning_rate = 1e-2\n",
              beside{};
  int stages = 2, data = 1, microbatches = 4, layers = 4;
  int ranks() const { return stages * data; }
  int batch() const { return microbatches * data; }
  std::vector<int> first_blocks() const {
    std::vector<int> first;
    for (int p = 0; p < stages; ++p) first.push_back(p * layers / stages);
    return first;
  }
};

std::string list_of(std::vector<int> numbers, size_t from) {
  std::string text;
  for (size_t i = from; i < numbers.size(); ++i) text += (i > from ? ", " : "") + std::to_string(numbers[i]);
  return "[" + text + "]";
}

std::string text_of(const Case& c, int batch, const std::string& more) {
  return "[run]\nreproducible = true\n[model]\nplugin = \"gpt\"\nhidden = 24\nheads = 3\nffn = 40\ncontext = 16\n"
         "vocabulary = " +
         std::to_string(kVocabulary) + "\nlayers = " + std::to_string(c.layers) + "\n" + c.model +
         "[data]\ntrain = [\"none\"]\nsequence_length = " + std::to_string(kSequence) +
         "\nglobal_batch = " + std::to_string(batch) + "\nmicro_batch = 1\n[device]\nthreads = 1\n" + more;
}
std::string of_stages(const Case& c) {
  return text_of(c, c.batch(),
                 "[mesh]\npipeline = " + std::to_string(c.stages) + "\ndata = " + std::to_string(c.data) + "\n" +
                     c.optimizer + "[plugins.pipeline]\nschedule = \"" + c.schedule +
                     "\"\nboundaries = " + list_of(c.first_blocks(), 1) + "\n" + c.beside);
}

std::vector<int32_t> tokens_of(int step, int batch, uint32_t seed) {
  std::mt19937 random(seed + uint32_t(step) * 100);
  std::vector<int32_t> tokens(size_t(batch * kSequence));
  for (int32_t& token : tokens) token = int32_t(random() % kVocabulary);
  return tokens;
}
double step_of(test::Runner& runner, int step, int batch) {
  const auto tokens = tokens_of(step, batch, 1), targets = tokens_of(step, batch, 2);
  return runner.run_step(tokens.data(), targets.data(), step);
}

struct Outcome {
  std::vector<double> losses;
  std::map<std::string, std::vector<std::byte>> parameters;  // whole
};

Outcome outcome(const std::string& text, int ranks, int batch, int steps) {
  Outcome result;
  std::mutex mutex;
  run_local(
      ranks,
      [&](World& world) {
        test::Runner runner(text, {}, Goal::train, Rates(), ranks == 1 ? nullptr : &world);
        for (int step = 1; step <= steps; ++step) {
          const double loss = step_of(runner, step, batch);
          if (world.rank() == 0) result.losses.push_back(loss);
        }
        for (const PlannedProgram& planned : runner.plans.programs)
          test::expect_ordered(planned.program(), planned.memory);
        for (const Tensor& tensor : runner.storage->persistent_tensors()) {
          if (tensor.role != Role::parameter) continue;
          const std::lock_guard lock(mutex);
          test::put_together(tensor, runner.storage->copy(tensor), result.parameters[tensor.name],
                             int64_t(size_of(tensor.dtype)));
        }
      },
      60);
  return result;
}

void expect_equal(const Outcome& actual, const Outcome& expected) {
  EXPECT_EQ(actual.losses, expected.losses);
  ASSERT_FALSE(expected.parameters.empty());
  ASSERT_EQ(actual.parameters.size(), expected.parameters.size());
  for (const auto& [name, values] : expected.parameters) {
    ASSERT_TRUE(actual.parameters.contains(name)) << name;
    EXPECT_TRUE(actual.parameters.at(name) == values) << name;
  }
}

// Makes the gradients of each microbatch readable after the step, by parameter.
class KeepEach final : public Plugin {
 public:
  void backward(ProgramStage& stage) override {
    for (const Gradient& gradient : *stage.gradients)
      names_[stage.program[gradient.parameter].name] = stage.program[gradient.tensor].name;
    microbatches_ = int(stage.batch.microbatches);
  }
  void gradients(GradientStage& stage) override {
    Program& program = stage.build().program();
    for (const auto& [parameter, name] : names_)
      for (int m = 0; m < microbatches_; ++m) {
        tensors[parameter].push_back(program.find(name + "@" + std::to_string(m)));
        program[tensors[parameter].back()].step_output = true;
      }
  }
  std::map<std::string, std::vector<TensorId>> tensors;

 private:
  std::map<std::string, std::string> names_;
  int microbatches_ = 0;
};

std::vector<float> plus(std::vector<float> a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}
// ((0 + 1) + (2 + 3)) + …: powers of two, the larger ones first; then the rest from behind.
std::vector<float> balanced(const std::vector<std::vector<float>>& all, size_t first, size_t count) {
  size_t largest = 1;
  while (2 * largest <= count) largest *= 2;
  if (largest == count && count == 1) return all[first];
  if (largest == count) return plus(balanced(all, first, count / 2), balanced(all, first + count / 2, count / 2));
  return plus(balanced(all, first, largest), balanced(all, first + largest, count - largest));
}

int stage_of(const std::string& parameter, const Case& c) {
  if (!parameter.starts_with("block."))
    return parameter.starts_with("embedding") || parameter.starts_with("positions") ? 0 : c.stages - 1;
  const int block = std::stoi(parameter.substr(6));
  const std::vector<int> first = c.first_blocks();
  return int(std::upper_bound(first.begin(), first.end(), block) - first.begin()) - 1;
}

// A plain program that updates nothing gives the loss and each microbatch's gradient, of the parameters that it is
// given. 2bw: the update of step t takes the gradients of step t - 1. pipedream: a stage's update takes those of the
// last microbatches that have come back to it, all but the last P - 1 - p of this step and as many of the one before.
Outcome by_hand(const Case& c, int steps) {
  KeepEach keep;
  test::Runner runner(text_of(c, c.batch(), "[plugins.test_descent]\nrate = 0.0\n"), {{"keep", &keep}});
  Values parameters;
  for (const auto& [name, ids] : keep.tensors) parameters[name] = runner.values(name);
  std::map<std::string, std::vector<std::vector<float>>> now, before;
  Outcome result;
  const size_t count = size_t(c.microbatches);
  for (int step = 1; step <= steps; ++step) {
    for (const auto& [name, values] : parameters)
      std::memcpy(runner.storage->persistent(name), values.data(), values.size() * 4);
    result.losses.push_back(step_of(runner, step, c.batch()));
    for (const auto& [name, ids] : keep.tensors) {
      now[name].clear();
      for (TensorId id : ids) now[name].push_back(runner.values(id));
    }
    for (auto& [name, values] : parameters) {
      const size_t left = c.schedule == "2bw" ? count : size_t(c.stages - 1 - stage_of(name, c));
      const size_t there = step == 1 ? count - left : count;
      if (there == 0) continue;
      std::vector<std::vector<float>> sums;
      for (size_t first = 0; first < now[name].size(); first += count) {  // of a rank
        std::vector<std::vector<float>> parts;
        for (size_t m = 0; m < there; ++m)
          parts.push_back((step > 1 && m + left >= count ? before : now)[name][first + m]);
        sums.push_back(balanced(parts, 0, there));
      }
      step_down(values.data(), balanced(sums, 0, sums.size()).data(), int64_t(values.size()), kRate);
    }
    before = now;
  }
  for (const auto& [name, values] : parameters) {
    const auto bytes = std::as_bytes(std::span(values));
    result.parameters[name] = {bytes.begin(), bytes.end()};
  }
  return result;
}

// The loss of a step of which the last stage, too, leaves all backward passes is known a step later.
bool tells_late(const Case& c) { return c.schedule == "2bw" && c.microbatches < c.stages - 1; }
void tell_late(Outcome& outcome) {
  outcome.losses.insert(outcome.losses.begin(), 0);
  outcome.losses.pop_back();
}

TEST(Flushless, IsTheUpdateRuleByHand) {
  constexpr int kSteps = 4;
  size_t number = 0;
  struct Size {
    int stages, microbatches, data = 1;
  };
  for (const char* schedule : {"2bw", "pipedream"})
    for (const auto& [stages, microbatches, data] :
         {Size{2, 1}, {2, 8}, {3, 1}, {3, 2}, {3, 5}, {4, 2}, {4, 7}, {2, 4, 2}}) {
      Case c{.schedule = schedule,
             .model = "tied = false\ndropout = 0.1\nattention_dropout = 0.1\n",
             .optimizer = "[plugins.test_descent]\n",
             .beside = data > 1 ? "[plugins.data_parallel]\n" : "",
             .stages = stages,
             .data = data,
             .microbatches = microbatches,
             .layers = stages + 1};
      if ((c.schedule == "pipedream" && microbatches < stages) || test::left_out(number++)) continue;
      SCOPED_TRACE(of_stages(c));
      Outcome expected = by_hand(c, kSteps);
      if (tells_late(c)) tell_late(expected);
      expect_equal(outcome(of_stages(c), c.ranks(), c.batch(), kSteps), expected);
      if (HasFailure()) return;
    }
}

Case draw_case(Random& random, const std::string& folder) {
  const auto pick = [&](const std::vector<std::string>& from) {
    return from[size_t(test::draw(random, 0, int64_t(from.size()) - 1))];
  };
  Case c;
  c.schedule = pick({"2bw", "pipedream"});
  c.stages = int(test::draw(random, 2, 4));
  c.data = c.stages < 4 && test::draw(random, 0, 1) == 0 ? 2 : 1;
  c.microbatches = int(test::draw(random, c.schedule == "2bw" ? 1 : c.stages, 8));
  // Over several ranks a reproducible sum is a tree of a power of two.
  if (c.data > 1) c.microbatches = c.microbatches > 4 ? 8 : c.microbatches > 2 || c.schedule == "pipedream" ? 4 : 2;
  c.layers = c.stages + int(test::draw(random, 0, 3));
  c.model = pick({"tied = false\n", "tied = false\n", "tied = true\n"}) +
            pick({"", "dropout = 0.1\nattention_dropout = 0.1\n"}) + pick({"", "positions = \"rotary\"\n"}) +
            pick({"", "activation = \"swiglu\"\n"});
  c.optimizer = pick({"[plugins.adamw]\nlearning_rate = 1e-2\n", "[plugins.adafactor]\nlearning_rate = 1e-2\n",
                      "[plugins.sm3]\nlearning_rate = 1e-2\n"}) +
                pick({"", "[plugins.clip]\nmax_norm = 0.1\n"}) + pick({"", "[plugins.mixed_precision]\n"});
  if (c.data > 1)
    c.beside = pick({"[plugins.data_parallel]\n", "[plugins.zero]\nstage = 1\n", "[plugins.zero]\nstage = 2\n",
                     "[plugins.zero]\nstage = 3\n"});
  c.beside += pick({"", "[plugins.recompute]\n", "[plugins.gist]\nminimum = 0\n"});
  if (test::draw(random, 0, 2) == 0) {
    const std::string tier = pick({"host", "nvme"});
    c.beside += "[plugins.offload]\nminimum = 0\ndirectory = \"" + folder + "\"\noptimizer = \"" + tier +
                "\"\nparameters = \"" + tier + "\"\nactivations = \"" + tier + "\"\n";
  }
  return c;
}

// The same rule without a pipeline: on one rank, but where several ranks each leave the last of their microbatches.
// (The first step of pipedream then sums others than a power of two, which one rank does not add in the order of
// several.)
Outcome without_pipeline(const Case& c, int steps) {
  const int ranks = c.schedule == "2bw" ? 1 : c.data;
  return outcome(text_of(c, c.batch(),
                         "[mesh]\ndata = " + std::to_string(ranks) + "\n" + c.optimizer +
                             (ranks > 1 ? "[plugins.data_parallel]\n" : "") + "[plugins.rule_on_one_rank]\nrule = \"" +
                             c.schedule + "\"\nfirst = " + list_of(c.first_blocks(), 0) + "\n"),
                 ranks, c.batch(), steps);
}

TEST(Flushless, RandomRunsAgreeWithTheRuleWithoutPipeline) {
  constexpr int kSteps = 4;
  const test::TemporaryFolder folder;
  const uint64_t base = test::first_seed();
  for (uint64_t seed = base; seed < base + uint64_t(test::cases(5)); ++seed) {
    Random random(seed);
    const Case c = draw_case(random, folder.path());
    SCOPED_TRACE("STRATA_SEED=" + std::to_string(seed) + " STRATA_CASES=1\n" + of_stages(c));
    Outcome actual = outcome(of_stages(c), c.ranks(), c.batch(), kSteps), expected = without_pipeline(c, kSteps);
    // On one rank all losses of 2bw come a step late.
    if (c.schedule == "2bw" && !tells_late(c)) tell_late(actual);
    expect_equal(actual, expected);
    if (HasFailure()) return;
  }
}

using FlushlessTraining = test::ResumedRuns;

Case in_flight(const std::string& schedule, int stages, int data) {
  return {.schedule = schedule,
          .model = "tied = true\ndropout = 0.1\nattention_dropout = 0.1\n",
          .beside = data > 1 ? "[plugins.data_parallel]\n" : "",
          .stages = stages,
          .data = data};
}
TEST_F(FlushlessTraining, TwoBufferedWeightsResumeInMidFlight) {
  expect_resumes(of_stages(in_flight("2bw", 3, 1)), 3, 4, 2);
  expect_resumes(of_stages(in_flight("2bw", 2, 2)), 4, 4, 2);
}
TEST_F(FlushlessTraining, StashedWeightsResumeInMidFlight) {
  expect_resumes(of_stages(in_flight("pipedream", 3, 1)), 3, 4, 2);
}

// Stages of equal cost but for embedding and head: none waits in the middle of a run, whatever comes before the head.
TEST(Flushless, PlansHaveNoBubbleInTheMiddleOfARun) {
  Rates rates;
  rates.flops = 1e8, rates.memory = rates.copy = 1e15, rates.launch = 1e-12;  // products and nothing else
  const auto bubble = [&](const std::string& schedule, int stages) {
    Case c{.schedule = schedule, .stages = stages, .microbatches = 2 * stages, .layers = 4 * stages};
    const std::vector<RunPlans> plans = test::planned_stages(of_stages(c), rates);
    if (schedule != "1f1b") {
      EXPECT_EQ(plans[0].phases.programs(), 2u);
      EXPECT_NE(stages_text(plans).find("bubble"), std::string::npos);
    }
    return summary_of(plans).bubble();
  };
  for (int stages : {2, 4}) {
    SCOPED_TRACE(stages);
    EXPECT_GT(bubble("1f1b", stages), 0.2);
    EXPECT_LT(bubble("2bw", stages), 0.02);
    EXPECT_LT(bubble("pipedream", stages), 0.02);
  }
}

TEST(Flushless, WhatCannotBeIsRefused) {
  const auto expect = [](const Case& c, const std::string& part) {
    const std::string found = test::refusal_of_stages(of_stages(c));
    EXPECT_NE(found.find(part), std::string::npos) << found;
  };
  expect({.schedule = "pipedream", .stages = 3, .microbatches = 2},
         "schedule pipedream over 3 stages needs at least 3 microbatches a step, and there are 2.");
  for (const char* schedule : {"2bw", "pipedream"}) {
    expect({.schedule = schedule, .beside = "[plugins.mixed_precision]\ndtype = \"fp16\"\n"},
           "in which the loss scale may be another");
  }
}

}  // namespace
}  // namespace strata::flushless_test
