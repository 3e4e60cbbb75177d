// The machine that the emulated CUDA runtime pretends to be, and what tests may do with it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

namespace strata::cuda {

struct Machine {
  int devices = 4, driver = 13000, major = 9, minor = 0;
  size_t memory = size_t{4} << 30;  // bytes of each device
  const char* name = "emulated H100";
  bool direct_storage = true;
};
// Read by every call; to be changed between runs only.
Machine& machine();

// Work in streams begins when somebody waits for it, and then in an order drawn at random among what may run: an order
// that events do not enforce is sooner or later another. Memory of devices cannot be touched by the host meanwhile.
void shuffle_streams(uint64_t seed);

// Graphs run since this was asked last.
int64_t graphs_run();

// Puts work into a stream as a kernel launch would; null: runs it now. `ready` says whether it may begin (for
// collectives, which wait for other streams); asked under the runtime's lock.
void enqueue(void* stream, std::function<void()> work, std::function<bool()> ready = {});
// For the emulated cuFile: copies and is done when it returns. CUDA's own cudaMemcpy is not: what it has staged may
// still be on its way, so the device does without it.
bool copy_now(void* to, const void* from, size_t bytes);
// Tells the runtime that an answer of `ready` may have changed.
void look_again();
// Changes under the runtime's lock what `ready` or work looks at, and tells.
void change(const std::function<void()>& how);

}  // namespace strata::cuda
