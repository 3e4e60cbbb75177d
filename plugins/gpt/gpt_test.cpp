// The model names every dimension of what it declares, in units that a split of heads keeps together.
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "tests/harness.h"

namespace strata::gpt_test {
namespace {

Program program_of(const std::string& model) {
  return test::Runner("[model]\nplugin = \"gpt\"\nlayers = 2\nhidden = 48\nheads = 4\nvocabulary = 64\ncontext = 16\n" +
                      model +
                      "[data]\ntrain = [\"none\"]\nsequence_length = 16\nglobal_batch = 4\nmicro_batch = 4\n"
                      "[plugins.adamw]\n")
      .built.program;
}

TEST(Gpt, NamesAllDimensions) {
  for (const char* model : {"", "tied = false\ndropout = 0.1\nffn = 40\n",
                            "kv_heads = 2\npositions = \"rotary\"\nnorm = \"rms_norm\"\nactivation = \"swiglu\"\nbias "
                            "= false\nqkv_bias = true\n",
                            "kv_heads = 2\nnorm = \"rms_norm\"\nactivation = \"geglu\"\nquery_key_norm = true\n"
                            "post_norms = true\nbias = false\noutput_bias = true\nmlp_bias = true\n"}) {
    const Program program = program_of(model);
    for (const Tensor& tensor : program.tensors)
      if (tensor.role == Role::parameter || tensor.role == Role::data) {
        EXPECT_EQ(tensor.dimensions.size(), tensor.shape.size()) << tensor.name << ", " << model;
      }
    const auto names = [&](const std::string& name) { return program[program.find(name)].dimensions; };
    EXPECT_EQ(names("tokens@0"), (Dimensions{"batch", "time"}));
    EXPECT_EQ(names("embedding.weight"), (Dimensions{"vocabulary", "hidden"}));
    EXPECT_EQ(names("block.1.mlp.up.weight"), (Dimensions{"ffn", "hidden"}));
    EXPECT_EQ(names("block.1.mlp.down.weight"), (Dimensions{"hidden", "ffn"}));
    const bool grouped = std::string(model).starts_with("kv_heads");  // two groups of two queries, else four of one
    EXPECT_EQ(names("block.0.qkv.weight"), (Dimensions{{"heads", grouped ? 4 * 12 : 3 * 12}, "hidden"}));
    EXPECT_EQ(names("block.0.attention_output.weight"), (Dimensions{"hidden", {"heads", grouped ? 2 * 12 : 12}}));
    int residual = 0;
    for (const Tensor& tensor : program.tensors)
      residual += tensor.role == Role::activation && tensor.dimensions == Dimensions{"batch", "time", "hidden"};
    EXPECT_GE(residual, 5);  // the embedding, and two branches in each of two blocks
  }
}

}  // namespace
}  // namespace strata::gpt_test
