// Orders of passes against the plain order bit for bit, orders that cannot be, and models cut into programs that run
// one after the other.
#include <cstring>
#include <functional>
#include <random>

#include "tests/harness.h"

namespace strata::passes_test {
namespace {

constexpr int kMicrobatches = 4, kLayers = 4, kTokens = 8 * 16;

std::string toml(const std::string& run = "", const std::string& plugins = "", const std::string& model = "") {
  return "[run]\n" + run + "[model]\nplugin = \"gpt\"\nlayers = " + std::to_string(kLayers) +
         "\nhidden = 32\nheads = 4\nvocabulary = 64\ncontext = 16\ndropout = 0.1\nattention_dropout = 0.1\n" + model +
         "[data]\ntrain = [\"none\"]\nsequence_length = 16\nglobal_batch = 8\nmicro_batch = 2\n[plugins.adamw]\n" +
         plugins;
}

std::vector<int32_t> random_tokens(uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> tokens(kTokens);
  for (int32_t& token : tokens) token = int32_t(random() % 64);
  return tokens;
}

class Ordered final : public Plugin {
 public:
  explicit Ordered(std::function<void(ScheduleStage&)> set) : set_(std::move(set)) {}
  void schedule(ScheduleStage& stage) override { set_(stage); }

 private:
  std::function<void(ScheduleStage&)> set_;
};

// All microbatches of a chunk before the next chunk, forward and backward.
void breadth_first(ScheduleStage& stage) {
  stage.cut({0, 2});
  const auto key = [](const Pass& pass) {
    return std::tuple(pass.part, pass.part == Pass::Part::forward ? pass.chunk : -pass.chunk);
  };
  std::stable_sort(stage.order.begin(), stage.order.end(),
                   [&](const Pass& a, const Pass& b) { return key(a) < key(b); });
}

// Gradients of parameters as late as can be, those of activations as soon: what fills the bubbles of a pipeline.
void weights_last(ScheduleStage& stage) {
  stage.cut({0, 1, 3});
  std::vector<Pass> order, late;
  for (Pass pass : stage.order) {
    if (pass.part == Pass::Part::backward) {
      pass.part = Pass::Part::weight_gradient;
      late.push_back(pass);
      pass.part = Pass::Part::input_gradient;
    }
    order.push_back(pass);
  }
  order.insert(order.end(), late.begin(), late.end());
  stage.order = order;
}

// Any legal order. `tied`: gradients of the embedding, in chunk 0, add to those of the head, in the last chunk.
void any_order(ScheduleStage& stage, std::mt19937& random, bool tied) {
  const std::vector<std::vector<int>> cuts = {{0}, {0, 2}, {0, 1, 3}, {0, 1, 2, 3}};
  stage.cut(cuts[random() % cuts.size()]);
  const int chunks = int(stage.chunks.size());
  struct State {
    int forward = 0, inputs = 0, wholes = 0;  // chunks done, backward ones from the last on
    std::vector<int> weights;                 // chunks whose weight gradients are due
  };
  std::vector<State> states(size_t(stage.microbatches));
  stage.order.clear();
  const auto weight = [&](State& state, int m) {
    const size_t at = random() % state.weights.size();
    const int chunk = state.weights[at];
    if (tied && chunk == 0 && (state.weights.size() > 1 || state.inputs < chunks)) return;
    stage.order.push_back({Pass::Part::weight_gradient, chunk, m});
    state.weights.erase(state.weights.begin() + int64_t(at));
  };
  for (bool all = false; !all;) {
    const int m = int(random() % uint32_t(stage.microbatches));
    State& state = states[size_t(m)];
    if (!state.weights.empty() && random() % 3 == 0) {
      weight(state, m);
    } else if (state.forward < chunks) {
      stage.order.push_back({Pass::Part::forward, state.forward++, m});
    } else if (state.inputs < chunks) {
      const int chunk = chunks - 1 - state.inputs++;
      const bool whole = random() % 2 && !(tied && chunk == 0 && !state.weights.empty());
      stage.order.push_back({whole ? Pass::Part::backward : Pass::Part::input_gradient, chunk, m});
      if (!whole) state.weights.push_back(chunk);
    }
    all = std::all_of(states.begin(), states.end(),
                      [&](const State& s) { return s.inputs == chunks && s.weights.empty(); });
  }
}

// Losses of three steps, then everything that persists.
std::vector<float> trained(const std::string& config, std::function<void(ScheduleStage&)> order) {
  Ordered ordered(std::move(order));
  const auto tokens = random_tokens(1), targets = random_tokens(2);
  test::Runner runner(config, {{"ordered", &ordered}});
  std::vector<float> result;
  for (int step = 0; step < 3; ++step) result.push_back(float(runner.run_step(tokens.data(), targets.data())));
  const Program& program = runner.built.program;
  for (Role role : {Role::parameter, Role::optimizer_state})
    for (TensorId id : program.with_role(role))
      for (float value : runner.values(program[id].name)) result.push_back(value);
  return result;
}

void expect_equal(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * 4), 0);
}

