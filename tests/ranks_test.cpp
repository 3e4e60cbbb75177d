// Several ranks against one: data parallelism and every ZeRO stage, with every other strategy, over threads.
#include <cstring>
#include <random>

#include "engine/runtime/saver.h"
#include "strata/layout.h"
#include "tests/harness.h"
#include "tests/ordering.h"

namespace strata {
namespace {

constexpr int kSequence = 16, kBatch = 8, kVocabulary = 61;

std::string toml(int ranks, int micro_batch, const std::string& plugins, const std::string& run = "",
                 const std::string& mesh = "") {
  return "[run]\n" + run + "[model]\nplugin = \"gpt\"\nlayers = 2\nhidden = 32\nheads = 4\nffn = 71\nvocabulary = " +
         std::to_string(kVocabulary) +
         "\ncontext = 16\ndropout = 0.1\n[data]\ntrain = [\"none\"]\nsequence_length = 16\nglobal_batch = " +
         std::to_string(kBatch) + "\nmicro_batch = " + std::to_string(micro_batch) +
         "\n[device]\nthreads = 1\n[mesh]\ndata = " + std::to_string(ranks) + "\n" + mesh + plugins;
}

struct Outcome {
  std::vector<double> losses;
  std::map<std::string, std::vector<float>> tensors;  // whole, put together from all ranks' parts
};

constexpr int kSteps = 10;

void steps(test::Runner& runner, int batch, std::vector<double>* losses) {
  std::mt19937 random(7);
  std::vector<int32_t> tokens(size_t(batch * kSequence)), targets(tokens.size());
  for (int step = 0; step < kSteps; ++step) {
    for (auto* list : {&tokens, &targets})
      for (int32_t& token : *list) token = int32_t(random() % kVocabulary);
    const double loss = runner.run_step(tokens.data(), targets.data());
    if (losses) losses->push_back(loss);
  }
}

Outcome outcome(int ranks, const std::string& text, bool poisoned = false) {
  Outcome result;
  std::mutex mutex;
  const int batch = std::stoi(text.substr(text.find("global_batch = ") + 15));
  run_local(
      ranks,
      [&](World& world) {
        test::Runner runner(text, {}, Goal::train, {}, ranks > 1 ? &world : nullptr);
        runner.poisoned = poisoned;
        steps(runner, batch, world.rank() == 0 ? &result.losses : nullptr);
        for (const Tensor& tensor : runner.storage->persistent_tensors()) {
          if (tensor.role == Role::scalar || tensor.dtype != DType::f32) continue;
          const std::vector<float> values = runner.values(tensor.name);
          std::lock_guard lock(mutex);
          std::vector<float>& whole = result.tensors[tensor.name];
          whole.resize(size_t(elements(tensor.full_shape())));
          const int64_t row = elements(tensor.shape) / tensor.shape[0];
          const int64_t first = tensor.layout.empty() ? 0 : tensor.layout[0].first * row;
          std::copy(values.begin(), values.end(), whole.begin() + first);
        }
      },
      30);
  return result;
}

// Sums are taken in another order: 1e-5 of the largest magnitude after ten steps, as fp32 gives.
void expect_close(const Outcome& actual, const Outcome& expected, const std::string& what) {
  ASSERT_EQ(actual.losses.size(), expected.losses.size());
  for (size_t i = 0; i < expected.losses.size(); ++i)
    EXPECT_NEAR(actual.losses[i], expected.losses[i], 1e-5 * expected.losses[i]) << what << ", step " << i;
  for (const auto& [name, values] : expected.tensors) {
    if (!actual.tensors.contains(name)) {
      ADD_FAILURE() << what << " lacks " << name;
      continue;
    }
    // The gradient of keys' biases is zero but for rounding, of which these two make steps of full size.
    if (name.find("qkv.bias") != std::string::npos && what != "adamw") continue;
    if (name.find("adamw.") != std::string::npos || name.find("sm3.") != std::string::npos ||
        name.find("adafactor.") != std::string::npos)
      continue;  // states: compared bit for bit in reproducible runs
    double difference = 0, largest = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      difference = std::max(difference, double(std::abs(actual.tensors.at(name)[i] - values[i])));
      largest = std::max(largest, double(std::abs(values[i])));
    }
    EXPECT_LE(difference, 1e-5 * std::max(largest, 0.1)) << what << ": " << name;
  }
}

void expect_same(const Outcome& actual, const Outcome& expected, const std::string& what) {
  EXPECT_EQ(actual.losses, expected.losses) << what;
  ASSERT_EQ(actual.tensors.size(), expected.tensors.size()) << what;
  for (const auto& [name, values] : expected.tensors)
    EXPECT_EQ(std::memcmp(actual.tensors.at(name).data(), values.data(), values.size() * 4), 0) << what << ": " << name;
}

const std::string kExchanges[] = {
    "[plugins.data_parallel]\nbucket = 20000\n", "[plugins.zero]\nstage = 1\nbucket = 20000\n",
    "[plugins.zero]\nstage = 2\nbucket = 20000\n", "[plugins.zero]\nstage = 3\nbucket = 20000\n"};

std::string offload(const std::string& directory, const std::string& tier) {
  return "[plugins.offload]\nminimum = 0\ndirectory = \"" + directory + "\"\noptimizer = \"" + tier +
         "\"\ngradients = \"" + tier + "\"\nparameters = \"" + tier + "\"\nactivations = \"" + tier + "\"\n";
}

// Bit for bit whatever the number of ranks, the stage, and what else is enabled.
TEST(Ranks, ReproducibleRunsAreEqual) {
  test::TemporaryFolder folder;
  const std::string run = "reproducible = true\n", optimizer = "[plugins.adamw]\nlearning_rate = 1e-3\n";
  size_t number = 0;
  for (const std::string clip : {"", "[plugins.clip]\nmax_norm = 0.1\n"})
    for (int micro_batch : {1, 2}) {
      const Outcome expected = outcome(1, toml(1, micro_batch, optimizer + clip, run));
      for (int ranks : {2, 4, 8}) {
        if (kBatch % (micro_batch * ranks) != 0) continue;
        for (const std::string& exchange : kExchanges)
          for (const std::string& extra :
               {std::string(), "[plugins.recompute]\n" + offload(folder.path(), ranks == 2 ? "host" : "nvme")}) {
            if (test::left_out(number++)) continue;
            const std::string text = toml(ranks, micro_batch, optimizer + clip + exchange + extra, run);
            SCOPED_TRACE(text);
            expect_same(outcome(ranks, text, ranks == 4 && micro_batch == 1), expected, "");
            if (HasFailure()) return;
          }
      }
    }
}

// ZeRO-Offload: updates on threads of the host's beside offloaded states, while exchanges stay on their stream.
TEST(Ranks, UpdatesRunOnThreadsOfTheHost) {
  test::TemporaryFolder folder;
  const std::string run = "reproducible = true\n", plugins = "[plugins.adamw]\n[plugins.clip]\nmax_norm = 0.1\n";
  const Outcome expected = outcome(1, toml(1, 2, plugins, run));
  size_t number = 0;
  for (const std::string& exchange : kExchanges)
    for (const std::string tier : {"host", "nvme"}) {
      if (test::left_out(number++)) continue;
      const std::string text =
          toml(2, 2, plugins + exchange + offload(folder.path(), tier) + "[host]\nthreads = 1\n", run);
      SCOPED_TRACE(text);
      expect_same(outcome(2, text), expected, "");
    }
}

// In the default order of sums, within fp32's rounding: every optimizer, odd numbers of ranks, groups of groups.
TEST(Ranks, EveryCombinationAgrees) {
  test::TemporaryFolder folder;
  struct Case {
    std::string optimizer;
    int ranks, micro_batch, batch;
    std::string mesh, extra;
  };
  // The gradient of keys' biases is zero but for rounding, which Adam would make into steps: an epsilon above it.
  const std::string adamw = "[plugins.adamw]\nlearning_rate = 1e-3\nepsilon = 1e-5\n",
                    sm3 = "[plugins.sm3]\nlearning_rate = 1e-3\n", adafactor = "[plugins.adafactor]\nbeta1 = 0.9\n",
                    clip = "[plugins.clip]\nmax_norm = 0.1\n", recompute = "[plugins.recompute]\n",
                    host = offload(folder.path(), "host"), nvme = offload(folder.path(), "nvme");
  const std::vector<Case> cases = {
      {adamw, 2, 2, 8, "", ""},
      {adamw, 3, 1, 12, "", clip},
      {adamw, 4, 1, 8, "replicate = 2\n", clip},
      {adamw, 4, 1, 8, "replicate = 2\n", recompute + nvme},
      {adamw, 4, 2, 8, "replicate = 4\n", host},
      {adafactor, 2, 2, 8, "", clip},
      {adafactor, 3, 2, 12, "", recompute + host},
      {adafactor, 4, 1, 8, "replicate = 2\n", nvme},
      {sm3, 2, 1, 8, "", ""},
      {sm3, 3, 2, 12, "", clip + nvme},
      {sm3, 4, 2, 8, "", recompute + host},
      {adamw, 2, 4, 8, "", "[plugins.gist]\nminimum = 0\n" + clip + host},
  };
  size_t number = 0;
  for (const Case& c : cases) {
    const auto text = [&](int ranks, const std::string& plugins, const std::string& mesh) {
      std::string all = toml(ranks, c.micro_batch, plugins, "", mesh);
      all.replace(all.find("global_batch = 8"), 16, "global_batch = " + std::to_string(c.batch));
      return all;
    };
    const Outcome expected =
        outcome(1, text(1, c.optimizer + (c.extra.find("clip") == std::string::npos ? "" : clip), ""));
    for (const std::string& exchange : kExchanges) {
      if (test::left_out(number++)) continue;
      const std::string all = text(c.ranks, c.optimizer + exchange + c.extra, c.mesh);
      SCOPED_TRACE(all);
      expect_close(outcome(c.ranks, all), expected, c.optimizer == adamw ? "adamw" : "adafactor or sm3");
      if (HasFailure()) return;
    }
  }
}

// Each rank's waits order whatever touches the same bytes, parts of tensors and blocks of the disk included; nothing runs.
TEST(Ranks, WaitsOrderWhatSharesBytes) {
  test::TemporaryFolder folder;
  size_t number = 1;  // of those that are kept under sanitizers one is Adafactor with ZeRO 2 on NVMe
  for (const std::string optimizer : {"[plugins.adamw]\n", "[plugins.adafactor]\nbeta1 = 0.9\n", "[plugins.sm3]\n"})
    for (const std::string& exchange : kExchanges)
      for (const std::string tier : {"host", "nvme"})
        for (const std::string more : {"", "[host]\nthreads = 1\n"}) {
          if (test::left_out(number++)) continue;
          const std::string text =
              toml(4, 1, optimizer + exchange + offload(folder.path(), tier) + more, "", "replicate = 2\n");
          SCOPED_TRACE(text);
          run_local(4, [&](World& world) {
            const test::Runner runner(text, {}, Goal::train, {}, &world);
            test::expect_ordered(runner.built.program, runner.plan);
          });
          if (HasFailure()) return;
        }
}

// The outcome does not hang on which stream is ahead.
TEST(Ranks, RunsAreEqualToTheBit) {
  test::TemporaryFolder folder;
  size_t number = 1;  // under sanitizers stage 2
  for (const std::string& exchange : kExchanges) {
    if (test::left_out(number++)) continue;
    const std::string text = toml(4, 1, "[plugins.adafactor]\nbeta1 = 0.9\n" + exchange + offload(folder.path(), "nvme"),
                                  "", "replicate = 2\n");
    SCOPED_TRACE(text);
    const Outcome first = outcome(4, text);
    expect_same(outcome(4, text), first, "");
    if (HasFailure()) return;
  }
}

// Rajbhandari et al., section 5 and figure 1, for fp32: parameters, gradients, AdamW's states of 4, 4 and 8 bytes a
// parameter, each divided by the ranks as the stage says. Vectors, 0.6% here, stay whole.
TEST(Ranks, MemoryFollowsTheFormula) {
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
TEST(Ranks, VolumeFollowsTheFormula) {
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

// Compute has the time between two exchanges to hide the first one behind.
TEST(Ranks, WhatNeedsAnExchangeComesAfterTheNextHasBegun) {
  run_local(2, [&](World& world) {
    test::Runner runner(toml(2, 1, "[plugins.adamw]\n" + kExchanges[0]), {}, Goal::train, {}, &world);
    const std::vector<Op>& ops = runner.built.program.ops;
    std::vector<size_t> exchanges;
    for (size_t i = 0; i < ops.size(); ++i)
      if (ops[i].stream == Stream::exchange) exchanges.push_back(i);
    ASSERT_GT(exchanges.size(), 3u);
    for (size_t e = 0; e + 1 < exchanges.size(); ++e)
      for (size_t i = exchanges[e] + 1; i < exchanges[e + 1]; ++i)
        for (TensorId id : ops[i].inputs)
          for (TensorId sum : ops[exchanges[e]].outputs)
            EXPECT_FALSE(id && id == sum) << "op " << i << " reads what op " << exchanges[e] << " exchanges";
  });
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

TEST(Ranks, PartsKnowTheirPlaceAndTheirParametersName) {
  const auto names = [](const Program& program) {
    std::vector<std::string> list;
    for (TensorId id : program.with_role(Role::parameter)) list.push_back(program[id].name);
    return list;
  };
  const std::vector<std::string> plain = names(test::Runner(toml(1, 1, "[plugins.adamw]\n")).built.program);
  for (const std::string precision : {"", "[plugins.mixed_precision]\n"})
    for (int stage : {1, 2, 3})
      run_local(2, [&](World& world) {
        Asks asks;
        const test::Runner runner(
            toml(2, 1, "[plugins.adamw]\n[plugins.zero]\nstage = " + std::to_string(stage) + "\n" + precision),
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

TEST(Ranks, AnAxisThatNothingUsesIsRefused) {
  try {
    const test::TemporaryFolder folder;
    Session(test::write_file(folder / "config.toml", toml(2, 1, "[plugins.adamw]\n")), {}).plan(Goal::train);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("no enabled plugin sums gradients over them"), std::string::npos);
  }
}

// Saved by N ranks under any stage, at once or behind training, loaded by M under any other: bit for bit the same.
TEST(Ranks, CheckpointsFitAnyLayout) {
  test::TemporaryFolder folder;
  const std::string optimizer = "[plugins.adamw]\nlearning_rate = 1e-3\n";
  // 7 rows in one matrix: fewer than eight ranks, uneven over the others.
  const auto text = [&](int ranks, size_t exchange, const std::string& more) {
    std::string result = toml(ranks, 1, optimizer + (ranks > 1 ? kExchanges[exchange] : "") + more);
    result.replace(result.find("ffn = 71"), 8, "ffn = 7");
    result.replace(result.find("global_batch = 8"), 16, "global_batch = 24");
    return result;
  };
  const auto hosted = [&](const std::string& tier) {
    return "[plugins.offload]\nminimum = 0\ndirectory = \"" + folder.path() + "\"\noptimizer = \"" + tier + "\"\n";
  };
  struct Layout {
    int ranks;
    size_t exchange;
  };
  std::vector<Layout> layouts{{1, 0}};
  for (int ranks : {2, 3, 4, 8})
    for (size_t exchange = 0; exchange < std::size(kExchanges); ++exchange) layouts.push_back({ranks, exchange});
  const auto directory = [&](size_t i) { return folder / ("from" + std::to_string(i)); };
  // Everything of a layout after `first` (load, then whatever) as whole tensors; saves into `to` when given.
  const auto run = [&](const Layout& layout, const std::string& more, const std::string& from, const std::string& to,
                       bool behind) {
    std::map<std::string, std::vector<std::byte>> tensors;
    std::mutex mutex;
    const auto body = [&](World& world) {
      test::Runner runner(text(layout.ranks, layout.exchange, more), {}, Goal::train, {},
                          layout.ranks > 1 ? &world : nullptr);
      Threads threads(1);
      const Mesh mesh(world.rank(), {{"replicate", 1}, {"shard", layout.ranks}});
      if (!to.empty()) std::filesystem::create_directories(to);
      world.gather("");
      Saver saver(*runner.storage, mesh, world, threads, to, 1, behind);
      if (!from.empty()) {
        const CheckpointInfo info = saver.load(find_checkpoint(from, ""), true);
        EXPECT_EQ(info.step, 10);
        EXPECT_EQ(info.samples, 240);
      } else {
        steps(runner, 24, nullptr);
      }
      if (!to.empty()) EXPECT_EQ(saver.save({10, 240, {{"note", "kept"}}, "text"}), "");
      if (behind && from.empty()) return;
      for (const Tensor& tensor : runner.storage->persistent_tensors()) {
        if (tensor.role == Role::scalar) continue;
        const std::vector<std::byte> data = runner.storage->copy(tensor);
        std::lock_guard lock(mutex);
        auto& whole = tensors[tensor.name];
        whole.resize(size_t(elements(tensor.full_shape()) * size_of(tensor.dtype)));
        const int64_t row = tensor.bytes() / tensor.shape[0];
        std::copy(data.begin(), data.end(), whole.begin() + box_of(tensor).offset[0] * row);
      }
    };
    run_local(layout.ranks, body, 30);
    return tensors;
  };
  const auto expected = run(layouts[0], "", "", directory(0), false);
  for (size_t i = 1; i < layouts.size(); ++i) {
    SCOPED_TRACE("into " + std::to_string(layouts[i].ranks) + ", exchange " + std::to_string(layouts[i].exchange));
    EXPECT_EQ(run(layouts[i], i % 3 == 0 ? hosted("nvme") : "", directory(0), directory(i), i % 2 == 0), expected);
  }
  size_t number = 0;
  for (size_t i = 1; i < layouts.size(); ++i)
    for (const Layout& to : layouts) {
      if (test::left_out(number++)) continue;
      SCOPED_TRACE("from " + std::to_string(layouts[i].ranks) + ", exchange " + std::to_string(layouts[i].exchange) +
                   " to " + std::to_string(to.ranks) + ", exchange " + std::to_string(to.exchange));
      ASSERT_EQ(run(to, "", directory(i), "", false), expected);
    }
}

}  // namespace
}  // namespace strata
