// The thread team: a generation counter that workers spin on briefly and then sleep on (strata/threads.h).
#include "strata/threads.h"

#include <omp.h>

#include <exception>
#include <mutex>
#include <utility>

namespace strata {
namespace {

constexpr int kSpins = 4000;  // about 20 to 50 µs: longer than the gap between two loops of a step

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

  void call(int thread) {
    try {
      function(context, thread);
    } catch (...) {
      std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
    }
  }
};

Threads::Threads(int count) : state_(std::make_unique<State>()), count_(count < 1 ? 1 : count) {
  omp_set_num_threads(1);  // libraries called from a kernel run on the kernel's own thread
  for (int thread = 1; thread < count_; ++thread)
    state_->workers.emplace_back([this, thread] {
      omp_set_num_threads(1);
      uint32_t seen = 0;
      for (;;) {
        seen = await_change(state_->generation, seen);
        if (state_->stop) return;
        state_->call(thread);
        if (state_->left.fetch_sub(1, std::memory_order_acq_rel) == 1) state_->left.notify_one();
      }
    });
}

Threads::~Threads() {
  state_->stop = true;
  state_->generation.fetch_add(1, std::memory_order_release);
  state_->generation.notify_all();
  for (std::thread& worker : state_->workers) worker.join();
}

void Threads::run(Function function, void* context) {
  State& state = *state_;
  state.function = function;
  state.context = context;
  if (count_ > 1) {
    state.left.store(count_ - 1, std::memory_order_relaxed);
    state.generation.fetch_add(1, std::memory_order_release);
    state.generation.notify_all();
  }
  state.call(0);
  if (count_ > 1)
    for (int left = state.left.load(std::memory_order_acquire); left > 0;) left = await_change(state.left, left);
  if (state.error) std::rethrow_exception(std::exchange(state.error, nullptr));
}

}  // namespace strata
