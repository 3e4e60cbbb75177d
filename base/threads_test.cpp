// A team of threads that the system does not give ends with a message, and leaves no thread behind; one of thousands
// is no slower than one of dozens.
#include "strata/threads.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "strata/error.h"

namespace strata::threads_test {
namespace {

// What `work` throws in a process that has 256 MiB of addresses to go; "" when nothing.
std::string in_little_memory(const std::function<void()>& work) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlim_t bytes = rlim_t(pages * sysconf(_SC_PAGESIZE) + (256 << 20));
    const rlimit limit{bytes, bytes};
    setrlimit(RLIMIT_AS, &limit);
    std::string text;
    try {
      work();
    } catch (const Error& error) {
      text = error.what();
    }
    (void)!write(ends[1], text.data(), text.size());
    _exit(0);
  }
  close(ends[1]);
  std::string text(4096, 0);
  const ssize_t size = read(ends[0], text.data(), text.size());
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  text.resize(size_t(std::max<ssize_t>(0, size)));
  return text;
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they need more addresses than there are left
TEST(ThreadTeam, WhatTheSystemDoesNotGiveIsAMessage) {
  const std::string text = in_little_memory([] { Threads team(4096); });
  EXPECT_TRUE(text.starts_with("cannot start 4096 threads, only ")) << text;
  EXPECT_NE(text.find("Lower device.threads"), std::string::npos) << text;
  EXPECT_EQ(in_little_memory([] { Threads team(4); }), "");
  const std::string one = in_little_memory([] {
    std::vector<std::thread> threads;
    try {
      for (;;) threads.push_back(start_thread("a test", [] { pause(); }));
    } catch (const Error&) {
      for (std::thread& thread : threads) thread.detach();
      throw;
    }
  });
  EXPECT_TRUE(one.starts_with("cannot start a thread for a test: ")) << one;
}
#endif

// Each body is called once, however many there are, by no more threads than can do any good.
TEST(ThreadTeam, ThousandsAreCalledByFew) {
  constexpr int kCount = 4096;
  Threads team(kCount);
  EXPECT_EQ(team.count(), kCount);
  std::vector<int> called(kCount, 0);
  std::vector<std::thread::id> by(kCount);
  for (int loop = 0; loop < 20; ++loop)
    team.parallel([&](int thread) {
      ++called[size_t(thread)];
      by[size_t(thread)] = std::this_thread::get_id();
    });
  EXPECT_EQ(called, std::vector<int>(kCount, 20));
  std::sort(by.begin(), by.end());
  const auto threads = std::unique(by.begin(), by.end()) - by.begin();
  EXPECT_LE(threads, std::max<long>(64, std::thread::hardware_concurrency()));
  EXPECT_GT(threads, 1);
  try {
    team.parallel([](int thread) {
      if (thread == kCount - 1) throw Error("the last");
    });
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "the last");
  }
}

}  // namespace
}  // namespace strata::threads_test
