// Loss masks, packed documents and sources by weight in whole runs: beside transformers (tests/reference/packed.py), on
// several ranks and in several microbatches, and what is exact of it.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <set>

#include "engine/checkpoint/external_import.h"
#include "engine/data/token_file.h"
#include "engine/runtime/evaluation.h"
#include "engine/runtime/trainer.h"
#include "strata/json.h"
#include "tests/backends.h"
#include "tests/harness.h"
#include "tests/random_cases.h"

namespace strata::finetuning_test {
namespace {

constexpr int kTime = 16;

class Packed : public testing::TestWithParam<std::string> {
 protected:
  std::string recorded() const { return STRATA_SOURCE_DIR "/tests/reference/data/" + GetParam(); }
  std::string toml(const std::string& more) const {
    return *load_plugin("gpt", {})->import_config(ExternalFolder(recorded()).config()) +
           "[data]\ntrain = [\"none\"]\npacked = true\nsequence_length = 16\nglobal_batch = 2\nmicro_batch = 1\n" +
           "[plugins.adamw]\nlearning_rate = 1e-3\nbeta2 = 0.95\n[plugins.clip]\n[plugins.schedule]\nkind = "
           "\"constant\"\nwarmup = 5\n" +
           more;
  }
  void load(test::Runner& runner) const {
    std::map<std::string, Shape> shapes;
    for (TensorId id : runner.built.program.with_role(Role::parameter))
      shapes[runner.built.program[id].name] = runner.built.program[id].shape;
    const ExternalFolder opened(recorded());
    for (const NamedPlugin& named : runner.plugins) {
      const auto mapping = named.plugin->external_tensors();
      if (mapping.empty()) continue;
      const ExternalImport tensors(opened, mapping, shapes);
      for (const Tensor& tensor : runner.storage->persistent_tensors()) {
        if (!shapes.contains(tensor.name)) continue;
        std::vector<float> values(size_t(elements(tensor.shape)));
        tensors.read(tensor.name, values.data());
        runner.storage->fill(tensor, [&](void* memory, int64_t first, int64_t count) {
          std::copy_n(values.data() + first, count, static_cast<float*>(memory));
        });
      }
    }
  }
  template <class T>
  std::vector<T> read(const std::string& name) const {
    const SafetensorsFile file(recorded() + "/packed.safetensors");
    const auto bytes = file.read(file.tensors().at(name));
    const T* data = reinterpret_cast<const T*>(bytes.data());
    return {data, data + bytes.size() / sizeof(T)};
  }
  std::vector<double> losses(const std::string& more, const std::string& backend = "", size_t steps = 20) const {
    test::Runner runner(toml(more), {}, Goal::train, {}, nullptr, backend, test::device_of(backend));
    load(runner);
    const auto tokens = read<int32_t>("tokens"), targets = read<int32_t>("targets"),
               documents = read<int32_t>("documents");
    std::vector<double> result;
    for (size_t step = 0; step < steps; ++step)
      result.push_back(
          runner.run_step(&tokens[step * 2 * kTime], &targets[step * 2 * kTime], 0, &documents[step * 2 * kTime]));
    return result;
  }
};

// Documents in one sequence, of which some tokens count, are to transformers documents alone.
TEST_P(Packed, TwentyStepsOfDocumentsAlone) {
  const auto expected = read<float>("losses");
  const std::vector<double> got = losses("");
  for (size_t step = 0; step < expected.size(); ++step)
    // 1e-5 of the model as it was recorded, and what twenty steps in single precision make of that.
    EXPECT_NEAR(got[step], double(expected[step]), (step == 0 ? 1e-5 : 1e-4) * double(expected[step])) << step;
  EXPECT_EQ(losses("[plugins.recompute]\n", "", 4), std::vector<double>(got.begin(), got.begin() + 4));
  const std::vector<double> offloaded =
      losses("[plugins.offload]\noptimizer = \"host\"\nparameters = \"host\"\nactivations = \"host\"\n", "", 4);
  EXPECT_EQ(offloaded, std::vector<double>(got.begin(), got.begin() + 4));
}

#if defined(STRATA_GPU) || defined(STRATA_EMULATED_CUDA)
TEST_P(Packed, TheCudaBackendAgrees) {
  STRATA_NEEDS_GPU();
  const auto expected = read<float>("losses");
  const std::vector<double> got = losses("", "cuda", 2);
  for (size_t step = 0; step < got.size(); ++step) EXPECT_NEAR(got[step], double(expected[step]), 1e-4 * got[step]);
}
#endif

INSTANTIATE_TEST_SUITE_P(Models, Packed, testing::Values("gpt2", "qwen2", "qwen2_window"),
                         [](const auto& info) { return info.param; });

// Files of tokens, and runs on them.
class FinetuningRuns : public testing::Test {
 protected:
  static constexpr int kVocabulary = 61;
  test::TemporaryFolder folder_;