TEST(Passes, OrdersThatKeepSumsAgreeBitForBit) {
  for (const std::string run : {"", "reproducible = true\n"}) {
    const std::string config = toml(run, "[plugins.clip]\n", "tied = false\n");
    const auto plain = trained(config, [](ScheduleStage&) {});
    expect_equal(plain, trained(config, breadth_first));
    expect_equal(plain, trained(config, weights_last));
  }
}

TEST(Passes, AnyOrderIsReproducible) {
  std::mt19937 random(11);
  const std::vector<std::string> plugins = {"", "[plugins.recompute]\n", "[plugins.clip]\n"};
  for (const bool tied : {false, true}) {
    std::vector<float> plain;
    for (size_t round = 0; round < 9; ++round) {
      if (round > 0 && test::left_out(round)) continue;
      SCOPED_TRACE(round);
      const std::string config =
          toml("reproducible = true\n", plugins[round % 3 == 2 ? 1 : 0], tied ? "" : "tied = false\n");
      if (plain.empty()) plain = trained(config, [](ScheduleStage&) {});
      expect_equal(plain, trained(config, [&](ScheduleStage& stage) { any_order(stage, random, tied); }));
    }
  }
}

// A block-major order needs the activations of all microbatches; late weight gradients keep what they read.
TEST(Passes, OrderDecidesMemory) {
  Ordered plain([](ScheduleStage&) {}), breadth(breadth_first), late(weights_last);
  const auto bytes = [](Plugin& plugin) {
    return test::Runner(toml(), {{"ordered", &plugin}}).plan.device().live_peak_bytes;
  };
  EXPECT_GT(bytes(breadth), bytes(plain));
  EXPECT_GT(bytes(late), bytes(plain));
}

// The weight half of the backward pass holds what makes gradients of parameters, and nothing that another pass needs.
TEST(Passes, HalvesOfTheBackwardPass) {
  Ordered late(weights_last);
  const test::Runner runner(toml("", "", "tied = false\n"), {{"ordered", &late}});
  const Program& program = runner.built.program;
  std::vector<std::string> halves[2];
  bool weights = false;
  for (const Op& op : program.ops) {
    if (op.microbatch != 0 || op.step_part != StepPart::backward) continue;
    weights |= op.kind->name == "linear_weight_gradient" && op.block == kLayers - 1;
    halves[weights].push_back(op.kind->name);
  }
  const auto count = [&](bool half, std::string_view kind) {
    return std::count(halves[half].begin(), halves[half].end(), kind);
  };
  EXPECT_EQ(count(false, "linear_weight_gradient"), 0);
  EXPECT_EQ(count(true, "linear_weight_gradient"), 4 * kLayers);
  EXPECT_EQ(count(false, "attention_gradient"), kLayers);
  EXPECT_EQ(count(true, "embedding_gradient"), 1);
  EXPECT_EQ(count(false, "lm_head_loss_with_gradient"), 1);
}

