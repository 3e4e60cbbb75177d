// Signals to a process that takes them: asked once, twice, where it may not wait, and ignored. Each in a process of its
// own.
#include "engine/runtime/stop.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <thread>
#include <utility>

namespace strata::stop_test {
namespace {

void pause_a_little() { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }

// Leaves with 0 once a stop is asked for and what is said of it is written (its thread joined, as a run does it); the
// test's own limit of time ends it otherwise.
[[noreturn]] void leave_when_asked(std::unique_ptr<StopSignals> stop) {
  while (!stop->asked()) pause_a_little();
  stop.reset();
  std::_Exit(0);
}

TEST(Stop, EachSignalAsks) {
  for (int signal : {SIGINT, SIGQUIT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU})
    EXPECT_EXIT(
        {
          block_stop_signals();
          if (stop_signal_waits()) std::_Exit(1);
        kill(getpid(), signal);  // waits for somebody to take it
        if (!stop_signal_waits()) std::_Exit(2);
          auto stop = std::make_unique<StopSignals>(true);
          leave_when_asked(std::move(stop));
        },
        testing::ExitedWithCode(0), "stops after the step")
        << signal;
}

TEST(Stop, OnlyASecondOneFromTheKeyboardEndsAtOnce) {
  EXPECT_EXIT(
      {
        auto stop = std::make_unique<StopSignals>(false);
        for (int i = 0; i < 3; ++i) {
          kill(getpid(), SIGTERM);
          pause_a_little();
        }
        kill(getpid(), SIGINT);
        leave_when_asked(std::move(stop));
      },
      testing::ExitedWithCode(0), "");
  EXPECT_EXIT(
      {
        StopSignals stop(false);
        kill(getpid(), SIGINT);
        while (!stop.asked()) pause_a_little();
        kill(getpid(), SIGINT);
        for (;;) pause_a_little();
      },
      testing::ExitedWithCode(130), "ended at once by SIGINT");
}

TEST(Stop, AtOnceWhereNothingElseEndsAWait) {
  EXPECT_EXIT(
      {
        StopSignals stop(false);
        { const StopSignals::AtOnce over(stop); }
        kill(getpid(), SIGTERM);
        while (!stop.asked()) pause_a_little();  // before and after it, it waits
        const StopSignals::AtOnce late(stop);
        for (;;) pause_a_little();
      },
      testing::ExitedWithCode(143), "ended at once by SIGTERM");
  EXPECT_EXIT(
      {
        StopSignals stop(false);
        const StopSignals::AtOnce at_once(stop);
        kill(getpid(), SIGUSR1);
        for (;;) pause_a_little();
      },
      testing::ExitedWithCode(128 + SIGUSR1), "ended at once by SIGUSR1");
}

TEST(Stop, WhatWasIgnoredStaysIgnoredAndTheRestEndsNothing) {
  EXPECT_EXIT(
      {
        std::signal(SIGHUP, SIG_IGN);
        std::signal(SIGINT, SIG_IGN);  // as shells do for the background
        block_stop_signals();
        kill(getpid(), SIGHUP);
        auto stop = std::make_unique<StopSignals>(true);
        ::raise(SIGPIPE);
        ::raise(SIGXFSZ);
        for (int i = 0; i < 20; ++i) pause_a_little();
        if (stop->asked()) std::_Exit(1);
        kill(getpid(), SIGINT);
        leave_when_asked(std::move(stop));
      },
      testing::ExitedWithCode(0), "SIGINT");
}

TEST(Stop, UnblockedTheyEndTheProcess) {
  EXPECT_EXIT(
      {
        block_stop_signals();
        kill(getpid(), SIGTERM);
        { StopSignals stop(false); }
        kill(getpid(), SIGTERM);
        unblock_stop_signals();
        std::_Exit(0);
      },
      testing::KilledBySignal(SIGTERM), "");
}

}  // namespace
}  // namespace strata::stop_test
