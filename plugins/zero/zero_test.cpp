// ZeRO's memory and volume against the paper's formulas, and what other plugins see of split tensors. That training is
// the same: tests/ranks_test.cpp.
#include <functional>
#include <map>
#include <mutex>
#include <random>

#include "engine/runtime/session.h"
#include "strata/layout.h"
#include "tests/harness.h"

namespace strata::zero_test {
namespace {

std::string toml(int ranks, const std::string& plugins) {
  return "[model]\nplugin = \"gpt\"\nlayers = 2\nhidden = 32\nheads = 4\nffn = 71\nvocabulary = 61\ncontext = 16\n"
         "[data]\ntrain = [\"none\"]\nsequence_length = 16\nglobal_batch = 8\nmicro_batch = 1\n[device]\nthreads = 1\n"
         "[mesh]\ndata = " +
         std::to_string(ranks) + "\n[plugins.adamw]\n" + plugins;
}

// Rajbhandari et al., section 5 and figure 1, for fp32: parameters, gradients, AdamW's states of 4, 4 and 8 bytes a
// parameter, each divided by the ranks as the stage says.
TEST(Zero, MemoryFollowsTheFormula) {
  for (int ranks : {1, 2, 4, 8})
    for (int stage = 0; stage <= 3; ++stage) {
      const std::string text =
          "[model]\nplugin = \"gpt\"\nlayers = 4\nhidden = 256\nheads = 4\nvocabulary = 512\ncontext = 8\ntied = "
          "false\n"
          "[data]\ntrain = [\"none\"]\nsequence_length = 8\nglobal_batch = 16\nmicro_batch = 1\n[mesh]\ndata = " +
          std::to_string(ranks) + "\n[plugins.adamw]\n[plugins.clip]\n" +
          (stage == 0
               ? "[plugins.data_parallel]\n"
               : "[plugins.zero]\nreshard = \"always\"\nbucket = \"64KiB\"\nstage = " + std::to_string(stage) + "\n");
      const PlannedProgram planned = test::planned(text);
      const Program& program = planned.program();
      double parameters = 0;
      for (TensorId id : program.with_role(Role::parameter)) parameters += double(elements(program[id].full_shape()));
      std::array<double, kRoles> most{};
      for (const Ledger& ledger : timeline(program, planned.memory))
        for (int r = 0; r < kRoles; ++r) most[r] = std::max(most[r], double(ledger[r]));
      for (const Tensor& tensor : program.tensors)
        if (tensor.persistent && !tensor.part_of) most[int(tensor.role)] += double(tensor.bytes());
      const auto expect = [&](Role role, double bytes, bool split) {
        const double formula = bytes * parameters / (split ? ranks : 1);
        // Split parameters are gathered a bucket (or a matrix) at a time, gradients of one microbatch come whole.
        const double room = role == Role::gradient || (split && role == Role::parameter) ? 2 * 4.0 * 512 * 1024 : 0;
        EXPECT_GE(most[int(role)], 0.99 * formula) << name_of(role) << " stage " << stage << " ranks " << ranks;
        EXPECT_LE(most[int(role)], 1.01 * formula + room) << name_of(role) << " stage " << stage << " ranks " << ranks;
      };
      expect(Role::optimizer_state, 8, stage >= 1);
      expect(Role::gradient, 4, stage >= 2);
      expect(Role::parameter, 4, stage >= 3);
    }
}

// What a step hands to other ranks, counted where it is sent: 2Ψ(n-1)/n elements for stages 0 to 2 and 3Ψ(n-1)/n for
// stage 3 (section 7), with one microbatch. Where ranks divide experts, what is no expert's crosses once among all, and
// each rank's experts among those that have the same. A block's parameters are several buckets, one of which ends
// between a weight and its bias. A block that is recomputed is gathered once for that and for its gradients.
TEST(Zero, VolumeFollowsTheFormula) {
  constexpr int kRanks = 4;
  for (const int expert : {1, 2, 4})
    for (const auto& [stage, more] :
         {std::pair(0, ""), {1, ""}, {2, ""}, {3, ""}, {3, "[plugins.recompute]\n"}, {3, "[plugins.reversible]\n"}}) {
      const std::string text =
          "[model]\nplugin = \"gpt\"\nlayers = 4\nhidden = 128\nheads = 4\nvocabulary = 256\ncontext = 8\ntied = "
          "false\n"
          "[data]\ntrain = [\"none\"]\nsequence_length = 8\nglobal_batch = 4\nmicro_batch = 1\n[device]\nthreads = "
          "1\n[mesh]\ndata = 4\nexpert = " +
          std::to_string(expert) + "\n[plugins.adamw]\n" +
          (expert > 1 ? "[plugins.moe]\nexperts = 4\nffn = 100\nshared = 40\n" : "") +
          (stage == 0
               ? "[plugins.data_parallel]\n"
               : "[plugins.zero]\nreshard = \"always\"\nbucket = \"256KiB\"\nstage = " + std::to_string(stage) + "\n") +
          more;
      SCOPED_TRACE(text);
      run_local(kRanks, [&](World& world) {
        test::Runner runner(text, {}, Goal::train, {}, &world);
        std::vector<int32_t> tokens(32, 3);
        runner.run_step(tokens.data(), tokens.data());
        const Program& program = runner.built.program;
        std::map<std::string, double> expected;  // by axis
        for (TensorId id : program.with_role(Role::parameter)) {
          const Tensor& tensor = program[id];
          const bool own = tensor.name.text().find(".experts.") != std::string::npos;
          const int sharing = own ? kRanks / expert : kRanks;
          const double numbers = double(elements(tensor.full_shape())) / (own ? expert : 1);
          // Gathered once: what no gradient of an activation needs, and what is last and first.
          const bool again = stage == 3 && tensor.name != "embedding.weight" && tensor.name != "positions.weight" &&
                             tensor.name != "head.weight";
          const std::string shares = own || expert == 1 ? "shard" : "shard_expert";
          expected[stage == 0 && !own ? "data" : shares] += (again ? 3 : 2) * 4 * numbers * (sharing - 1) / sharing;
        }
        for (const auto& [axis, group] : runner.groups) {
          if (axis == "loop" || axis == "expert") continue;  // what experts exchange has a test there
          // Of data what logs tell. A bias that is alone in a bucket is gathered once.
          const double room = axis == "data" ? 100 : 3e-4 * expected[axis];
          EXPECT_NEAR(double(group->bytes_sent()), expected[axis], room) << axis;
          expected.erase(axis);
        }
        for (const auto& [axis, bytes] : expected) EXPECT_EQ(bytes, 0) << axis << " has no group";
      });
    }
}

// What a rank holds of a parameter of that shape: all of rank 0's rows, which has the most.
int64_t share(const Shape& shape, int64_t ranks) {
  return (shape[0] + ranks - 1) / ranks * (elements(shape) / shape[0]);
}

// To the byte, for every optimizer, vectors and matrices with fewer rows than ranks included.
TEST(Zero, StatesAreSplitToTheRow) {
  const auto planned_bytes = [&](int ranks, const std::string& plugins, Role role, std::vector<Tensor>* parameters) {
    const std::string text =
        "[model]\nplugin = \"gpt\"\nlayers = 2\nhidden = 96\nheads = 4\nffn = 301\nvocabulary = 61\ncontext = 16\n"
        "[data]\ntrain = [\"none\"]\nsequence_length = 16\nmicro_batch = 1\nglobal_batch = " +
        std::to_string(ranks) + "\n[mesh]\ndata = " + std::to_string(ranks) + "\n" + plugins;
    const PlannedProgram planned = test::planned(text);
    int64_t bytes = 0;
    for (const Tensor& tensor : planned.program().tensors) {
      if (!tensor.persistent || tensor.part_of) continue;
      if (tensor.role == role) bytes += tensor.bytes();
      if (tensor.role == Role::parameter) {
        parameters->push_back(tensor);
        parameters->back().shape = tensor.full_shape();
      }
    }
    return bytes;
  };
  struct Optimizer {
    std::string text;
    std::function<int64_t(const Tensor& parameter, int64_t share)> bytes;
  };
  const auto is_matrix = [](const Tensor& t) { return t.shape.size() > 1; };
  const auto matrices = [](const Tensor& t) { return std::max<int64_t>(1, int64_t(t.lasting->fused.size())); };
  const Optimizer optimizers[] = {{"[plugins.adamw]\n", [](const Tensor&, int64_t share) { return 8 * share; }},
                                  {"[plugins.adafactor]\n",
                                   [&](const Tensor& t, int64_t share) {
                                     return is_matrix(t) ? 4 * (share / t.shape[1] + matrices(t) * t.shape[1])
                                                         : 4 * share;
                                   }},
                                  {"[plugins.sm3]\nmomentum = 0.0\n",
                                   [&](const Tensor& t, int64_t share) {
                                     return is_matrix(t) ? 4 * (share / t.shape[1] + t.shape[1]) : 4 * share;
                                   }},
                                  {"[plugins.adamw8bit]\n", [&](const Tensor& t, int64_t share) {
                                     // Scales: of rows that are here, or of the whole vector.
                                     const int64_t blocks = (t.shape.back() + 255) / 256;
                                     return 2 * (share + 4 * blocks * (is_matrix(t) ? share / t.shape[1] : 1));
                                   }}};
  for (const int ranks : {2, 7, 64, 1024})
    for (const int stage : {1, 2, 3})
      for (const Optimizer& optimizer : optimizers) {
        if (stage == 2 && ranks != 64) continue;
        const std::string plugins = optimizer.text + "[plugins.zero]\nstage = " + std::to_string(stage) + "\n";
        SCOPED_TRACE(std::to_string(ranks) + " ranks\n" + plugins);
        std::vector<Tensor> parameters;
        const int64_t states = planned_bytes(ranks, plugins, Role::optimizer_state, &parameters);
        int64_t expected = 0, split = 0;
        for (const Tensor& parameter : parameters) {
          expected += optimizer.bytes(parameter, share(parameter.shape, ranks));
          split += 4 * share(parameter.shape, stage == 3 ? ranks : 1);
        }
        EXPECT_EQ(states, expected);
        std::vector<Tensor> again;
        EXPECT_EQ(planned_bytes(ranks, plugins, Role::parameter, &again), split);
      }
}

// The bits of one rank where ranks have nothing of a tensor, and where the blocks of 8-bit moments lie across ranks.
TEST(Zero, EmptySharesAndSplitBlocksAreExact) {
  constexpr int kSequence = 5, kBatch = 8, kVocabulary = 61;
  const auto results = [&](int ranks, const std::string& plugins) {
    const std::string text =
        "[run]\nreproducible = true\n[model]\nplugin = \"gpt\"\nlayers = 1\nhidden = 6\nheads = 3\nffn = 300\n"
        "vocabulary = 61\ncontext = 5\n[data]\ntrain = [\"none\"]\nsequence_length = 5\nglobal_batch = 8\n"
        "micro_batch = 1\n[device]\nthreads = 1\n[mesh]\ndata = " +
        std::to_string(ranks) + "\n[plugins.clip]\nmax_norm = 0.1\n" + plugins;
    std::map<std::string, std::vector<std::byte>> tensors;
    std::mutex mutex;
    run_local(
        ranks,
        [&](World& world) {
          test::Runner runner(text, {}, Goal::train, {}, ranks > 1 ? &world : nullptr);
          std::mt19937 random(7);
          std::vector<int32_t> tokens(kBatch * kSequence), targets(tokens.size());
          for (int step = 0; step < 4; ++step) {
            for (auto* list : {&tokens, &targets})
              for (int32_t& token : *list) token = int32_t(random() % kVocabulary);
            runner.run_step(tokens.data(), targets.data());
          }
          for (const Tensor& tensor : runner.storage->persistent_tensors()) {
            if (tensor.role == Role::scalar) continue;
            const std::vector<std::byte> bytes = runner.storage->copy(tensor);
            const std::lock_guard lock(mutex);
            test::put_together(tensor, bytes, tensors[tensor.name], size_of(tensor.dtype));
          }
        },
        60);
    return tensors;
  };
  const test::TemporaryFolder folder;
  const std::string offload =
      "[plugins.offload]\nminimum = 0\noptimizer = \"nvme\"\ndirectory = \"" + folder.path() + "\"\n";
  size_t number = 0;
  for (const std::string optimizer :
       {"[plugins.adamw]\n", "[plugins.adafactor]\nbeta1 = 0.9\n", "[plugins.sm3]\n", "[plugins.adamw8bit]\n"}) {
    const auto expected = results(1, optimizer);
    for (const int ranks : {2, 8})
      for (const int stage : {1, 2, 3})
        for (const std::string& more : {std::string(), offload}) {
          if (test::left_out(number++)) continue;
          const std::string plugins = optimizer + "[plugins.zero]\nstage = " + std::to_string(stage) + "\n" + more;
          SCOPED_TRACE(std::to_string(ranks) + " ranks\n" + plugins);
          const auto actual = results(ranks, plugins);
          ASSERT_EQ(actual.size(), expected.size());
          for (const auto& [name, bytes] : expected) EXPECT_EQ(actual.at(name), bytes) << name;
        }
  }
}

// Many small exchanges take longer than one large: what vectors need of each other is one, whatever the layers.
TEST(Zero, VectorsAreExchangedTogether) {
  const auto exchanges = [](const std::string& optimizer, int stage, int layers, bool of_updates) {
    int count = 0;
    run_local(2, [&](World& world) {
      std::string text = toml(2, "[plugins.zero]\nbucket = \"1GiB\"\nstage = " + std::to_string(stage) + "\n");
      text.replace(text.find("layers = 2"), 10, "layers = " + std::to_string(layers));
      text.replace(text.find("[plugins.adamw]\n"), 16, optimizer);
      const test::Runner runner(text, {}, Goal::train, {}, &world);
      if (world.rank() == 0)
        for (const Op& op : runner.built.program.ops)
          count += op.kind->exchange && (op.step_part == StepPart::update || !of_updates);
    });
    return count;
  };
  for (const int stage : {1, 2})
    for (const std::string optimizer : {"[plugins.adamw]\n", "[plugins.adamw8bit]\n"})
      EXPECT_EQ(exchanges(optimizer, stage, 2, false), exchanges(optimizer, stage, 5, false)) << optimizer << stage;
  // Of a matrix two, and four matrices a layer, an embedding and positions; of all vectors one.
  EXPECT_EQ(exchanges("[plugins.adafactor]\n", 3, 3, true), 2 * (4 * 3 + 2) + 1);
}

// What a plugin asks for: the parameter's name as the model has it, and where a rank's part of a gradient begins.
class Asks final : public Plugin {
 public:
  void gradients(GradientStage& stage) override {
    for (const Gradient& gradient : stage.gradients())
      found.push_back({parameter_name(stage.build().program(), gradient), gradient.tensor});
  }
  std::vector<std::pair<std::string, TensorId>> found;
};

TEST(Zero, PartsKnowTheirPlaceAndTheirParametersName) {
  const auto names = [](const Program& program) {
    std::vector<std::string> list;
    for (TensorId id : program.with_role(Role::parameter)) list.push_back(program[id].name);
    return list;
  };
  const std::vector<std::string> plain = names(test::Runner(toml(1, "")).built.program);
  for (const std::string precision : {"", "[plugins.mixed_precision]\n"})
    for (int stage : {1, 2, 3})
      run_local(2, [&](World& world) {
        Asks asks;
        const test::Runner runner(toml(2, "[plugins.zero]\nstage = " + std::to_string(stage) + "\n" + precision),
                                  {{"asks", &asks}}, Goal::train, {}, &world);
        ASSERT_EQ(asks.found.size(), plain.size());
        int split = 0;
        for (const auto& [name, id] : asks.found) {
          EXPECT_EQ(std::count(plain.begin(), plain.end(), name), 1) << name;
          const Tensor& gradient = runner.built.program[id];
          if (gradient.layout.empty()) {
            EXPECT_EQ(GlobalIndex(gradient).first, 0) << name;
            continue;
          }
          ++split;
          const int64_t rows = gradient.full_shape()[0], row = elements(gradient.shape) / gradient.shape[0];
          EXPECT_EQ(GlobalIndex(gradient).first, share_of(rows, world.rank(), 2).begin * row) << name;
        }
        EXPECT_GT(split, 5);
      });
}

}  // namespace
}  // namespace strata::zero_test
