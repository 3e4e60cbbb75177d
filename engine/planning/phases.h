// The programs of a run: which phases plugins declare, which combinations of them steps can be in, and what all their
// programs have in common, the persistent tensors. Plans nothing itself (runtime/session.h does).
#pragma once
#include <span>
#include <string>
#include <vector>

#include "engine/plugin/order.h"
#include "strata/phases.h"
#include "strata/program.h"

namespace strata {

// By step, which program runs. Programs are counted from 0 in the order of the first steps that run them.
class PhaseTable {
 public:
  PhaseTable() = default;  // no phases: one program
  // Asks the plugins. Throws Error, with the plugin's name where it is one's: for declarations that are none, for
  // phases that together repeat only after more than kLongest steps, and for more than kMost programs.
  explicit PhaseTable(std::span<const NamedPlugin> plugins);
  static constexpr int64_t kLongest = 1'000'000;
  static constexpr size_t kMost = 16;

  size_t programs() const { return std::max<size_t>(1, combinations_.size()); }
  Phases of_program(size_t program) const;
  size_t of_step(int64_t step) const;  // the program of a step, which counts from 1
  // For programs that are in no phase.
  Phases none() const;
  // One line a phase, for people and for ranks to compare: `phase "warm-up" (of plugin "x"): steps 1 to 9`.
  std::string text() const;

 private:
  std::vector<char> at(int64_t step) const;  // by phase
  Phases phases(const std::vector<char>& holds) const;
  void find_combinations();

  std::vector<PhaseStage::Declared> declared_;
  std::vector<std::vector<char>> combinations_;  // by program and phase
  bool first_step_alone_ = false;                // has a program of its own
};

// One of the programs over the same persistent tensors.
struct SharingProgram {
  std::string name;  // for messages
  Program* program;
};

// Gives every program the persistent tensors of all of them, so that each plans memory for all, and a tensor has one
// place whatever runs. Throws Error where two programs have different tensors under one name.
void share_persistent(std::span<const SharingProgram> programs);

}  // namespace strata
