// Runs kernels on the host, for tests on machines without a GPU: each block's threads are fibers that take turns at
// barriers and shuffles. Checks what kernels compute, not how fast, and not what a GPU's memory model allows beyond it.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cuda/emulated/machine.h"
#include "strata/convert.h"

#define STRATA_KERNEL inline void
#define STRATA_DEVICE inline
#define __shared__ static
#define __restrict__
#define __launch_bounds__(...)

// Puts the registers that a call must keep on the stack, notes where, and goes on with another stack (x86-64). As
// swapcontext, without its two system calls.
extern "C" void strata_switch(void** from, void* to);
asm(R"(
.weak strata_switch
.type strata_switch, @function
strata_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size strata_switch, .-strata_switch
)");

namespace strata::cuda {

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  dim3() = default;
};

// One block at a time; threads in one dimension.
class Emulator {
 public:
  static Emulator& get() { return emulator_; }
  void run(dim3 grid, int block, int shared, const std::function<void()>& kernel) {
    grid_size = grid, block_size = dim3(unsigned(block));
    shared_.assign(size_t(shared) + 2 * kSharedAlignment, std::byte{0xFF});
    kernel_ = &kernel;
    // The last block first: a GPU promises no order, and whoever relies on one gets this.
    for (unsigned z = grid.z; z-- > 0;)
      for (unsigned y = grid.y; y-- > 0;)
        for (unsigned x = grid.x; x-- > 0;) {
          block_index = dim3(x, y, z);
          run_block(block);
        }
  }
  // At a multiple of 128, not of 1024, as on a GPU where a block has static shared memory, too.
  void* shared() {
    const uintptr_t first = reinterpret_cast<uintptr_t>(shared_.data()) + kSharedAlignment - 1;
    return reinterpret_cast<void*>(first / kSharedAlignment * kSharedAlignment + 128);
  }
  // Waits until every thread of the block, or of the warp, that has not ended is here.
  void block_barrier() { wait(block_); }
  void warp_barrier() { wait(warps_[size_t(thread_index.x / 32)]); }
  // What each lane of this warp gave, by lane; there until the next but one call.
  template <class T>
  const T* publish(const T& value) {
    static_assert(sizeof(T) <= kPublished);
    auto& area = published_[parity_[thread_index.x] ^= 1];
    T* const of_warp = reinterpret_cast<T*>(area.data() + thread_index.x / 32 * 32 * kPublished);
    of_warp[thread_index.x % 32] = value;
    warp_barrier();
    return of_warp;
  }
  // What lane `from` of this warp gave.
  template <class T>
  T exchange(T value, unsigned from) {
    static_assert(sizeof(T) <= 8);
    auto& slots = slots_[parity_[thread_index.x] ^= 1];
    std::memcpy(&slots[thread_index.x], &value, sizeof value);
    warp_barrier();
    T result;
    std::memcpy(&result, &slots[thread_index.x / 32 * 32 + from % 32], sizeof result);
    return result;
  }

  // Copies that go on beside the thread. The place has something else in it from the beginning of one until the thread
  // waits for its group: who reads it too early, or is still reading what was there, sees that. From null: zeros.
  void copy_async(void* to, const void* from, int bytes) {
    std::memset(to, 0xFF, size_t(bytes));
    auto& mine = copies_[thread_index.x];
    mine.list.push_back({to, from, bytes, mine.groups});
  }
  void commit_copies() { ++copies_[thread_index.x].groups; }
  // Until at most the last `left` groups of this thread are under way.
  void wait_copies(int left) {
    auto& mine = copies_[thread_index.x];
    size_t done = 0;
    for (; done < mine.list.size() && mine.list[done].group < mine.groups - left; ++done) {
      const Copy& c = mine.list[done];
      if (c.from)
        std::memcpy(c.to, c.from, size_t(c.bytes));
      else
        std::memset(c.to, 0, size_t(c.bytes));
    }
    mine.list.erase(mine.list.begin(), mine.list.begin() + std::ptrdiff_t(done));
  }

  dim3 thread_index, block_index, block_size, grid_size;

 private:
  struct Copy {
    void* to;
    const void* from;
    int bytes, group;
  };
  struct Copies {
    std::vector<Copy> list;
    int groups = 0;
  };
  struct Barrier {
    int arrived = 0, live = 0;  // threads that are here, and that have not ended
    int64_t generation = 0;
    void release_if_all() {
      if (arrived < live || arrived == 0) return;
      arrived = 0;
      ++generation;
    }
  };
  struct Fiber {
    std::byte* stack;    // below it a page that cannot be touched: a kernel that needs more ends there, not in the heap
    void* at = nullptr;  // where it stopped
    bool done = false;
    const Barrier* waits = nullptr;  // until its generation is another than that
    int64_t generation = 0;
    size_t number;  // among the block's threads
    explicit Fiber(size_t number) : number(number) {
      void* const memory = mmap(nullptr, kPage + kStack, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
      if (memory == MAP_FAILED) throw std::bad_alloc();
      stack = static_cast<std::byte*>(memory) + kPage;
      if (mprotect(memory, kPage, PROT_NONE) != 0) throw std::bad_alloc();
    }
    ~Fiber() { munmap(stack - kPage, kPage + kStack); }
    Fiber(const Fiber&) = delete;
    // The first switch "returns" into entry, with the stack as a call leaves it. Stacks begin at different places
    // within a page: at the same one, those of a warp would share a few sets of the processor's cache.
    void start(void (*entry)()) {
      done = false, waits = nullptr;
      const auto end = reinterpret_cast<uintptr_t>(stack) + kStack - number * 320 % kPage;
      auto* top = reinterpret_cast<void**>(end / 16 * 16);
      *(top - 1) = nullptr;
      *(top - 2) = reinterpret_cast<void*>(entry);
      at = top - 8;
    }
  };
  static constexpr size_t kPage = 4096, kStack = 256 << 10, kSharedAlignment = 1024;