TEST(Passes, EveryOpKnowsItsChunk) {
  Ordered breadth(breadth_first);
  const test::Runner runner(toml(), {{"ordered", &breadth}});
  for (const Op& op : runner.built.program.ops) {
    if (op.microbatch < 0) continue;
    if (op.block >= 0) {
      EXPECT_EQ(op.chunk, op.block >= 2) << print(runner.built.program, op);
    } else if (op.step_part == StepPart::forward) {
      EXPECT_EQ(op.chunk, op.kind->name == "layer_norm") << print(runner.built.program, op);
    }
  }
}

std::string refusal(std::function<void(ScheduleStage&)> order) {
  Ordered ordered(std::move(order));
  try {
    test::Runner runner(toml(), {{"culprit", &ordered}});
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Passes, OrdersThatCannotBeAreRefused) {
  const std::string begin = "plugin \"culprit\", stage schedule: ";
  using Part = Pass::Part;
  EXPECT_EQ(refusal([](ScheduleStage& s) { std::swap(s.order[0], s.order[1]); }),
            begin +
                "pass 0 of the schedule, backward of chunk 0, microbatch 0: it needs the forward of chunk 0, "
                "microbatch 0, which has not run yet.");
  EXPECT_EQ(refusal([](ScheduleStage& s) { s.order.pop_back(); }),
            begin + "the schedule never runs the input gradient of chunk 0, microbatch 3.");
  EXPECT_EQ(refusal([](ScheduleStage& s) { s.order.back().part = Part::input_gradient; }),
            begin + "the schedule never runs the weight gradient of chunk 0, microbatch 3.");
  EXPECT_EQ(refusal([](ScheduleStage& s) {
              s.order.push_back({Part::weight_gradient, 0, 2});
            }),
            begin + "pass 8 of the schedule, weight gradient of chunk 0, microbatch 2: it has run before.");
  EXPECT_EQ(
      refusal([](ScheduleStage& s) { s.order[0].microbatch = -1; }),
      begin +
          "pass 0 of the schedule, forward of chunk 0, microbatch -1: before the first step there is none. Declare "
          "a phase of step 1 alone (stage phases), and leave it out there.");
  EXPECT_EQ(
      refusal([](ScheduleStage& s) { s.order[0].microbatch = 4; }),
      begin +
          "pass 0 of the schedule, forward of chunk 0, microbatch 4: there are 4 microbatches, counted from 0, in "
          "the step before from -4 to -1.");
  EXPECT_EQ(refusal([](ScheduleStage& s) { s.order[0].chunk = 1; }),
            begin + "pass 0 of the schedule, forward of chunk 1, microbatch 0: there is 1 chunk, counted from 0.");
  EXPECT_EQ(refusal([](ScheduleStage& s) {
              s.cut({0, 2, 2});
            }),
            begin +
                "the schedule's chunks begin with the blocks {0, 2, 2}; the first begins with block 0, each other "
                "with a later block than the one before, and the model has 4 blocks.");
  EXPECT_EQ(refusal([](ScheduleStage& s) { s.chunks = {0, 4}; }).find(begin + "the schedule's chunks begin"), 0u);
  EXPECT_EQ(refusal([](ScheduleStage& s) {
              s.cut({0, 2});
              std::swap(s.order[0], s.order[1]);
            }),
            begin +
                "pass 0 of the schedule, forward of chunk 1, microbatch 0: it needs the forward of chunk 0, "
                "microbatch 0, which has not run yet.");
  EXPECT_EQ(refusal([](ScheduleStage& s) {
              s.cut({0, 2});
              for (Pass& pass : s.order)
                if (pass.part == Part::backward) pass.chunk = 1 - pass.chunk;
            }),
            begin +
                "pass 2 of the schedule, backward of chunk 0, microbatch 0: it needs the input gradient of chunk 1, "
                "microbatch 0, which has not run yet.");
}

// Keeps the first half of the blocks, the second, or only the forward pass of the first: a pipeline of two in one
// process. What crosses the border is data here and a step output there.
class Half final : public Plugin {
 public:
  enum class Which { first_forward, first, second };
  explicit Half(Which which) : which_(which) {}

  void forward(ProgramStage& stage) override {
    auto& ops = stage.program.ops;
    const auto last = std::find_if(ops.rbegin(), ops.rend(), [](const Op& op) { return op.block == kLayers / 2 - 1; });
    const auto border = last.base();
    border_ = last->outputs[0];
    Tensor& tensor = stage.program[border_];
    boundary = tensor.name;
    if (which_ == Which::second) {
      ops.erase(ops.begin(), border);
      tensor.role = Role::data;
      stage.wanted = {border_};
      return;
    }
    ops.erase(border, ops.end());
    stage.program.losses.clear();
    tensor.step_output = true;
    if (which_ == Which::first)
      stage.roots = {{border_, Builder(stage.program).data("received", tensor.shape, DType::f32)}};
  }
  void backward(ProgramStage& stage) override {
    if (which_ != Which::second) return;
    const TensorId gradient = stage.gradient_of(border_);
    stage.program[gradient].step_output = true;
    handed_on = stage.program[gradient].name;
    try {
      stage.gradient_of(stage.program.ops[1].outputs[0]);
    } catch (const Error& error) {
      refusal = error.what();
    }
  }
  std::string boundary, handed_on, refusal;

 private:
  Which which_;
  TensorId border_;
};

class HalfRunner {
 public:
  explicit HalfRunner(Half::Which which) : half(which), runner(config(), {{"half", &half}}) {}
  static std::string config() { return toml("", "", "tied = false\n"); }
  // One microbatch's memory of a tensor.
  std::span<float> at(const std::string& name, int m) const {
    const Program& program = runner.built.program;
    const TensorId id = program.find(name + "@" + std::to_string(m));
    EXPECT_TRUE(id) << name;
    return {static_cast<float*>(runner.executor->pointer(id)), size_t(elements(program[id].shape))};
  }
  void copy(const std::string& to, const HalfRunner& from, const std::string& name) const {
    for (int m = 0; m < kMicrobatches; ++m) std::ranges::copy(from.at(name, m), at(to, m).begin());
  }
  void copy_parameters(const HalfRunner& from) const {
    for (TensorId id : runner.built.program.with_role(Role::parameter)) {
      const Tensor& tensor = runner.built.program[id];
      const auto values = from.runner.values(tensor.name);
      std::ranges::copy(values, static_cast<float*>(runner.executor->pointer(id)));
    }
  }
  Half half;
  test::Runner runner;
};

TEST(Passes, AModelCutInTwoEqualsTheWhole) {
  const auto tokens = random_tokens(1), targets = random_tokens(2);
  test::Runner whole(HalfRunner::config());
  HalfRunner ahead(Half::Which::first_forward), first(Half::Which::first), second(Half::Which::second);
  const size_t parameters = whole.built.program.with_role(Role::parameter).size();
  EXPECT_EQ(first.runner.built.program.with_role(Role::parameter).size() +
                second.runner.built.program.with_role(Role::parameter).size(),
            parameters);
  EXPECT_FALSE(second.runner.built.program.find("tokens@0"));
  EXPECT_FALSE(first.runner.built.program.find("targets@0"));
  for (int step = 0; step < 3; ++step) {
    ahead.copy_parameters(first);
    ahead.runner.run_step(tokens.data(), targets.data());
    second.copy(second.half.boundary, ahead, ahead.half.boundary);
    for (int m = 0; m < kMicrobatches; ++m) {
      const TensorId id = second.runner.built.program.find("targets@" + std::to_string(m));
      std::copy_n(targets.data() + m * 32, 32, static_cast<int32_t*>(second.runner.executor->pointer(id)));
    }
    const double loss = second.runner.run_step(tokens.data(), targets.data());
    first.copy("received", second, second.half.handed_on);
    first.runner.run_step(tokens.data(), targets.data());
    EXPECT_EQ(loss, whole.run_step(tokens.data(), targets.data()));
  }
  for (const HalfRunner* half : {&first, &second})
    for (Role role : {Role::parameter, Role::optimizer_state})
      for (TensorId id : half->runner.built.program.with_role(role)) {
        const std::string& name = half->runner.built.program[id].name;
        expect_equal(half->runner.values(name), whole.values(name));
      }
  EXPECT_NE(second.half.refusal.find("put the tensor into ProgramStage::wanted"), std::string::npos)
      << second.half.refusal;
}

}  // namespace
}  // namespace strata::passes_test
