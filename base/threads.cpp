// The thread team: a generation counter that workers spin on briefly and then sleep on (strata/threads.h). A team that
// is larger than any gain calls several bodies one after the other on each of the system's threads.
#include "strata/threads.h"

#include <omp.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <system_error>
#include <utility>

#include "strata/error.h"

namespace strata {
namespace {

constexpr int kSpins = 4000;  // about 20 to 50 µs: longer than the gap between two loops of a step

// The system's threads of a team of `count`. Each more than the processors costs every loop a change of threads; with
// thousands of them a step takes minutes.
int system_threads(int count) {
  constexpr int kEvenOnFewProcessors = 64;
  return std::min(count, std::max(kEvenOnFewProcessors, int(std::thread::hardware_concurrency())));
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Waits until `value` differs from `old`.
template <class T>
T await_change(const std::atomic<T>& value, T old) {
  for (int i = 0; i < kSpins; ++i) {
    if (const T now = value.load(std::memory_order_acquire); now != old) return now;
    pause();
  }
  for (;;) {
    if (const T now = value.load(std::memory_order_acquire); now != old) return now;
    value.wait(old, std::memory_order_acquire);
  }
}

}  // namespace

struct Threads::State {
  std::atomic<uint32_t> generation{0};
  std::atomic<int> left{0};
  Function function = nullptr;
  void* context = nullptr;
  bool stop = false;
  std::mutex error_mutex;
  std::exception_ptr error;
  std::vector<std::thread> workers;
  int count = 1, system = 1;  // bodies of a loop, and threads that call them, the caller's included

  // The bodies of one of the system's threads.
  void call(int first) {
    for (int thread = first; thread < count; thread += system) try {
        function(context, thread);
      } catch (...) {
        std::lock_guard lock(error_mutex);
        if (!error) error = std::current_exception();
      }
  }

  void work(int thread) {
    omp_set_num_threads(1);
    uint32_t seen = 0;
    for (;;) {
      seen = await_change(generation, seen);
      if (stop) return;
      call(thread);
      if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) left.notify_one();
    }
  }

  void end() {
    stop = true;
    generation.fetch_add(1, std::memory_order_release);
    generation.notify_all();
    for (std::thread& worker : workers) worker.join();
  }
};

std::thread start_thread(const std::string& purpose, std::function<void()> body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw Error("cannot start a thread for " + purpose + ": " + error.code().message() +
                    ". The system's limits of processes and memory (ulimit -u, ulimit -v, the container's) allow no "
                    "more.",
                ExitCode::failed);
  }
}

Threads::Threads(int count, Cut cut) : state_(std::make_unique<State>()), count_(count < 1 ? 1 : count), cut_(cut) {
  omp_set_num_threads(1);  // libraries called from a kernel run on the kernel's own thread
  state_->count = count_;
  state_->system = system_threads(count_);
  try {
    state_->workers.reserve(size_t(state_->system));
    for (int thread = 1; thread < state_->system; ++thread)
      state_->workers.emplace_back([state = state_.get(), thread] { state->work(thread); });
  } catch (const std::system_error& error) {
    const std::string started = std::to_string(state_->workers.size() + 1);
    state_->end();
    throw Error("cannot start " + std::to_string(count_) + " threads, only " + started + ": " + error.code().message() +
                ". Lower device.threads or host.threads, or raise the system's limits of processes and memory "
                "(ulimit -u, ulimit -v, the container's).");
  }
}

Threads::~Threads() { state_->end(); }

void Threads::run(Function function, void* context) {
  State& state = *state_;
  state.function = function;
  state.context = context;
  if (count_ > 1) {
    state.left.store(state.system - 1, std::memory_order_relaxed);
    state.generation.fetch_add(1, std::memory_order_release);
    state.generation.notify_all();
  }
  state.call(0);
  if (count_ > 1)
    for (int left = state.left.load(std::memory_order_acquire); left > 0;) left = await_change(state.left, left);
  if (state.error) std::rethrow_exception(std::exchange(state.error, nullptr));
}

}  // namespace strata
