// Ends what stands still: a thread that looks at a count of what has been done, and when that has not changed for too
// long calls for an end, with a text of where everything stands. For the executor's steps; knows nothing of ops.
#pragma once
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace strata {

class Watchdog {
 public:
  struct Watched {
    std::function<int64_t()> progress;              // grows with all that is done
    std::function<std::string()> where;             // where each stream stands, for the message
    std::function<void(const std::string&)> end;    // wakes all who wait; they are to fail with this text
    std::function<void(const std::string&)> leave;  // they did not: ends the process, and does not return (tests may)
  };
  // `seconds`: the longest time without progress; `grace`: from then on until all must have ended. The functions are
  // called between begin and end only, one at a time, on the watchdog's thread; progress by begin itself, too.
  Watchdog(Watched watched, double seconds, double grace = 60);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;

  void begin();  // a step begins: what progress says from now on is of it
  void end();    // … and is over

 private:
  void run();

  Watched watched_;
  double seconds_, grace_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool active_ = false, stop_ = false;
  int64_t step_ = 0, first_ = 0;  // … and how much was done when it began
  std::thread thread_;
};

}  // namespace strata
