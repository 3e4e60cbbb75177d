// Reproducible runs of random models of odd sizes: bit for bit the same for any number of threads and ranks, under
// every strategy that promises not to change results, with every optimizer. STRATA_SEED and STRATA_CASES draw others.
#include <cstring>
#include <random>

#include "tests/harness.h"

namespace strata::reproducible_test {
namespace {

constexpr int kSteps = 3;

struct Sizes {
  int layers, head_size, heads, kv_heads, ffn, vocabulary, sequence, micro_batch, global_batch;
  bool rotary, swiglu, tied;
  std::string optimizer, more;
};

struct Way {
  int ranks, threads;
  std::string plugins, name;
};

class Draw {
 public:
  explicit Draw(unsigned seed) : random_(seed) {}
  int from(int low, int high) { return low + int(random_() % unsigned(high - low + 1)); }
  bool coin() { return random_() % 2 == 0; }
  template <class T>
  const T& of(const std::vector<T>& list) {
    return list[random_() % list.size()];
  }

  Sizes sizes() {
    Sizes s{};
    s.layers = from(1, 3);
    s.rotary = coin();
    s.head_size = s.rotary ? 2 * from(1, 14) : from(1, 29);
    s.kv_heads = from(1, 3);
    s.heads = s.kv_heads * from(1, 2);
    s.ffn = from(1, 190);
    s.vocabulary = from(5, 300);
    s.sequence = from(1, 70);
    s.micro_batch = from(1, 3);
    s.global_batch = s.micro_batch * 4;
    s.swiglu = coin();
    s.tied = coin();
    s.optimizer = of<std::string>({"[plugins.adamw]\nlearning_rate = 1e-3\n", "[plugins.adafactor]\n",
                                   "[plugins.adafactor]\nbeta1 = 0.9\n", "[plugins.sm3]\nlearning_rate = 1e-2\n"});
    if (coin()) s.more += "[plugins.clip]\nmax_norm = 0.1\n";
    return s;
  }

  Way way(const std::string& folder) {
    Way w{of<int>({1, 2, 4}), from(1, 4), "", ""};
    w.name = std::to_string(w.ranks) + " ranks of " + std::to_string(w.threads) + " threads";
    const int stage = from(0, 3);
    if (stage == 0) w.plugins += "[plugins.data_parallel]\nbucket = 20000\n";
    if (stage > 0) w.plugins += "[plugins.zero]\nbucket = 20000\nstage = " + std::to_string(stage) + "\n";
    if (coin()) w.plugins += "[plugins.recompute]\n";
    if (coin()) {
      const std::string tier = coin() ? "host" : "nvme";
      w.plugins += "[plugins.offload]\nminimum = 0\ndirectory = \"" + folder + "\"\noptimizer = \"" + tier +
                   "\"\ngradients = \"" + tier + "\"\nparameters = \"" + tier + "\"\nactivations = \"" + tier + "\"\n";
    }
    return w;
  }

