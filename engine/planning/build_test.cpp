// What goes wrong in a plugin's stage is told with its name; what is missing, with the plugins that would provide it.
#include "engine/planning/build.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "engine/plugin/testing.h"
#include "tests/harness.h"

namespace strata::build_test {
namespace {

constexpr const char* kToml =
    "[model]\nplugin = \"gpt\"\nlayers = 2\nhidden = 32\nheads = 4\nvocabulary = 64\ncontext = 16\n"
    "[data]\ntrain = [\"none\"]\nsequence_length = 16\nglobal_batch = 8\nmicro_batch = 4\n[plugins.adamw]\n";

// A plugin whose pass breaks the program is named.
class Breaker final : public Plugin {
 public:
  void backward(ProgramStage& stage) override { stage.program.ops.erase(stage.program.ops.begin() + 1); }
};
class Thrower final : public Plugin {
 public:
  void update(UpdateStage&) override { throw std::runtime_error("out of ideas"); }
};

template <class Bad>
std::string message() {
  Bad bad;
  return test::message_of([&] { test::Runner(kToml, {{"culprit", &bad}}); });
}

TEST(Build, VerifierNamesThePluginThatBrokeIt) {
  const std::string text = message<Breaker>();
  EXPECT_NE(text.find("not well formed after \"culprit\", stage \"backward\""), std::string::npos) << text;
  EXPECT_NE(text.find("before anything has written it"), std::string::npos) << text;
}

TEST(Build, ExceptionsOfPluginsCarryTheirName) {
  EXPECT_EQ(message<Thrower>(), "plugin \"culprit\", stage update: threw \"out of ideas\".");
}

// The engine names no plugin of its own accord: it lists those that say they provide what is missing.
TEST(Build, WhatIsMissingIsListed) {
  test::TemporaryFolder folder;
  const Session session(test::write_file(folder / "config.toml", std::string(kToml) + "[mesh]\ndata = 2\n"), {});
  EXPECT_EQ(test::message_of(
                [&] { build_program(session.plugins, session.batch(Goal::train), Goal::train, session.mesh); }),
            "mesh.data asks for several ranks, but no enabled plugin sums gradients over them; enable one that does "
            "(installed: data_parallel, gossip, hogwild, local_sgd, zero), or set it to 1.");
}

}  // namespace
}  // namespace strata::build_test
