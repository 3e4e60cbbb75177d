// A planned program as a graph in JSON, for programs that look for plans of their own and compare them with this one
// (tools/bench/checkmate): what each op reads and writes, and what that takes in bytes and predicted seconds.
#pragma once
#include <span>
#include <string>

#include "engine/planning/memory_plan.h"
#include "engine/planning/rates.h"

namespace strata {

struct NamedPlan {
  std::string name;
  const Program* program = nullptr;
  const MemoryPlan* memory = nullptr;
  const Rates* rates = nullptr;
};

// {"programs": [{"name", "device": {"persistent_bytes", "live_peak_bytes", "arena_bytes"}, "tensors", "ops"}]}, tensors
// and ops in the program's order. A tensor has a name, role, the bytes of its place and whether it is persistent. An op
// has kind, part, block, microbatch, stream, purpose, seconds (alone on its stream), workspace (bytes), inputs (tensors
// by number; -1: none), outputs, and in_place: pairs of an output and the tensor whose memory it takes over should that
// be dead behind the op.
std::string graph_json(std::span<const NamedPlan> plans);

}  // namespace strata
