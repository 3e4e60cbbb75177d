// The plugin lora beside PEFT (recorded by tests/reference/lora.py): losses of 20 steps, merged logits, and adapters in
// PEFT's format, in and out. Memory, checkpoints of the model alone, and what is refused.
#include <cmath>

#include "engine/checkpoint/external_export.h"
#include "engine/checkpoint/external_import.h"
#include "engine/checkpoint/store.h"
#include "engine/runtime/additions.h"
#include "engine/runtime/trainer.h"
#include "tests/harness.h"
#include "tests/resumed_runs.h"

namespace strata::lora_test {
namespace {

const std::string kRecorded = STRATA_SOURCE_DIR "/tests/reference/data/";

template <class T>
std::vector<T> recorded(const SafetensorsFile& file, const std::string& name) {
  const auto bytes = file.read(file.tensors().at(name));
  const T* data = reinterpret_cast<const T*>(bytes.data());
  return {data, data + bytes.size() / sizeof(T)};
}

Plugin& plugin_of(const test::Runner& runner, const std::string& name) {
  for (const NamedPlugin& named : runner.plugins)
    if (named.name == name) return *named.plugin;
  throw Error("no plugin " + name);
}

std::map<std::string, Shape> shapes_of(const test::Runner& runner, bool added) {
  std::map<std::string, Shape> shapes;
  const Program& program = runner.built.program;
  for (TensorId id : program.with_role(Role::parameter))
    if (program[id].lasting->added == added) shapes[program[id].name] = program[id].shape;
  return shapes;
}

class RunnerValues final : public ParameterValues {
 public:
  explicit RunnerValues(const test::Runner& runner) : runner_(runner) {}
  void read(const std::string& parameter, float* out) const override {
    std::ranges::copy(runner_.values(parameter), out);
  }

