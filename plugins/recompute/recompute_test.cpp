// What recomputation leaves of activations, and what they take without it, against published formulas. That nothing but
// memory changes: tests/residency_test.cpp.
#include "tests/harness.h"

namespace strata::recompute_test {
namespace {

constexpr int kHidden = 32, kSequence = 16, kBatch = 4;

std::string toml(int64_t micro_batch, const std::string& plugins, int layers) {
  return "[model]\nplugin = \"gpt\"\nlayers = " + std::to_string(layers) +
         "\nhidden = 32\nheads = 4\nvocabulary = 64\ncontext = 16\n[data]\ntrain = [\"none\"]\nsequence_length = "
         "16\nglobal_batch = 4\nmicro_batch = " +
         std::to_string(micro_batch) + "\n[plugins.adamw]\n" + plugins;
}

// Bytes kept a token by one block of GPT-2, against Korthikanti et al. (arXiv 2205.05198), equation 1: s·b·h (34 + 5
// as/h) in 16 bits with stored attention scores and dropout masks. Here everything is fp32, scores are never stored
// (the 5 as/h term, but one number a row), dropout masks are drawn again, and both norms keep their result: per element
// of the residual stream norm 1, qkv 3, attention 1, sum 1, norm 2, up 4, gelu 4, sum 1 = 16 numbers of 4 bytes, and
// statistics. With recomputation of blocks: 2 s·b·h bytes in 16 bits, here one number of 4.
TEST(Recompute, ActivationBytesFollowTheFormula) {
  const auto activations = [](int layers, const std::string& extra) {
    return test::Runner(toml(4, extra, layers)).plan.device().at_peak[int(Role::activation)];
  };
  const int64_t elements = kBatch * kSequence * kHidden;
  const int64_t statistics = 4 * kBatch * kSequence * (2 + 2 + 4);  // mean and deviation of two norms, a number a head
  EXPECT_EQ(activations(9, "") - activations(8, ""), 16 * 4 * elements + statistics);
  EXPECT_EQ(activations(9, "[plugins.recompute]\n") - activations(8, "[plugins.recompute]\n"), 4 * elements);
}

}  // namespace
}  // namespace strata::recompute_test
