// What a run of a few steps leaves: losses and every parameter and state, whole, put together from all ranks. Ranks are
// threads of this process, or processes of their own; no checkpoint, no log, nothing is written but the NVMe tier's
// file and what processes hand over.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/world.h"
#include "engine/config/sections.h"
#include "strata/device.h"
#include "strata/tensor.h"

namespace strata::verifying {

// One run of several ranks, as each of its processes is told of it.
struct RankTask {
  std::string config;
  std::vector<std::string> sets;  // "key=value"
  int64_t steps = 0;
  double disturbance = 0;
  uint64_t which = 0;
  std::string result;  // the folder that each puts a file into
};

// A user asked to stop; no outcome of a run.
struct Interrupted {};

struct Setup {
  std::string config;             // file
  std::vector<std::string> sets;  // "key=value", of every run
  int64_t steps = 8;
  // A device for a rank, where not each opens its own: for tests.
  std::function<std::unique_ptr<Device>(const std::string& backend, int rank)> device{};
  // Ranks are processes: starts so many, of which each calls run_rank, and returns when all have ended. Throws
  // Interrupted where a signal ended them. Empty: ranks are threads.
  std::function<void(int ranks, const RankTask& task)> processes{};
};

// A parameter or a state, whole.
struct Whole {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  std::vector<std::byte> bytes;
  uint64_t digest = 0;  // of the bytes, which need not be kept
  bool agrees = true;   // between all ranks that hold the same part of it
};

// How the reason of a run begins that this machine has too little memory for, and what to do then.
inline constexpr const char* kNoRoom = "it needs ";
inline constexpr const char* kLess = "Verify on fewer layers with --layers, or with a smaller batch.";

struct Outcome {
  enum class End { done, refused, failed } end = End::done;
  std::string reason;  // of the other two
  int ranks = 1;
  std::vector<double> losses;  // by step
  std::vector<Whole> tensors;  // in the order of the program; ranks of a pipeline one after the other
  int64_t planned_bytes = 0, measured_bytes = 0;  // of rank 0's arenas in memory; measured on the host alone
  bool has_data = false;                          // of the configuration; otherwise tokens were made up
  const Whole* find(const std::string& name) const;
  void drop_bytes();  // digests stay
};

// A configuration that cannot be is `refused`, one that ends early `failed`. `disturbance`: every element of a
// parameter is at first multiplied by 1 plus or minus so much; `which` draws the signs.
Outcome run(const Setup& setup, const std::vector<std::string>& sets, int64_t steps, double disturbance = 0,
            uint64_t which = 0);

// This process is one rank of a run; `join` makes it one of the world. What it ended with is in its file; the exit code
// tells who waits for all whether it did.
int run_rank(const RankTask& task, int rank,
             const std::function<std::unique_ptr<World>(const NetworkSection& network)>& join);

}  // namespace strata::verifying