  std::string file(const std::string& name) const { return folder_ / name + ".bin"; }
  // `counts`: of each token; empty: no mask. `lengths` of documents; empty: they are not said.
  void write(const std::string& name, const std::vector<int32_t>& tokens, const std::vector<uint8_t>& counts = {},
             const std::vector<int64_t>& lengths = {}) const {
    TokenFileWriter writer(file(name), false);
    writer.append(tokens);
    writer.commit();
    TokenMarksWriter marks(file(name));
    int64_t at = 0;
    for (const int64_t length : lengths) {
      marks.begin_document();
      for (const int64_t end = at + length; at < end; ++at) marks.append(1, counts.empty() || counts[size_t(at)]);
    }
    for (; at < int64_t(tokens.size()); ++at) marks.append(1, counts.empty() || counts[size_t(at)]);
    marks.commit();
    if (counts.empty()) std::filesystem::remove(name_beside(file(name), kMask));
    if (lengths.empty()) std::filesystem::remove(name_beside(file(name), kDocuments));
  }
  static std::vector<int32_t> some_tokens(int64_t count, uint64_t seed) {
    test::Random random(seed);
    std::vector<int32_t> tokens(size_t(count), 0);
    for (int32_t& token : tokens) token = int32_t(test::draw(random, 0, kVocabulary - 1));
    return tokens;
  }
  static std::string model(const std::string& more = "") {
    return "[model]\nplugin = \"gpt\"\nvocabulary = 61\ncontext = 16\nlayers = 2\nhidden = 32\nheads = 2\n" + more;
  }
  static std::string llama() {
    return model("positions = \"rotary\"\nnorm = \"rms_norm\"\nactivation = \"swiglu\"\nbias = false\nwindow = 5\n");
  }
  std::string data(const std::string& name, const std::string& more = "", int micro_batch = 2) const {
    return "[data]\ntrain = [\"" + file(name) +
           "\"]\nsequence_length = 16\nglobal_batch = 8\nmicro_batch = " + std::to_string(micro_batch) + "\n" + more +
           "[device]\nthreads = 1\n[plugins.adamw]\nlearning_rate = 3e-3\n";
  }
  struct Run {
    std::vector<double> losses;
    std::string state;  // tensors of the last checkpoint
  };
  Run run(const std::string& config, int steps, int ranks = 1, const std::vector<std::string>& more = {}) const {
    static std::atomic<int> number{0};
    const std::string name = "run" + std::to_string(++number);
    std::vector<std::string> sets{"run.directory=\"" + (folder_ / name) + "\""};
    if (steps > 0) sets.push_back("run.steps=" + std::to_string(steps));
    sets.insert(sets.end(), more.begin(), more.end());
    const std::string path = test::write_file(folder_ / name + ".toml", config);
    int64_t last = 0;
    run_local(
        ranks,
        [&](World& world) {
          Session session(path, sets, ranks > 1 ? &world : nullptr);
          const TrainSummary summary = train(session, {});
          if (world.rank() == 0) last = summary.steps;
        },
        120);
    Run result;
    std::ifstream log(folder_ / name + "/log.jsonl");
    for (std::string line; std::getline(log, line);)
      if (const Json json = Json::parse(line, "log"); json.find("loss"))
        result.losses.push_back(json.find("loss")->number("loss"));
    char step[32];
    std::snprintf(step, sizeof step, "/step-%08d", int(last));
    std::set<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(folder_ / name + step))
      if (entry.path().extension() == ".safetensors") files.insert(entry.path());
    for (const auto& one : files) {
      std::ifstream part(one, std::ios::binary);
      result.state.append(std::istreambuf_iterator<char>(part), {});
    }
    return result;
  }
  void expect_near(const Run& got, const Run& want, double tolerance, const std::string& what) const {
    ASSERT_EQ(got.losses.size(), want.losses.size()) << what;
    for (size_t i = 0; i < want.losses.size(); ++i)
      EXPECT_NEAR(got.losses[i], want.losses[i], tolerance * (1 + want.losses[i])) << what << ", step " << i + 1;
  }
  // Sequences of which some have many tokens that count, some few and some none.
  std::vector<uint8_t> uneven(int64_t count, uint64_t seed) const {
    test::Random random(seed);
    std::vector<uint8_t> counts(size_t(count), 0);
    int64_t odds = 1;
    for (int64_t i = 0; i < count; ++i) {
      if (i % kTime == 0) odds = test::draw(random, 0, 4);
      counts[size_t(i)] = test::draw(random, 1, 4) <= odds;
    }
    return counts;
  }
};

TEST_F(FinetuningRuns, AMaskThatLeavesNothingOutChangesNoBit) {
  const auto tokens = some_tokens(900, 1);
  write("plain", tokens);
  write("masked", tokens, std::vector<uint8_t>(900, 1));
  for (const std::string more : {"", "[plugins.mixed_precision]\ndtype = \"fp16\"\nloss_scale = 256\n"}) {
    const Run plain = run(model() + data("plain") + more, 4), masked = run(model() + data("masked") + more, 4);
    EXPECT_EQ(plain.losses, masked.losses);
    EXPECT_TRUE(plain.state == masked.state);
  }
}

// Of each token of a step that counts the same share, in whatever microbatch and on whatever rank.
TEST_F(FinetuningRuns, TokensWeighTheSameEverywhere) {
  write("uneven", some_tokens(1200, 2), uneven(1200, 3));
  for (const std::string& of : {model(), llama()}) {
    const Run one = run(of + data("uneven", "", 8), 4);
    for (const double loss : one.losses) EXPECT_GT(loss, 3);  // of 61 tokens ln 61 = 4.1
    // Sums in single precision, in another order.
    expect_near(run(of + data("uneven", "", 1), 4), one, 1e-5, "microbatches of 1");
    const auto beside = [&](const std::string& more, int ranks, double tolerance = 1e-5) {
      expect_near(run(of + data("uneven", "", 2) + more, 4, ranks), one, tolerance, more);
    };
    beside("[mesh]\ndata = 2\n[plugins.data_parallel]\n", 2);
    beside("[mesh]\ndata = 2\n[plugins.zero]\nstage = 3\n", 2);
    beside("[mesh]\ntensor = 2\n[plugins.tensor_parallel]\n", 2);
    beside("[mesh]\nsequence = 2\n[plugins.context_parallel]\n", 2);
    beside("[mesh]\npipeline = 2\n[plugins.pipeline]\n", 2);
    beside("[mesh]\npipeline = 2\n[plugins.pipeline]\n[plugins.mixed_precision]\ndtype = \"fp16\"\nloss_scale = 64\n",
           2, 2e-3);
    const std::string reproducible = "[run]\nreproducible = true\n" + of;
    const Run alone = run(reproducible + data("uneven", "", 2), 4),
              together =
                  run(reproducible + data("uneven", "", 2) + "[mesh]\ndata = 2\n[plugins.data_parallel]\n", 4, 2);
    EXPECT_EQ(alone.losses, together.losses);
  }
}

TEST_F(FinetuningRuns, MaskedTokensChangeNothing) {
  auto tokens = some_tokens(129, 4);  // eight sequences, and the last one's last target, which nothing reads
  std::vector<uint8_t> counts(129, 1);
  for (const uint8_t counted : {0, 1}) {
    counts[128] = counted;
    tokens[128] = 7;
    write("seven", tokens, counts);
    tokens[128] = 50;
    write("fifty", tokens, counts);
    const Run seven = run(model() + data("seven"), 3), fifty = run(model() + data("fifty"), 3);
    EXPECT_EQ(seven.losses == fifty.losses, counted == 0);
    EXPECT_EQ(seven.state == fifty.state, counted == 0);
  }
}

TEST_F(FinetuningRuns, WhereNothingCountsLossAndGradientsAreZero) {
  write("nothing", some_tokens(900, 5), std::vector<uint8_t>(900, 0));
  const std::string still = "weight_decay = 0.0\n[plugins.clip]\n";
  const Run three = run(model() + data("nothing") + still, 3), one = run(model() + data("nothing") + still, 1);
  EXPECT_EQ(three.losses, (std::vector<double>{0, 0, 0}));
  EXPECT_TRUE(three.state == one.state);
  EXPECT_THROW(run(model() + data("nothing", "validation = [\"" + file("nothing") + "\"]\n"), 1), Error);
}

// A sequence of documents gives each its own loss: of a model that is trained a little, each document evaluated alone.
TEST_F(FinetuningRuns, PackedDocumentsHaveTheirOwnLosses) {
  const std::vector<int64_t> lengths{5, 1, 7, 20, 3, 16, 2, 2, 40, 9, 17, 1};
  const int64_t count = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  const auto tokens = some_tokens(count, 6);
  write("packed", tokens, {}, lengths);
  for (const std::string& of : {model(), llama()}) {
    const std::string config = of + data("packed", "packed = true\n");
    const std::string path = test::write_file(folder_ / "evaluate.toml", config), trained = folder_ / "trained";
    std::filesystem::remove_all(trained);
    {
      Session session(path, {"run.steps=5", "run.directory=\"" + trained + "\""});
      train(session, {});
    }
    Session session(path, {"run.directory=\"" + trained + "\""});
    Evaluator evaluator(session, trained + "/step-00000005");
    const FileScore packed = score_file(evaluator, file("packed"), nullptr, 0);
    double nats = 0;
    int64_t predicted = 0, at = 0;
    for (const int64_t length : lengths) {
      // A document longer than the window is cut, and each part sees itself alone.
      for (int64_t begin = at; begin + 1 < at + length; begin += kTime) {
        const int64_t end = std::min(begin + kTime + 1, at + length);
        nats += evaluator.loss(std::span(tokens).subspan(size_t(begin), size_t(end - begin)));
        predicted += end - begin - 1;
      }
      at += length;
    }
    EXPECT_EQ(packed.tokens, predicted);
    EXPECT_NEAR(packed.nats, nats, 1e-5 * nats);  // sums in single precision, tile by tile
  }
}

TEST_F(FinetuningRuns, PackedDocumentsOnSeveralRanks) {
  test::Random random(7);
  std::vector<int64_t> lengths;
  for (int i = 0; i < 120; ++i) lengths.push_back(test::draw(random, 1, 20));
  const int64_t count = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  write("packed", some_tokens(count, 8), uneven(count, 9), lengths);
  for (const std::string& of : {model(), llama()}) {
    const std::string on = "packed = true\nvalidation = [\"" + file("packed") + "\"]\n";
    const Run one = run(of + data("packed", on, 8), 4);
    const auto beside = [&](const std::string& more, int ranks) {
      expect_near(run(of + data("packed", on) + more, 4, ranks), one, 1e-5, more);
    };
    beside("", 1);
    beside("[mesh]\ndata = 2\n[plugins.zero]\nstage = 2\n", 2);
    beside("[mesh]\ntensor = 2\n[plugins.tensor_parallel]\n", 2);
    for (const std::string form : {"ring", "gather"})
      beside("[mesh]\nsequence = 2\n[plugins.context_parallel]\nattention = \"" + form + "\"\n", 2);
    beside("[mesh]\npipeline = 2\n[plugins.pipeline]\nschedule = \"zero_bubble_h1\"\n", 2);
    EXPECT_THROW(
        run(of + data("packed", on) + "[mesh]\nsequence = 2\n[plugins.context_parallel]\nattention = \"ulysses\"\n", 1,
            2),
        Error);
  }
}

TEST_F(FinetuningRuns, EpochsAreSteps) {
  write("t", some_tokens(16 * 40 + 1, 10));  // 40 sequences, 8 a step
  EXPECT_EQ(run("[run]\nepochs = 1.5\n" + model() + data("t"), 0).losses.size(), 8u);
  EXPECT_EQ(run("[run]\nepochs = 0.01\n" + model() + data("t"), 0).losses.size(), 1u);
}

TEST_F(FinetuningRuns, SourcesTogetherAreThoseOfOneFile) {
  const auto tokens = some_tokens(900, 11);
  write("t", tokens);
  write("u", some_tokens(700, 12), std::vector<uint8_t>(700, 1));
  const std::string rest =
      "[data]\nsequence_length = 16\nglobal_batch = 8\nmicro_batch = 2\n[device]\nthreads = "
      "1\n[plugins.adamw]\nlearning_rate = 3e-3\n";
  const auto sources = [&](double of_t, double of_u) {
    return model() + "[sources.t]\nfiles = [\"" + file("t") + "\"]\nweight = " + std::to_string(of_t) +
           "\n[sources.u]\nfiles = [\"" + file("u") + "\"]\nweight = " + std::to_string(of_u) + "\n" + rest;
  };
  // Hardly ever the other one.
  const Run almost = run(sources(1, 1e-6), 3), alone = run(model() + data("t"), 3);
  EXPECT_EQ(almost.losses, alone.losses);
  const Run mixed = run(sources(2, 1), 4),
            on_ranks = run(sources(2, 1) + "[mesh]\ndata = 2\n[plugins.data_parallel]\n", 4, 2);
  EXPECT_NE(mixed.losses, alone.losses);
  expect_near(on_ranks, mixed, 1e-5, "two ranks");
}

// Masks, packs and sources in one: what comes next follows from the number of samples alone.
TEST(FinetuningResumes, WhereItStopped) {
  constexpr int kVocabulary = 61;
  const test::TemporaryFolder folder;
  const auto write = [&](const std::string& name, bool masked) {
    TokenFileWriter writer(folder / name + ".bin", false);
    TokenMarksWriter marks(folder / name + ".bin");
    std::vector<int32_t> tokens(700);
    for (size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = int32_t(i * (i + 3) % kVocabulary);
      if (i % 13 == 0) marks.begin_document();
      marks.append(1, !masked || i % 3 > 0);
    }
    writer.append(tokens);
    writer.commit();
    marks.commit();
  };
  write("a", true), write("b", false);
  const auto source = [&](const std::string& name, const std::string& weight) {
    return "[sources." + name + "]\nfiles = [\"" + (folder / name) + ".bin\"]\nweight = " + weight + "\n";
  };
  const std::string config =
      "[model]\nplugin = \"gpt\"\nvocabulary = 61\ncontext = 16\nlayers = 1\nhidden = 16\nheads = "
      "2\n" +
      source("a", "1.0") + source("b", "0.37") +
      "[data]\npacked = true\nsequence_length = 16\nglobal_batch = 4\nmicro_batch = 2\n"
      "[device]\nthreads = 1\n[plugins.adamw]\n";
  const std::string path = test::write_file(folder / "c.toml", config);
  const auto train_to = [&](const std::string& name, int steps, bool resume) {
    Session session(path, {"run.steps=" + std::to_string(steps), "run.directory=\"" + (folder / name) + "\""});
    train(session, {.resume = resume, .trace = ""});
    std::ifstream log(folder / name + "/log.jsonl");
    std::vector<double> losses;
    for (std::string line; std::getline(log, line);)
      if (const Json json = Json::parse(line, "log"); json.find("loss"))
        losses.push_back(json.find("loss")->number("loss"));
    return losses;
  };
  const std::vector<double> calm = train_to("calm", 6, false);
  for (int at = 1; at < 6; at += 2) {
    train_to("stopped" + std::to_string(at), at, false);
    EXPECT_EQ(train_to("stopped" + std::to_string(at), 6, true), calm) << at;
  }
}

}  // namespace
}  // namespace strata::finetuning_test
