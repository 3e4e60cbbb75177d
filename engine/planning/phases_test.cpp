// Phases: which steps need which program, what is refused, and persistent tensors that programs share.
#include "engine/planning/phases.h"

#include <gtest/gtest.h>

#include <random>

#include "strata/builder.h"

namespace strata::phases_test {
namespace {

using Declarations = std::vector<std::pair<std::string, Steps>>;

class Declares final : public Plugin {
 public:
  explicit Declares(Declarations phases) : phases_(std::move(phases)) {}
  void phases(PhaseStage& stage) override {
    for (const auto& [name, steps] : phases_) stage.declare(name, steps);
  }

 private:
  Declarations phases_;
};

PhaseTable table(const Declarations& first, const Declarations& second = {}) {
  Declares a(first), b(second);
  const std::vector<NamedPlugin> plugins{{"first", &a}, {"second", &b}};
  return PhaseTable(plugins);
}

std::string refusal(const Declarations& first, const Declarations& second = {}) {
  try {
    table(first, second);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Phases, WithoutAnyThereIsOneProgram) {
  const PhaseTable none = phases_test::table({});
  EXPECT_EQ(none.programs(), 1u);
  EXPECT_EQ(none.of_step(1), 0u);
  EXPECT_EQ(none.of_step(1'000'000'000'000), 0u);
  EXPECT_EQ(none.of_program(0).text(), "");
  EXPECT_TRUE(none.of_program(0).has_first_step());
  EXPECT_FALSE(none.of_program(0).is_first_step());
  EXPECT_EQ(none.text(), "");
}

TEST(Phases, ProgramsAreInTheOrderOfTheirFirstSteps) {
  const PhaseTable table = phases_test::table({{"warm-up", {.last = 10}}}, {{"exchange", {.first = 4, .every = 4}}});
  ASSERT_EQ(table.programs(), 4u);
  const std::vector<std::string> names = {"warm-up", "warm-up + exchange", "no phase", "exchange"};
  for (size_t p = 0; p < 4; ++p) EXPECT_EQ(table.of_program(p).text(), names[p]);
  const std::vector<size_t> first = {0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 2, 3, 2};
  for (size_t i = 0; i < first.size(); ++i) EXPECT_EQ(table.of_step(int64_t(i) + 1), first[i]) << i + 1;
  EXPECT_EQ(table.text(),
            "phase \"warm-up\" (of plugin \"first\"): steps 1 to 10\n"
            "phase \"exchange\" (of plugin \"second\"): steps 4, 8, 12, …\n");
}

// Against counting: every step has the program of exactly its phases, and there is no program without a step.
TEST(Phases, EveryStepHasItsProgram) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int run = 0; run < 300; ++run) {
    Declarations declared;
    for (size_t p = 0, count = 1 + random() % 3; p < count; ++p) {
      Steps steps{.first = int64_t(1 + random() % 12), .every = int64_t(1 + random() % 6)};
      if (random() % 2) steps.last = steps.first + int64_t(random() % 30);
      declared.emplace_back("phase " + std::to_string(p), steps);
    }
    const PhaseTable table = phases_test::table(declared);
    std::vector<char> ran(table.programs(), false);
    for (int64_t step = 1; step <= 250; ++step) {
      const size_t program = table.of_step(step);
      ASSERT_LT(program, table.programs());
      ran[program] = true;
      for (const auto& [name, steps] : declared)
        ASSERT_EQ(table.of_program(program).in(name), steps.contain(step)) << name << ", step " << step;
    }
    EXPECT_EQ(std::count(ran.begin(), ran.end(), char(true)), int64_t(table.programs()));
    bool again = false;
    for (int64_t step = 2; step <= 250; ++step) again |= table.of_step(step) == 0;
    for (size_t p = 0; p < table.programs(); ++p) {
      EXPECT_EQ(table.of_program(p).has_first_step(), p == 0);
      EXPECT_EQ(table.of_program(p).is_first_step(), p == 0 && !again);
    }
  }
}

TEST(Phases, StepsAreToldInWords) {
  EXPECT_EQ(text(Steps{}), "from step 1 on");
  EXPECT_EQ(text(Steps{.first = 4}), "from step 4 on");
  EXPECT_EQ(text(Steps{.last = 9}), "steps 1 to 9");
  EXPECT_EQ(text(Steps{.first = 7, .last = 7}), "step 7");
  EXPECT_EQ(text(Steps{.first = 7, .last = 9, .every = 5}), "step 7");
  EXPECT_EQ(text(Steps{.first = 4, .every = 4}), "steps 4, 8, 12, …");
  EXPECT_EQ(text(Steps{.first = 4, .last = 9, .every = 4}), "steps 4, 8 up to 9");
  EXPECT_EQ(text(Steps{.first = 2, .last = 100, .every = 3}), "steps 2, 5, 8, … up to 100");
}

TEST(Phases, WhatIsNoneIsRefused) {
  EXPECT_EQ(refusal({{"", {}}}), "plugin \"first\", stage phases: a phase has no name.");
  for (const Steps& steps : {Steps{.first = 0}, Steps{.first = 3, .last = 2}, Steps{.every = 0}, Steps{.every = -1}})
    EXPECT_NE(refusal({{"x", steps}}).find("plugin \"first\", stage phases: phase \"x\": steps from "),
              std::string::npos);
  EXPECT_EQ(refusal({{"x", {}}, {"x", {}}}), "plugin \"first\", stage phases: phase \"x\" is declared twice.");
  EXPECT_NE(refusal({{"x", {}}}, {{"x", {}}})
                .find("plugin \"second\", stage phases: phase \"x\" is declared by plugin \"first\" too"),
            std::string::npos);
  EXPECT_NE(refusal({{"x", {.every = 1009}}, {"y", {.every = 1013}}}).find("repeat only after more than 1000000 steps"),
            std::string::npos);
  EXPECT_NE(refusal({{"x", {.every = Steps::kEnd}}}).find("repeat only after more than"), std::string::npos);
  Declarations many;
  for (int i = 0; i < 20; ++i) many.emplace_back("p" + std::to_string(i), Steps{.first = 2 + i});
  EXPECT_NE(refusal(many).find("make more than 16 different programs"), std::string::npos);
}

TEST(Phases, NamesThatNobodyDeclaredAreWrong) {
  const PhaseTable table = phases_test::table({{"exchange", {.every = 2}}});
  EXPECT_TRUE(table.of_program(0).in("exchange"));
  EXPECT_FALSE(table.none().in("exchange"));
  try {
    (void)table.none().in("exchanges");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("no phase is named \"exchanges\""), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("exchange"), std::string::npos) << error.what();
  }
  EXPECT_FALSE(Phases().in("exchange")) << "a plugin that is asked for its module alone has declared nothing";
}

