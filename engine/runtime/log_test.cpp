// What a resumed run keeps of its log, and what is lost when it cannot be written.
#include "engine/runtime/log.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "strata/error.h"

namespace strata::log_test {
namespace {

class Log : public testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directory(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string text() const {
    std::ostringstream all;
    all << std::ifstream(path_).rdbuf();
    return all.str();
  }
  void put(const std::string& text) { std::ofstream(path_) << text; }
  std::filesystem::path folder_ = testing::TempDir() + "strata-log-" + std::to_string(getpid());
  std::string path_ = folder_ / "log.jsonl";
};

TEST_F(Log, LinesOfLaterStepsGoWithTheFirstThatIsWritten) {
  const std::string before =
      "{\"step\": 1, \"loss\": 2}\n{\"step\": 2, \"loss\": 1.5}\n{\"step\": 3}\n{\"step\": 4, \"lo";
  put(before);
  StepLog log(path_, 2);
  EXPECT_EQ(text(), before);  // a run that stops before its first step changes nothing
  EXPECT_EQ(log.write({{"step", 3}, {"loss", 0.25}}), "");
  EXPECT_EQ(text(), "{\"step\": 1, \"loss\": 2}\n{\"step\": 2, \"loss\": 1.5}\n{\"step\": 3, \"loss\": 0.25}\n");
}

TEST_F(Log, HalfALineOfAKeptStepGoes) {
  put("{\"step\": 1}\n{\"step\": 2, \"loss\": 1.");
  StepLog log(path_, 2);
  EXPECT_EQ(log.write({{"step", 3}}), "");
  EXPECT_EQ(text(), "{\"step\": 1}\n{\"step\": 3}\n");
}

TEST_F(Log, ANewRunBeginsANewOne) {
  put("{\"step\": 1}\n{\"step\": 2}\n");
  StepLog log(path_, 0);
  EXPECT_EQ(log.write({{"step", 1}, {"loss", 3}}), "");
  EXPECT_EQ(text(), "{\"step\": 1, \"loss\": 3}\n");
}

TEST_F(Log, WhatCannotBeWrittenIsToldOnceAndCounted) {
  StepLog log("/dev/full", 0);
  EXPECT_NE(log.write({{"step", 1}}).find("/dev/full: cannot write the log: "), std::string::npos);
  EXPECT_EQ(log.write({{"step", 2}}), "");
  EXPECT_EQ(log.lost(), 2);
  EXPECT_THROW(StepLog(folder_, 0), Error);
}

}  // namespace
}  // namespace strata::log_test
