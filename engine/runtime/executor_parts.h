// What an executor is made of: bound ops and the progress of streams. For executor_binding.cpp, which binds them,
// executor.cpp, which runs streams on threads, executor_device.cpp, which puts them into a device's queues, and
// executor_watch.cpp, which says where they are.
#pragma once
#include <array>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

#include "engine/planning/dependencies.h"
#include "engine/runtime/executor.h"

namespace strata {

struct Executor::Step {
  Launch launch;
  Launch odd;  // of every other step, where the op reads what is held of two steps; else none
  std::vector<Wait> waits;
  std::vector<TensorId> watched;
  Stream stream;
  int32_t position = 0;  // among the ops of its stream
  // Events of the device, each for every second step where steps overlap: recorded after this op (-1: nobody waits for
  // it), and timed ones around it, when spans are wanted.
  std::array<int, 2> event{-1, -1}, begun{-1, -1}, finished{-1, -1};
  volatile uint64_t* fault = nullptr;
  int segment = -1;     // of ops that this one begins
  bool inside = false;  // … or is in, further on
};

// Ops of the compute stream that become one graph: nothing waits for anything between them.
struct Executor::Segment {
  std::vector<int32_t> ops;
  int graph = -1;
};

// Progress of each stream, and the threads of the streams beside compute.
struct Executor::Streams {
  std::array<std::vector<int32_t>, kStreams> ops;
  int graph = -1;                                     // the whole step as a graph of the device, once there is one
  std::vector<Segment> segments;                      // of a program that waits for the host
  bool has_graph = false;                             // the program may become one
  std::array<int, 2> start{-1, -1};                   // event at the start of a step
  int64_t steps = 0;                                  // run so far
  std::array<std::atomic<int64_t>, kStreams> done{};  // ops of all steps; of a queue: put into it
  std::array<int64_t, kStreams> reached{};  // of a queue: ops known to be over, for the watchdog; only its thread's
  std::atomic<int64_t> begun{0};            // steps
  std::atomic<int64_t> started{0};
  std::atomic<int> running{0};
  std::atomic<bool> failed{false}, stop{false};
  std::atomic<int64_t> failed_in{INT64_MAX};  // the first step that no stream goes on with
  std::exception_ptr error;
  int64_t error_step = 0;
  std::mutex error_mutex;
  std::vector<std::thread> threads;
  Threads alone{1};  // a team of one has no state: the streams that move bytes share it
  std::unique_ptr<Threads> host;

  void end() {
    stop = true;
    ++started;
    started.notify_all();
    for (std::thread& thread : threads) thread.join();
  }

  // Ends a step, the one before runs to its end first: nothing of it waits for this one. 0: all that runs.
  void fail(std::exception_ptr what, int64_t step = 0) {
    {
      std::lock_guard lock(error_mutex);
      if (!error || (step > 0 && step < error_step)) error = what, error_step = step;
      failed_in = std::min(failed_in.load(), step);
    }
    failed = true;
    for (int s = 0; s < kStreams && step > 1; ++s) wait(s, int64_t(ops[s].size()) * (step - 1));
    for (int s = 0; s < kStreams; ++s) release(s);
  }
  // Wakes whoever waits for a stream that will not go on.
  void release(int stream) {
    done[stream] = INT64_MAX;
    done[stream].notify_all();
  }
  void wait(int stream, int64_t count) {
    for (int64_t now; (now = done[stream].load(std::memory_order_acquire)) < count;) done[stream].wait(now);
  }
};

}  // namespace strata
