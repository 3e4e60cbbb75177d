// The memory of a run: one arena, laid out by the plan of the training program. Other programs over the same
// persistent tensors (validation, generation) find those by name and borrow the transient region between steps.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "engine/planning/memory_plan.h"
#include "memory/arena.h"
#include "strata/threads.h"

namespace strata {

class Storage {
 public:
  // Persistent tensors live where `plan` says; the transient region holds `transient_bytes` (the most of all programs).
  Storage(const Program& program, const MemoryPlan& plan, int64_t transient_bytes);

  // Fills the persistent tensors from their initializers; normal values depend on seed and name only.
  void initialize(uint64_t seed, Threads& threads);

  void* persistent(std::string_view name) const;  // null when there is none
  const std::vector<Tensor>& persistent_tensors() const { return tensors_; }
  std::byte* transient() const { return arena_.base() + persistent_bytes_; }
  std::byte* base() const { return arena_.base(); }
  int64_t bytes() const { return arena_.bytes(); }
  int64_t persistent_bytes() const { return persistent_bytes_; }

 private:
  std::vector<Tensor> tensors_;
  std::map<std::string, int64_t, std::less<>> offsets_;
  int64_t persistent_bytes_;
  Arena arena_;
};

}  // namespace strata