TEST(Phases, ProgramsShareTheirPersistentTensors) {
  Program a, b, c;
  Builder(a).parameter("w", {4, 3}, {});
  Builder(a).state("w.first", {4, 3}, DType::f32);
  Builder(b).state("w.second", {2}, DType::bf16);
  b.add({.name = "local", .shape = {1}});
  c.add_part(Builder(c).parameter("w", {4, 3}, {}), "w.part", {2, 3}, 0);
  c[c.find("w")].lasting = Lasting{.rounded_from = "w.master"};
  const std::vector<SharingProgram> all{{"a", &a}, {"b", &b}, {"c", &c}};
  share_persistent(all);
  for (const Program* program : {&a, &b, &c}) {
    std::vector<std::string> names;
    for (const Tensor& tensor : program->tensors)
      if (tensor.persistent && !tensor.part_of) names.push_back(tensor.name);
    std::sort(names.begin(), names.end());
    EXPECT_EQ(names, (std::vector<std::string>{"w", "w.first", "w.second"}));
    EXPECT_EQ((*program)[program->find("w")].lasting->rounded_from, "w.master");
    EXPECT_EQ((*program)[program->find("w.second")].dtype, DType::bf16);
  }
  EXPECT_FALSE(a.find("local"));
  EXPECT_FALSE(a.find("w.part"));

  Program other;
  Builder(other).parameter("w", {4, 2}, {});
  const std::vector<SharingProgram> both{{"no phase", &a}, {"phase x", &other}};
  try {
    share_persistent(both);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(
        std::string(error.what())
            .find("\"w\" is f32(4, 3) among the parameters in no phase and f32(4, 2) among the parameters in phase x"),
        std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace strata::phases_test
