// The watchdog against work that goes on, work that stands still, and work that does not end when it is told to.
#include "engine/runtime/watchdog.h"

#include <gtest/gtest.h>

#include <atomic>

namespace strata::watchdog_test {
namespace {

struct Work {
  std::atomic<int64_t> done{0};
  std::atomic<int> ended{0}, left{0};
  std::string text;
  Watchdog::Watched watched() {
    return {.progress = [this] { return done.load(); },
            .where = [] { return std::string("compute at op 7"); },
            .end = [this](const std::string& where) { text = where, ++ended, ended.notify_all(); },
            .leave = [this](const std::string&) { ++left, left.notify_all(); }};
  }
};

TEST(Watchdog, EndsWhatStandsStillAndThenLeaves) {
  Work work;
  Watchdog watchdog(work.watched(), 0.02, 0.02);
  watchdog.begin();
  work.ended.wait(0);
  work.left.wait(0);
  EXPECT_EQ(work.text, "compute at op 7");
  watchdog.end();
}

TEST(Watchdog, ASecondStepIsWatchedAnew) {
  Work work;
  Watchdog watchdog(work.watched(), 0.02, 3600);
  for (int step = 0; step < 3; ++step) {
    watchdog.begin();
    work.ended.wait(step);
    watchdog.end();
  }
  EXPECT_EQ(work.ended, 3);
  EXPECT_EQ(work.left, 0);
}

// What goes on is left alone however long it takes, and so is what is over.
TEST(Watchdog, LeavesAloneWhatGoesOn) {
  Work work;
  auto watched = work.watched();
  std::atomic<int> looks{0};
  watched.progress = [&] { return int64_t(++looks); };
  {
    Watchdog watchdog(std::move(watched), 0.008);
    watchdog.begin();
    while (looks < 100) std::this_thread::yield();  // some hundred pauses of a millisecond, many times the limit
    watchdog.end();
  }
  EXPECT_EQ(work.ended, 0);
}

}  // namespace
}  // namespace strata::watchdog_test
