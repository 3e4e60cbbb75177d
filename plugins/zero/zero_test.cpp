// ZeRO's memory and volume against the paper's formulas, and what other plugins see of split tensors. That training is
// the same: tests/ranks_test.cpp.
#include "engine/runtime/session.h"
#include "strata/layout.h"
#include "tests/harness.h"

namespace strata {
namespace {

std::string toml(int ranks, const std::string& plugins) {
  return "[model]\nplugin = \"gpt\"\nlayers = 2\nhidden = 32\nheads = 4\nffn = 71\nvocabulary = 61\ncontext = 16\n"
         "[data]\ntrain = [\"none\"]\nsequence_length = 16\nglobal_batch = 8\nmicro_batch = 1\n[device]\nthreads = 1\n"
         "[mesh]\ndata = " +
         std::to_string(ranks) + "\n[plugins.adamw]\n" + plugins;
}

// Rajbhandari et al., section 5 and figure 1, for fp32: parameters, gradients, AdamW's states of 4, 4 and 8 bytes a
// parameter, each divided by the ranks as the stage says. Vectors, 0.6% here, stay whole.
TEST(Zero, MemoryFollowsTheFormula) {
  const test::TemporaryFolder folder;
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
      const Session session(test::write_file(folder / "config.toml", text), {});
      const PlannedProgram planned = session.plan(Goal::train);
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
        EXPECT_LE(most[int(role)], 1.01 * formula + 0.006 * bytes * parameters + room)
            << name_of(role) << " stage " << stage << " ranks " << ranks;
      };
      expect(Role::optimizer_state, 8, stage >= 1);
      expect(Role::gradient, 4, stage >= 2);
      expect(Role::parameter, 4, stage >= 3);
    }
}

// What a step hands to other ranks, counted where it is sent: 2Ψ(n-1)/n elements for stages 0 to 2 and 3Ψ(n-1)/n for
// stage 3 (section 7), with one microbatch.
TEST(Zero, VolumeFollowsTheFormula) {
  for (int stage = 0; stage <= 3; ++stage) {
    const int ranks = 4;
    const std::string text =
        "[model]\nplugin = \"gpt\"\nlayers = 4\nhidden = 128\nheads = 4\nvocabulary = 256\ncontext = 8\ntied = false\n"
        "[data]\ntrain = [\"none\"]\nsequence_length = 8\nglobal_batch = 4\nmicro_batch = 1\n[device]\nthreads = "
        "1\n[mesh]\n"
        "data = 4\n[plugins.adamw]\n" +
        (stage == 0 ? "[plugins.data_parallel]\n"
                    : "[plugins.zero]\nreshard = \"always\"\nstage = " + std::to_string(stage) + "\n");
    run_local(ranks, [&](World& world) {
      test::Runner runner(text, {}, Goal::train, {}, &world);
      std::vector<int32_t> tokens(32, 3);
      runner.run_step(tokens.data(), tokens.data());
      double sent = 0, parameters = 0;
      for (const auto& [axis, group] : runner.groups)
        if (axis != "loop") sent += double(group->bytes_sent());
      for (TensorId id : runner.built.program.with_role(Role::parameter))
        parameters += double(elements(runner.built.program[id].full_shape()));
      const double formula = (stage == 3 ? 3 : 2) * 4 * parameters * (ranks - 1) / ranks;
      EXPECT_NEAR(sent, formula, 0.03 * formula)
          << "stage " << stage;  // the output layer is gathered once, vectors never
    });
  }
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
}  // namespace strata