 private:
  const test::Runner& runner_;
};

class LoraParity : public testing::TestWithParam<std::string> {
 protected:
  std::string folder() const { return kRecorded + GetParam(); }
  std::string lora(const std::string& more = "") const {
    return std::string("[plugins.lora]\n") +
           (GetParam() == "gpt2"
                ? "rank = 4\nalpha = 12\ntargets = [\"block.*.qkv.weight\", \"block.*.mlp.up.weight\"]\n"
                : "rank = 3\nalpha = 6\ntargets = [\"block.*.qkv.weight: 0 2\", \"*.mlp.down.weight\"]\n") +
           more;
  }
  std::string toml(const std::string& plugins) const {
    const LoadedPlugin gpt = load_plugin("gpt", {});
    return *gpt->import_config(ExternalFolder(folder()).config()) +
           "[data]\ntrain = [\"none\"]\nsequence_length = 16\nglobal_batch = 2\nmicro_batch = 1\n"
           "[plugins.adamw]\nlearning_rate = 1e-2\nbeta2 = 0.999\nweight_decay = 0.1\n[plugins.clip]\n" +
           plugins;
  }
  // The recorded model; a program without adapters takes what is merged.
  void load_base(test::Runner& runner) const {
    const ExternalFolder opened(folder());
    const auto shapes = shapes_of(runner, false);
    const ExternalImport tensors(opened, plugin_of(runner, "gpt").external_tensors(), shapes);
    for (const auto& [name, shape] : shapes) tensors.read(name, static_cast<float*>(runner.storage->persistent(name)));
  }
};

TEST_P(LoraParity, TwentyStepsMergedLogitsAndFiles) {
  const SafetensorsFile of_model(folder() + "/expected.safetensors"), expected(folder() + "/lora/expected.safetensors");
  const auto batches = recorded<int32_t>(of_model, "train_tokens");
  const auto losses = recorded<float>(expected, "losses");
  test::Runner runner(toml(lora("adapter = \"" + folder() + "/lora\"\n")));
  load_base(runner);
  const Plugin& model = plugin_of(runner, "gpt");
  begin_with_additions(runner.plugins, model, *runner.storage);
  for (size_t step = 0; step < losses.size(); ++step) {
    std::vector<int32_t> tokens, targets;
    for (int row = 0; row < 2; ++row) {
      const auto from = batches.begin() + long((step * 2 + size_t(row)) * 17);
      tokens.insert(tokens.end(), from, from + 16);
      targets.insert(targets.end(), from + 1, from + 17);
    }
    EXPECT_NEAR(runner.run_step(tokens.data(), targets.data()), losses[step], 1e-4 * losses[step])
        << "step " << step + 1;
  }

  // Merged into the model alone.
  test::Runner merged(toml(""), {}, Goal::logits);
  const RunnerValues values(runner);
  for (const auto& [name, shape] : shapes_of(merged, false)) {
    auto* const out = static_cast<float*>(merged.storage->persistent(name));
    values.read(name, out);
    plugin_of(runner, "lora").merge(name, shape, values, out);
  }
  const auto tokens = recorded<int32_t>(of_model, "tokens");
  const auto want = recorded<float>(expected, "logits");
  double scale = 0, worst = 0;
  for (size_t row = 0; row < 2; ++row) {
    std::copy_n(tokens.begin() + long(16 * row), 16,
                static_cast<int32_t*>(merged.executor->pointer(merged.built.program.find("tokens@0"))));
    merged.executor->run();
    const auto got = merged.values(merged.built.logits);
    for (size_t i = 0; i < got.size(); ++i) {
      scale = std::max(scale, double(std::abs(want[row * got.size() + i])));
      worst = std::max(worst, double(std::abs(want[row * got.size() + i] - got[i])));
    }
  }
  EXPECT_LE(worst, 1e-4 * scale);  // single precision, twenty steps on

  // PEFT's files of the trained adapters, and back, are the same bits; PEFT's own are within rounding.
  const auto addition = plugin_of(runner, "lora").external_addition(model.external_tensors());
  ASSERT_TRUE(addition);
  const test::TemporaryFolder written;
  export_tensors(written.path(), addition->tensors, shapes_of(runner, true),
                 [&](const std::string& name, float* out) { values.read(name, out); },
                 {.whole = addition->tensors_name});
  test::write_file(written / addition->config_name, addition->config);
  test::Runner again(toml(lora("adapter = \"" + written.path() + "\"\n")));
  begin_with_additions(again.plugins, model, *again.storage);
  for (const auto& [name, shape] : shapes_of(runner, true)) EXPECT_EQ(again.values(name), runner.values(name)) << name;
  const SafetensorsFile ours(written / addition->tensors_name), theirs(folder() + "/lora/adapter_model.safetensors");
  EXPECT_EQ(ours.tensors().size(), theirs.tensors().size());
  for (const auto& [name, tensor] : theirs.tensors()) {
    ASSERT_TRUE(ours.tensors().contains(name)) << name;
    EXPECT_EQ(ours.tensors().at(name).shape, tensor.shape) << name;
  }
  const std::string kept = GetParam() == "gpt2" ? "transformer.h.1.attn.c_attn" : "model.layers.1.self_attn.v_proj";
  for (const std::string part : {"lora_A", "lora_B"}) {
    const auto mine = recorded<float>(ours, "base_model.model." + kept + "." + part + ".weight"),
               their = recorded<float>(expected, part);
    ASSERT_EQ(mine.size(), their.size());
    // A step is 1e-2 whatever the gradient's size, so rounding of one near zero shows; a tenth of a step.
    for (size_t i = 0; i < mine.size(); ++i) EXPECT_NEAR(mine[i], their[i], 1e-3) << part << " " << i;
  }
  const Json config = Json::parse(addition->config, "config");
  EXPECT_EQ(config.find("target_modules")->array("target_modules").size(), GetParam() == "gpt2" ? 2u : 3u);
}

INSTANTIATE_TEST_SUITE_P(Models, LoraParity, testing::Values("gpt2", "qwen2"),
                         [](const auto& info) { return info.param; });

std::string llama(const std::string& rest, const std::string& data = "train = [\"none\"]\n") {
  return "[model]\nplugin = \"gpt\"\nlayers = 2\nhidden = 24\nheads = 4\nkv_heads = 2\nffn = 37\nvocabulary = 61\n"
         "positions = \"rotary\"\nnorm = \"rms_norm\"\nactivation = \"swiglu\"\nbias = false\n[data]\n" +
         data + "sequence_length = 16\nglobal_batch = 4\nmicro_batch = 2\n[device]\nthreads = 1\n[plugins.adamw]\n" +
         rest;
}

// The base has the bytes of its values, adapters those of values, gradients and two states.
TEST(Lora, TakesTheMemoryOfItsAdapters) {
  const test::Runner plain(llama("")), runner(llama("[plugins.lora]\nrank = 5\n"));
  const auto room = [](int64_t count) { return (4 * count + kAlignment - 1) / kAlignment * kAlignment; };
  int64_t states = 0, adapters = 0, count = 0;
  for (const auto& [name, shape] : shapes_of(plain, false)) states += 2 * room(elements(shape));
  for (const auto& [name, shape] : shapes_of(runner, true)) adapters += room(elements(shape)), count += elements(shape);
  // Of rows and columns of all weights of a block; queries, keys and values have adapters of their own.
  const int64_t head = 6, of_block = (4 * head + 24) + 2 * (2 * head + 24) + (24 + 24) + 3 * (37 + 24);
  EXPECT_EQ(count, 2 * 5 * of_block);
  // And the seed? No: without dropout nothing reads it.
  EXPECT_EQ(runner.plan.device().persistent_bytes, plain.plan.device().persistent_bytes - states + 3 * adapters);
  for (const auto& [name, shape] : shapes_of(runner, false))
    EXPECT_TRUE(runner.built.program[runner.built.program.find(name)].lasting->frozen) << name;
}

// Before the first step the model is what it was, with or without dropout.
TEST(Lora, BeginsAsTheModel) {
  std::vector<int32_t> tokens(4 * 16, 3), targets(4 * 16, 5);
  test::Runner plain(llama("")), adapted(llama("[plugins.lora]\ndropout = 0.5\n"));
  EXPECT_EQ(adapted.run_step(tokens.data(), targets.data()), plain.run_step(tokens.data(), targets.data()));
}

// Tables of the configuration have the last word about what a plugin froze.
TEST(Lora, LeavesOthersToTheTablesOfParameters) {
  const test::Runner runner(
      llama("[plugins.lora]\n[parameters.\"*norm*\"]\nfrozen = false\n"
            "[parameters.\"*.lora_b\"]\nlearning_rate_factor = 16\n"));
  const Program& program = runner.built.program;
  EXPECT_TRUE(program.find("block.1.norm2.weight.adamw.m"));
  EXPECT_FALSE(program.find("block.1.mlp.up.weight.adamw.m"));
  EXPECT_EQ(program[program.find("block.0.qkv.lora_b")].lasting->learning_rate_factor, 16);
}

std::string refusal(const std::string& config) {
  try {
    const test::Runner runner(config);
    begin_with_additions(runner.plugins, plugin_of(runner, "gpt"), *runner.storage);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    return error.what();
  }
  return "";
}
void expect_refusal(const std::string& config, const std::string& what) {
  const std::string message = refusal(config);
  EXPECT_NE(message.find(what), std::string::npos) << message;
}

TEST(Lora, TargetsThatCannotBeMeantSoAreRefused) {
  const auto with = [](const std::string& targets) { return llama("[plugins.lora]\ntargets = [" + targets + "]\n"); };
  expect_refusal(with("\"blok.*\""),
                 "config.toml:22:11: plugin \"lora\", stage forward: targets: \"blok.*\" matches no "
                 "weight of a linear layer in a block, whose parameters have names as ");
  expect_refusal(with("\"embedding.*\""), "targets: \"embedding.*\" matches no weight of a linear layer in a block");
  expect_refusal(with("\"*.qkv.*: 0 3\""), "asks for matrix 3 of block.0.qkv.weight, which has 3, counted from 0.");
  expect_refusal(with("\"*.qkv.*: q\""), "is not of the form");
  expect_refusal(with("\"*.qkv.*: 0 0\""), "is not of the form");
  expect_refusal(with("\"*.qkv.*: 0\", \"block.*\""), "ask for different matrices of block.0.qkv.weight");
  expect_refusal(with(""), "targets: no pattern is given");
}

// One message with file and tensor.
TEST(Lora, AdaptersOfAnotherModelAreRefused) {
  const auto with = [](const std::string& folder, const std::string& more) {
    return llama("[plugins.lora]\n" + more + "adapter = \"" + folder + "\"\n");
  };
  const std::string qwen2 = kRecorded + "qwen2/lora", rank = "rank = 3\nalpha = 6\n",
                    targets = "targets = [\"*.qkv.weight: 0 2\", \"*.down.weight\"]\n";
  expect_refusal(with(qwen2, rank + targets), qwen2 +
                                                  "/adapter_model.safetensors: tensor "
                                                  "\"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight\" "
                                                  "is (3, 32), but adapter_config.json makes it (3, 24).");
  expect_refusal(with(qwen2, "rank = 4\n" + targets),
                 qwen2 + "/adapter_config.json: \"r\" is 3, but plugins.lora.rank = 4");
  expect_refusal(with(qwen2, "rank = 3\n" + targets),
                 qwen2 + "/adapter_config.json: \"lora_alpha\" is 6, which is not");
  expect_refusal(with(kRecorded + "gpt2/lora", "rank = 4\nalpha = 12\n"), kRecorded + "gpt2/lora: lacks the tensor ");
  expect_refusal(with("/nowhere", rank), "/nowhere: there is no such folder.");
  expect_refusal(with(kRecorded + "qwen2", rank), kRecorded + "qwen2: holds no adapter_config.json.");
  const test::TemporaryFolder folder;
  const auto config = [&](const std::string& text) {
    test::write_file(folder / "adapter_config.json", text);
    std::filesystem::copy(qwen2 + "/adapter_model.safetensors", folder / "adapter_model.safetensors",
                          std::filesystem::copy_options::skip_existing);
    return with(folder.path(), rank + targets);
  };
  const std::string where = folder / "adapter_config.json";
  expect_refusal(config("{\"peft_type\": \"LORA\", \"r\": 3, \"lora_alpha\": 6, \"use_rslora\": true}"),
                 where + ": sets \"use_rslora\", which the plugin lora does not have.");
  expect_refusal(config("{\"peft_type\": \"LORA\", \"r\": 3, \"lora_alpha\": 6, \"rank_pattern\": {\"q\": 2}}"),
                 where + ": sets \"rank_pattern\", which the plugin lora does not have.");
  expect_refusal(config("{\"peft_type\": \"LORA\", \"r\": 3, \"lora_alpha\": 6, \"init_lora_weights\": \"pissa\"}"),
                 where + ": \"init_lora_weights\" is \"pissa\"");
  expect_refusal(config("{\"peft_type\": \"IA3\"}"), where + ": \"peft_type\" is not \"LORA\".");
  expect_refusal(config("{\"peft_type\""), where);
}

class LoraRuns : public test::ResumedRuns {
 protected:
  std::string config(const std::string& rest) const { return llama(rest, "train = [\"" + tokens() + "\"]\n"); }
  void run(const std::string& toml, const std::string& to, int steps, bool resume, const std::string& from = "") {
    std::vector<std::string> sets{"run.directory=" + (runs_ / to), "run.steps=" + std::to_string(steps)};
    if (!from.empty()) sets.push_back("run.initialize=" + (runs_ / from));
    Session session(test::write_file(runs_ / "config.toml", toml), sets);
    train(session, {.resume = resume, .trace = ""});
  }
  test::TemporaryFolder runs_;
};

TEST_F(LoraRuns, GoOnFromCheckpoints) {
  expect_resumes(llama("[plugins.lora]\nrank = 3\ndropout = 0.1\n[plugins.mixed_precision]\n"), 1, 2, 1);
}

// The model alone is enough to begin with; what was trained with adapters is not the model without them.
TEST_F(LoraRuns, BeginFromTheModelAlone) {
  run(config(""), "base", 1, false);
  run(config("[plugins.lora]\nrank = 3\n"), "adapted", 1, false, "base");
  const Checkpoint base(runs_ / "base/step-00000001"), adapted(runs_ / "adapted/step-00000001");
  std::vector<float> before(37 * 24), after(before), a(24 * 3);
  base.read("block.1.mlp.up.weight", DType::f32, {37, 24}, before.data());
  adapted.read("block.1.mlp.up.weight", DType::f32, {37, 24}, after.data());
  EXPECT_EQ(before, after);
  adapted.read("block.1.mlp.up.lora_a", DType::f32, {3, 24}, a.data());
  EXPECT_GT(std::abs(a[0]), 0);
  const auto message = [&](const std::string& toml, const std::string& to, const std::string& from) -> std::string {
    try {
      run(toml, to, 2, from.empty(), from);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(message(config("[plugins.lora]\nrank = 3\nalpha = 1\n"), "adapted", "").find("plugins.lora.alpha"),
            std::string::npos);
  EXPECT_NE(message(config(""), "without", "adapted").find("plugins.lora"), std::string::npos);
}

}  // namespace
}  // namespace strata::lora_test
