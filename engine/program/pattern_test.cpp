// Patterns of names: stars, and what they cost.
#include "strata/pattern.h"

#include <gtest/gtest.h>

namespace strata::pattern_test {
namespace {

TEST(Pattern, StarsStandForAnyText) {
  EXPECT_TRUE(matches("block.0.qkv.weight", "block.0.qkv.weight"));
  EXPECT_FALSE(matches("block.0.qkv", "block.0.qkv.weight"));
  EXPECT_FALSE(matches("block.0.qkv.weight", "block.0.qkv"));
  EXPECT_TRUE(matches("*", ""));
  EXPECT_TRUE(matches("*", "norm.weight"));
  EXPECT_TRUE(matches("block.*", "block.0.qkv.weight"));
  EXPECT_TRUE(matches("block.*", "block."));
  EXPECT_FALSE(matches("block.*", "block"));
  EXPECT_TRUE(matches("*.weight", "block.0.qkv.weight"));
  EXPECT_FALSE(matches("*.weight", "block.0.qkv.weights"));
  EXPECT_TRUE(matches("block.*.mlp.*.weight", "block.10.mlp.up.weight"));
  EXPECT_FALSE(matches("block.*.mlp.*.weight", "block.10.mlp.weight"));
  EXPECT_TRUE(matches("*norm*", "block.1.norm2.bias"));
  EXPECT_TRUE(matches("**a**", "banana"));
  EXPECT_TRUE(matches("*ana", "banana"));
  EXPECT_FALSE(matches("a.b", "axb"));
  EXPECT_FALSE(matches("", "a"));
  EXPECT_TRUE(matches("", ""));
}

// The product of both lengths at most: trying all ways to fill the stars would not end.
TEST(Pattern, ManyStarsCostLittle) {
  std::string pattern;
  for (int i = 0; i < 200; ++i) pattern += "*a";
  EXPECT_FALSE(matches(pattern + "*b", std::string(5000, 'a')));
  EXPECT_TRUE(matches(pattern + "*", std::string(5000, 'a')));
}

// The name is the model's wherever a parameter is a working copy.
TEST(Pattern, NamesAreTheModels) {
  Program program;
  EXPECT_EQ(names_like(program), ".");
  for (const char* name : {"first", "last"})
    program.add({.name = std::string(name) + ".bf16",
                 .shape = {1},
                 .role = Role::parameter,
                 .persistent = true,
                 .lasting = Lasting{.rounded_from = std::string(name)}});
  EXPECT_EQ(parameter_name(program, program.find("first.bf16")), "first");
  EXPECT_EQ(names_like(program), ", whose parameters have names as first and last.");
}

}  // namespace
}  // namespace strata::pattern_test
