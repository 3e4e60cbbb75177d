// See watchdog.h.
#include "engine/runtime/watchdog.h"

#include <algorithm>
#include <chrono>

#include "strata/threads.h"

namespace strata {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

Watchdog::Watchdog(Watched watched, double seconds, double grace)
    : watched_(std::move(watched)),
      seconds_(seconds),
      grace_(grace),
      thread_(start_thread("the watchdog", [this] { run(); })) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Watchdog::begin() {
  {
    const std::lock_guard lock(mutex_);
    first_ = watched_.progress();
    active_ = true;
    ++step_;
  }
  changed_.notify_all();
}

void Watchdog::end() {
  const std::lock_guard lock(mutex_);
  active_ = false;  // the thread finds out when it looks next
}

void Watchdog::run() {
  const auto pause = Seconds(std::clamp(seconds_ / 8, 0.001, 1.0));
  std::unique_lock lock(mutex_);
  int64_t step = -1, seen = 0;
  auto since = Clock::now();
  bool ended = false;
  std::string where;
  while (!stop_) {
    if (!active_) {
      changed_.wait(lock, [&] { return stop_ || active_; });
      continue;
    }
    const bool is_new = step != step_;
    const int64_t done = is_new ? first_ : watched_.progress();
    const auto now = Clock::now();
    if (is_new || (!ended && done != seen)) {
      step = step_, seen = done, ended = false;
      since = now;
    }
    const double still = Seconds(now - since).count();
    if (still > (ended ? grace_ : seconds_)) {
      if (ended) {
        watched_.leave(where);
      } else {
        where = watched_.where();
        watched_.end(where);
      }
      ended = true;
      since = Clock::now();
    }
    changed_.wait_for(lock, pause, [&] { return stop_ || step != step_; });
  }
}

}  // namespace strata
