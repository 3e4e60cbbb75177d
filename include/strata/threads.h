// A fixed team of threads for the kernels of one stream. No allocation, no queue: one parallel loop at a time.
// Not a task scheduler: streams are the executor's business.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

namespace strata {

// A thread of its own for `body`, which must not throw. Throws Error (failed) that tells for what (`purpose`, "the
// stream read") where the system gives no more threads.
std::thread start_thread(const std::string& purpose, std::function<void()> body);

class Threads {
 public:
  // How kernels whose sums depend on where work is cut (matrix products) cut it: into a piece a thread, or into pieces
  // of a fixed size, so that results are the same for any number of threads.
  enum class Cut { by_threads, by_size };
  // `count` threads including the caller of parallel(). Each has oneDNN/OpenMP limited to itself. Throws Error (usage)
  // where the system does not give that many.
  explicit Threads(int count, Cut cut = Cut::by_threads);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int count() const { return count_; }
  Cut cut() const { return cut_; }

  // Calls body(thread) for thread 0..count-1 and waits: each on its own thread, but of a team of more than 64 and more
  // than the processors several on one, so bodies may not wait for each other. An exception thrown by a body is
  // rethrown here (the first one). Not reentrant.
  template <class Body>
  void parallel(Body&& body) {
    using Type = std::remove_reference_t<Body>;
    run([](void* context, int thread) { (*static_cast<Type*>(context))(thread); },
        const_cast<std::remove_const_t<Type>*>(&body));
  }

  // Splits [0, size) into contiguous ranges whose borders are multiples of `grain` and calls body(begin, end).
  // The split depends on size, grain and count() only.
  template <class Body>
  void split(int64_t size, int64_t grain, Body&& body) {
    const int64_t pieces = (size + grain - 1) / grain;
    if (pieces <= 1 || count_ == 1) {
      if (size > 0) body(int64_t{0}, size);
      return;
    }
    parallel([&](int thread) {
      const int64_t begin = pieces * thread / count_ * grain;
      int64_t end = pieces * (thread + 1) / count_ * grain;
      if (end > size) end = size;
      if (begin < end) body(begin, end);
    });
  }

  // Calls body(i) for i in [0, size): items are handed out one by one, for uneven work. Which thread runs which item
  // varies, so bodies must not depend on it.
  template <class Body>
  void each(int64_t size, Body&& body) {
    std::atomic<int64_t> next{0};
    parallel([&](int) {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < size;) body(i);
    });
  }

 private:
  using Function = void (*)(void*, int);
  void run(Function function, void* context);
  struct State;
  std::unique_ptr<State> state_;
  int count_;
  Cut cut_;
};

}  // namespace strata
