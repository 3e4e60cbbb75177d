// Logs read back, and the page made of them.
#include "engine/runtime/run_page.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "engine/runtime/log.h"
#include "strata/error.h"
#include "tests/harness.h"

namespace strata::run_page_test {
namespace {

int64_t count(const std::string& text, const std::string& what) {
  int64_t found = 0;
  for (size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += what.size()) ++found;
  return found;
}

RunHistory made_up(const std::string& name, int64_t steps) {
  RunHistory run{.name = name};
  for (int64_t step = 1; step <= steps; ++step) {
    run.steps.push_back(double(step)), run.tokens.push_back(64 * double(step)), run.seconds.push_back(double(step));
    run.curves["loss"].steps.push_back(double(step));
    run.curves["loss"].values.push_back(5 / double(step));
  }
  return run;
}

TEST(RunHistory, IsWhatTheLogHolds) {
  const test::TemporaryFolder folder;
  {
    StepLog log(folder / "log.jsonl", 0);
    for (int64_t step = 1; step <= 4; ++step)
      log.write({{"step", double(step)},
                 {"loss", step == 3 ? NAN : 4.5 - double(step)},
                 {"seconds", 2},
                 {"tokens_per_second", 50}});
  }
  for (const std::string& path : {folder.path(), folder / "log.jsonl"}) {
    const RunHistory run = read_history(path);
    EXPECT_EQ(run.steps, (std::vector<double>{1, 2, 3, 4}));
    EXPECT_EQ(run.tokens.back(), 400);
    EXPECT_EQ(run.seconds.back(), 8);
    EXPECT_EQ(run.find("loss")->steps, (std::vector<double>{1, 2, 4}));
    EXPECT_EQ(run.last("loss"), 0.5);
    EXPECT_EQ(run.most("loss"), 3.5);
    EXPECT_EQ(run.median("loss"), 2.5);
    EXPECT_TRUE(std::isnan(run.last("validation_loss")));
  }
}

TEST(RunHistory, NamesTheLineThatIsWrong) {
  const test::TemporaryFolder folder;
  const auto refusal = [&](const std::string& text) {
    try {
      read_history(test::write_file(folder / "log.jsonl", text));
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const std::string good = "{\"step\": 1, \"loss\": 2}\n";
  EXPECT_EQ(refusal(good), "");
  EXPECT_EQ(refusal(good + "{\"step\": 2, \"lo"), "");  // is being written
  EXPECT_NE(refusal("").find("no step has been logged yet"), std::string::npos);
  for (const char* bad : {"{\"step\": 2, \"lo\n", "[]\n", "{\"loss\": 2}\n", "{\"step\": 1}\n", "{\"step\": \"2\"}\n",
                          "\n", "{\"step\": 2, \"loss\": \"low\"}\n"})
    EXPECT_NE(refusal(good + bad + "{\"step\": 3}\n").find("log.jsonl:2"), std::string::npos)
        << bad << refusal(good + bad);
  EXPECT_THROW(read_history(folder / "nothing"), Error);
}

TEST(RunPage, ShowsEachRunInEachChartThatItHasFiguresOf) {
  RunHistory first = made_up("a <run>", 3), second = made_up("second", 9);
  second.curves["validation_loss"] = {{3, 9}, {2, 1}};
  const std::string page = run_page(std::vector{first, second}, Along::steps);
  EXPECT_EQ(count(page, "<title>a &lt;run&gt;</title>"), 1);
  EXPECT_EQ(count(page, "<title>second</title>"), 2);
  EXPECT_EQ(count(page, "<h2>"), 2);
  EXPECT_EQ(count(page, "<circle"), 2);
  EXPECT_EQ(count(page, "nan"), 0);
  EXPECT_EQ(count(page, "inf"), 0);
}

// Odd histories: one step, equal values, a resumed log that begins late, far more steps than columns.
TEST(RunPage, TakesAnyHistory) {
  RunHistory flat = made_up("flat", 1), late = made_up("late", 1), large = made_up("large", 100'000);
  late.steps = late.curves["loss"].steps = {1e6};
  late.curves["gradient_norm"] = {{1e6}, {0}};
  late.curves["tokens_per_second"] = {{1e6}, {-1e300}};
  for (const Along along : {Along::steps, Along::tokens, Along::seconds})
    for (const std::vector<RunHistory>& runs : {std::vector{flat}, std::vector{late}, std::vector{large},
                                                std::vector{flat, late, large}, std::vector<RunHistory>(20, flat)}) {
      const std::string page = run_page(runs, along);
      EXPECT_EQ(count(page, "nan"), 0) << page;
      EXPECT_EQ(count(page, "inf"), 0) << page;
      EXPECT_LT(page.size(), 200'000u);
    }
}

}  // namespace
}  // namespace strata::run_page_test
