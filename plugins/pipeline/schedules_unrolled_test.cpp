// Schedules on real programs: the passes of all stages, run on one rank in orders in which the stages could have run
// them, give bit for bit what a step without any schedule gives.
#include <cstring>
#include <random>

#include "plugins/pipeline/actions.h"
#include "plugins/pipeline/schedules/schedules.h"
#include "tests/harness.h"

namespace strata::pipeline {
namespace {

constexpr int kLayers = 8, kTokens = 6 * 16;

std::string toml(int microbatches, const std::string& run = "") {
  return "[run]\n" + run + "[model]\nplugin = \"gpt\"\nlayers = " + std::to_string(kLayers) +
         "\nhidden = 32\nheads = 4\nvocabulary = 64\ncontext = 16\ndropout = 0.1\ntied = false\n[data]\ntrain = "
         "[\"none\"]\nsequence_length = 16\nglobal_batch = 6\nmicro_batch = " +
         std::to_string(6 / microbatches) + "\n[device]\nthreads = 1\n[plugins.adamw]\n[plugins.clip]\n";
}

// One list of all stages' passes: whose turn it is, chance says; who waits for another stage does not get one.
std::vector<Pass> merged(const Schedule& schedule, const std::vector<std::vector<Pass>>& order, std::mt19937& random) {
  using Part = Pass::Part;
  const auto chunks = schedule.own_chunks();
  const int all = int(schedule.stage_of.size());
  std::set<std::tuple<bool, int, int>> waits;  // backward, chunk, microbatch: not yet run
  const auto unit = [&](size_t stage, const Pass& pass) {
    return std::tuple(pass.part != Part::forward, chunks[stage][size_t(pass.chunk)], pass.microbatch);
  };
  size_t left = 0;
  for (size_t s = 0; s < order.size(); left += order[s++].size())
    for (const Pass& pass : order[s])
      if (pass.part != Part::weight_gradient) waits.insert(unit(s, pass));
  std::vector<size_t> next(order.size(), 0);
  std::vector<Pass> merged;
  for (size_t turn = 0; merged.size() < left && turn < 1000 * left; ++turn) {
    const size_t s = random() % order.size();
    if (next[s] == order[s].size()) continue;
    Pass pass = order[s][next[s]];
    const auto [backward, chunk, m] = unit(s, pass);
    const int from = backward ? chunk + 1 : chunk - 1;
    if (pass.part != Part::weight_gradient && from >= 0 && from < all && waits.contains({backward, from, m})) continue;
    waits.erase({backward, chunk, m});
    pass.chunk = chunk;
    merged.push_back(pass);
    ++next[s];
  }
  EXPECT_EQ(merged.size(), left);
  return merged;
}

class Merged final : public Plugin {
 public:
  Merged(Schedule schedule, uint32_t seed) : schedule_(std::move(schedule)), random_(seed) {}
  void phases(PhaseStage& stage) override {
    if (!schedule_.first.empty()) stage.declare("filling", {.last = 1});
  }
  void schedule(ScheduleStage& stage) override {
    std::vector<int> first_blocks;
    for (size_t g = 0; g < schedule_.stage_of.size(); ++g)
      first_blocks.push_back(int(g * kLayers / schedule_.stage_of.size()));
    stage.cut(first_blocks);
    const bool filling = !schedule_.first.empty() && stage.phases.in("filling");
    stage.sums_go_on = schedule_.sums_go_on;
    stage.order = merged(schedule_, filling ? schedule_.first : schedule_.order, random_);
  }

 private:
  Schedule schedule_;
  std::mt19937 random_;
};

// Losses of four steps, then everything that persists.
std::vector<float> trained(const std::string& config, Plugin* plugin) {
  test::Runner runner(config, plugin ? std::vector<NamedPlugin>{{"merged", plugin}} : std::vector<NamedPlugin>{});
  std::vector<float> result;
  for (uint32_t step = 0; step < 4; ++step) {
    std::mt19937 random(step);
    std::vector<int32_t> tokens(kTokens), targets(kTokens);
    for (auto* list : {&tokens, &targets})
      for (int32_t& token : *list) token = int32_t(random() % 64);
    result.push_back(float(runner.run_step(tokens.data(), targets.data())));
  }
  for (TensorId id : runner.built.program.with_role(Role::parameter))
    for (float value : runner.values(runner.built.program[id].name)) result.push_back(value);
  return result;
}
std::vector<float> trained(const std::string& config, const Schedule& schedule, uint32_t seed = 1) {
  Merged merged(schedule, seed);
  return trained(config, &merged);
}

void expect_equal(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * 4), 0);
}

struct Named {
  const char* name;
  Schedule (*make)(const Problem&);
  int chunks;
};

// Without `reproducible`, too: gradients are summed in the order of microbatches.
TEST(UnrolledPipelineSchedules, EqualAStepWithoutScheduleBitForBit) {
  const Named schedules[] = {{"gpipe", gpipe, 1},
                             {"1f1b", one_forward_one_backward, 1},
                             {"interleaved", interleaved, 2},
                             {"interleaved", interleaved, 4},
                             {"breadth_first", breadth_first, 2},
                             {"zero_bubble_h1", zero_bubble_h1, 1},
                             {"zero_bubble_h2", zero_bubble_h2, 1},
                             {"zero_bubble_v", zero_bubble_v, 2},
                             {"zero_bubble", zero_bubble, 1},
                             {"zero_bubble", zero_bubble, 2}};
  for (int microbatches : {6, 3}) {
    const std::vector<float> plain = trained(toml(microbatches), nullptr);
    size_t number = 0;
    for (const auto& [name, make, chunks] : schedules) {
      if (test::left_out(number++)) continue;
      const int stages = chunks == 4 || microbatches == 3 ? 2 : 4;
      SCOPED_TRACE(std::string(name) + ", chunks " + std::to_string(chunks));
      expect_equal(
          trained(toml(microbatches), make({.stages = stages, .chunks = chunks, .microbatches = microbatches})), plain);
    }
  }
}

// The update rule of 2bw does not depend on the number of stages: on one it is a gradient that is a step late, which
// tests/begun_passes_test.cpp has by hand.
TEST(UnrolledPipelineSchedules, TwoBufferedWeightsAreOneUpdateRule) {
  const auto of = [](int stages, uint32_t seed) {
    return trained(toml(3), two_buffered_weights({.stages = stages, .microbatches = 3}), seed);
  };
  const std::vector<float> one = of(1, 1);
  expect_equal(of(2, 2), one);
  expect_equal(of(4, 3), one);
  EXPECT_NE(trained(toml(3), nullptr), one);
}

// Stashed weights: whichever stage goes on first, a gradient is of the parameters that its forward pass saw.
TEST(UnrolledPipelineSchedules, PipedreamDoesNotDependOnWhoGoesOnFirst) {
  const auto of = [](uint32_t seed) {
    return trained(toml(3, "reproducible = true\n"), pipedream({.stages = 3, .microbatches = 3}), seed);
  };
  expect_equal(of(1), of(2));
}

}  // namespace
}  // namespace strata::pipeline
