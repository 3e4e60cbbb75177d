// Names of dimensions: kept, printed, and refused where they do not fit.
#include "strata/builder.h"

#include <gtest/gtest.h>

#include "engine/plugin/testing.h"
#include "strata/mesh.h"

namespace strata::builder_test {
namespace {

using test::message_of;

TEST(DimensionNames, AreKeptAndPrinted) {
  Program program;
  Builder build(program);
  const TensorId tokens = build.data("tokens", {2, 16}, DType::i32, {"batch", "time"});
  const TensorId qkv = build.parameter("qkv", {96, 32}, {}, {{"heads", 24}, "hidden"});
  const TensorId plain = build.parameter("plain", {4}, {});
  EXPECT_EQ(program[tokens].dimensions, (Dimensions{"batch", "time"}));
  EXPECT_EQ(program[qkv].dimensions, (Dimensions{{"heads", 24}, "hidden"}));
  EXPECT_TRUE(program[plain].dimensions.empty());
  const std::string text = print(program);
  EXPECT_NE(text.find("%tokens:i32(batch 2, time 16)"), std::string::npos) << text;
  EXPECT_NE(text.find("%qkv:f32(heads 4 x 24, hidden 32)"), std::string::npos) << text;
  EXPECT_NE(text.find("%plain:f32(4)"), std::string::npos) << text;
}

TEST(DimensionNames, OfTiedWeightsAgree) {
  Program program;
  Builder build(program);
  const TensorId first = build.parameter("w", {64, 32}, {});
  EXPECT_EQ(build.parameter("w", {64, 32}, {}, {"vocabulary", "hidden"}), first);
  EXPECT_EQ(build.parameter("w", {64, 32}, {}), first);
  EXPECT_EQ(program[first].dimensions, (Dimensions{"vocabulary", "hidden"}));
  EXPECT_EQ(message_of([&] {
              build.parameter("w", {64, 32}, {}, {"ffn", "hidden"});
            }),
            "parameter \"w\" is declared as (vocabulary 64, hidden 32) and as (ffn 64, hidden 32).");
}

TEST(DimensionNames, ThatDoNotFitAreRefused) {
  Program program;
  Builder build(program);
  EXPECT_EQ(message_of([&] {
              build.parameter("a", {64, 32}, {}, {"hidden"});
            }),
            "tensor a of shape (64, 32) has names for 1 dimensions; give each one or none.");
  EXPECT_EQ(message_of([&] {
              build.parameter("b", {64}, {}, {{"heads", 24}});
            }),
            "tensor b: dimension 0, \"heads\", of 64 elements does not hold a whole number of units of 24.");
  EXPECT_EQ(message_of([&] {
              build.data("c", {4, 4}, DType::i32, {"batch", ""});
            }),
            "tensor c: dimension 1, \"\", of 4 elements does not hold a whole number of units of 1.");
}

// A pass that writes names without Builder is found out.
TEST(DimensionNames, AreVerified) {
  Program program;
  Builder build(program);
  const TensorId x = build.parameter("x", {64}, {}, {"hidden"});
  EXPECT_EQ(message_of([&] { verify(program, "nobody"); }), "(no error)");
  program[x].dimensions = {{"heads", 5}};
  EXPECT_NE(message_of([&] {
              verify(program, "somebody");
            }).find("not well formed after \"somebody\": tensor x: dimension 0"),
            std::string::npos);
}

// A rank's part has the whole tensor's names and units.
TEST(DimensionNames, AreOfTheWholeTensor) {
  Program program;
  Builder build(program);
  const TensorId x = build.parameter("x", {64}, {}, {{"heads", 16}});
  program[x].layout = {{.dimension = 0, .axis = "tensor", .full = 64, .first = 0}};
  program[x].shape = {22};
  EXPECT_EQ(message_of([&] { verify(program, "nobody"); }), "(no error)");
}

}  // namespace
}  // namespace strata::builder_test