  void wait(Barrier& barrier) {
    Fiber& me = *fibers_[thread_index.x];
    ++barrier.arrived;
    me.waits = &barrier, me.generation = barrier.generation;
    barrier.release_if_all();
    if (barrier.generation != me.generation) return;
    strata_switch(&me.at, next());
  }
  // Where the next thread that may go on has stopped, which is the thread from now on; main_ where there is none.
  void* next() {
    for (unsigned n = 0, t = thread_index.x; n < block_size.x; ++n) {
      t = t + 1 < block_size.x ? t + 1 : 0;
      const Fiber& fiber = *fibers_[t];
      if (fiber.done || (fiber.waits && fiber.waits->generation == fiber.generation)) continue;
      thread_index = dim3(t);
      return fiber.at;
    }
    return main_;
  }
  static void entry() {
    Emulator& e = get();
    (*e.kernel_)();
    const unsigned t = e.thread_index.x;
    e.fibers_[t]->done = true;
    for (Barrier* barrier : {&e.block_, &e.warps_[t / 32]}) {
      --barrier->live;
      barrier->release_if_all();
    }
    strata_switch(&e.fibers_[t]->at, e.next());
  }
  void run_block(int block) {
    while (int(fibers_.size()) < block) fibers_.push_back(std::make_unique<Fiber>(fibers_.size()));
    block_ = {.live = block};
    warps_.assign(size_t(block + 31) / 32, {});
    parity_.assign(size_t(block), 0);
    copies_.assign(size_t(block), {});
    for (auto& area : published_) area.resize(size_t(block + 31) / 32 * 32 * kPublished);
    for (auto& slots : slots_) slots.assign(size_t(block + 31) / 32 * 32, 0);
    for (int t = 0; t < block; ++t) {
      ++warps_[size_t(t / 32)].live;
      fibers_[size_t(t)]->start(entry);
    }
    thread_index = dim3(unsigned(block) - 1);
    strata_switch(&main_, next());
    if (block_.live > 0) throw std::logic_error("a kernel's threads wait for each other for ever");
  }

  const std::function<void()>* kernel_ = nullptr;
  void* main_ = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<std::byte> shared_;
  Barrier block_;
  std::vector<Barrier> warps_;
  std::vector<int> parity_;
  std::vector<Copies> copies_;
  std::vector<uint64_t> slots_[2];
  static constexpr size_t kPublished = 64;
  std::vector<std::byte> published_[2];
  static Emulator emulator_;
};
inline constinit Emulator Emulator::emulator_;  // no question at each use whether it has been made

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, int block, int shared, void* queue, Arguments... arguments) {
  enqueue(queue, [=] { Emulator::get().run(grid, block, shared, [=] { kernel(Parameters(arguments)...); }); });
}

inline int multiprocessors() { return 4; }

template <class T>
T* dynamic_shared() {
  return static_cast<T*>(Emulator::get().shared());
}

inline void __syncthreads() { Emulator::get().block_barrier(); }
inline void __syncwarp() { Emulator::get().warp_barrier(); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return Emulator::get().exchange(value, Emulator::get().thread_index.x ^ unsigned(mask));
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return Emulator::get().exchange(value, unsigned(lane));
}
inline unsigned __ballot_sync(unsigned, bool bit) {
  const int* const of_lanes = Emulator::get().publish(int(bit));
  unsigned bits = 0;
  const unsigned lanes = Emulator::get().block_size.x - Emulator::get().thread_index.x / 32 * 32;
  for (unsigned lane = 0; lane < std::min(32u, lanes); ++lane) bits |= unsigned(of_lanes[lane]) << lane;
  return bits;
}
inline unsigned atomicAdd(unsigned* to, unsigned x) { return std::exchange(*to, *to + x); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs(int(bits)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline float __expf(float x) { return std::exp(x); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float exp2f(float x) { return std::exp2(x); }
inline void sincosf(float x, float* sine, float* cosine) { *sine = std::sin(x), *cosine = std::cos(x); }
using std::fabs;
using std::floor;
using std::log;
using std::max;
using std::min;
using std::pow;
using std::sqrt;

}  // namespace strata::cuda

#define threadIdx (::strata::cuda::Emulator::get().thread_index)
#define blockIdx (::strata::cuda::Emulator::get().block_index)
#define blockDim (::strata::cuda::Emulator::get().block_size)
#define gridDim (::strata::cuda::Emulator::get().grid_size)