 private:
  std::mt19937 random_;
};

std::string toml(const Sizes& s, const Way& way) {
  const auto line = [](const std::string& key, const std::string& value) { return key + " = " + value + "\n"; };
  const auto number = [&](const std::string& key, int value) { return line(key, std::to_string(value)); };
  return "[run]\nreproducible = true\n[model]\nplugin = \"gpt\"\n" + number("layers", s.layers) +
         number("hidden", s.head_size * s.heads) + number("heads", s.heads) + number("kv_heads", s.kv_heads) +
         number("ffn", s.ffn) + number("vocabulary", s.vocabulary) + number("context", s.sequence) +
         line("positions", s.rotary ? "\"rotary\"" : "\"learned\"") +
         line("norm", s.swiglu ? "\"rms_norm\"" : "\"layer_norm\"") +
         line("activation", s.swiglu ? "\"swiglu\"" : "\"gelu\"") + line("tied", s.tied ? "true" : "false") +
         "dropout = 0.1\nattention_dropout = 0.1\n[data]\ntrain = [\"none\"]\n" +
         number("sequence_length", s.sequence) + number("global_batch", s.global_batch) +
         number("micro_batch", s.micro_batch) + "[device]\n" + number("threads", way.threads) + "[mesh]\n" +
         number("data", way.ranks) + s.optimizer + s.more + way.plugins;
}

struct Outcome {
  std::vector<double> losses;
  std::map<std::string, std::vector<float>> tensors;  // whole, put together from all ranks' parts
};

Outcome outcome(const Sizes& s, const Way& way) {
  Outcome result;
  std::mutex mutex;
  const auto body = [&](World* world) {
    test::Runner runner(toml(s, way), {}, Goal::train, {}, world);
    std::mt19937 random(7);
    std::vector<int32_t> tokens(size_t(s.global_batch * s.sequence)), targets(tokens.size());
    for (int step = 0; step < kSteps; ++step) {
      for (auto* list : {&tokens, &targets})
        for (int32_t& token : *list) token = int32_t(random() % unsigned(s.vocabulary));
      const double loss = runner.run_step(tokens.data(), targets.data());
      if (!world || world->rank() == 0) result.losses.push_back(loss);
    }
    for (const Tensor& tensor : runner.storage->persistent_tensors()) {
      if (tensor.role == Role::scalar || tensor.dtype != DType::f32) continue;
      const std::vector<float> values = runner.values(tensor.name);
      std::lock_guard lock(mutex);
      test::put_together(tensor, values, result.tensors[tensor.name]);
    }
  };
  if (way.ranks == 1)
    body(nullptr);
  else
    run_local(
        way.ranks, [&](World& world) { body(&world); }, 600);
  return result;
}

void expect_same(const Outcome& actual, const Outcome& expected) {
  EXPECT_EQ(actual.losses, expected.losses);
  ASSERT_EQ(actual.tensors.size(), expected.tensors.size());
  for (const auto& [name, values] : expected.tensors) {
    const auto found = actual.tensors.find(name);
    ASSERT_TRUE(found != actual.tensors.end()) << name;
    EXPECT_EQ(std::memcmp(found->second.data(), values.data(), values.size() * 4), 0) << name;
  }
}

int from_environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}

TEST(Reproducible, OddSizesAreEqualForAnyThreadsRanksAndStrategies) {
  test::TemporaryFolder folder;
  const int seed = from_environment("STRATA_SEED", 20260), cases = from_environment("STRATA_CASES", 8);
  for (int number = 0; number < cases; ++number) {
    if (test::left_out(size_t(number))) continue;
    Draw draw(unsigned(seed + number));
    const Sizes sizes = draw.sizes();
    const Outcome expected = outcome(sizes, {1, 1, "", ""});
    const Way way = draw.way(folder.path());
    SCOPED_TRACE("STRATA_SEED=" + std::to_string(seed + number) + " STRATA_CASES=1: " + way.name + "\n" +
                 toml(sizes, way));
    expect_same(outcome(sizes, way), expected);
  }
}

// The sizes at which it was noticed that products were cut by the number of threads.
TEST(Reproducible, TwoThreadsAreAsTwoRanks) {
  const Sizes sizes{5, 20, 3, 3, 240, 256, 48, 2, 8, false, false, true, "[plugins.adamw]\n", ""};
  const Outcome expected = outcome(sizes, {1, 2, "", ""});
  for (const std::string exchange : {"[plugins.data_parallel]\n", "[plugins.zero]\nstage = 1\n",
                                     "[plugins.zero]\nstage = 2\n", "[plugins.zero]\nstage = 3\n"}) {
    SCOPED_TRACE(exchange);
    expect_same(outcome(sizes, {2, 1, exchange, ""}), expected);
  }
}

// Of ranks, Adafactor's statistics are of parts of a matrix: the sums are exact, whoever has which rows.
TEST(Reproducible, AdafactorOnRanksIsEqual) {
  for (const bool rotary : {false, true}) {
    const Sizes sizes{2, 10, 6, 3, 67, 61, 16, 1, 8, rotary, rotary, !rotary, "[plugins.adafactor]\nbeta1 = 0.9\n", ""};
    const Outcome expected = outcome(sizes, {1, 1, "", ""});
    for (const int ranks : {2, 4})
      for (const int stage : {1, 3}) {
        SCOPED_TRACE(std::to_string(ranks) + " ranks, stage " + std::to_string(stage));
        expect_same(outcome(sizes, {ranks, 1, "[plugins.zero]\nstage = " + std::to_string(stage) + "\n", ""}),
                    expected);
      }
  }
}

}  // namespace
}  // namespace strata::reproducible_test
