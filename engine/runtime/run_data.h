// The data of a run, as its configuration says: which samples a step trains on, and how much each of its targets
// counts.
#pragma once
#include <cstdint>
#include <string>

#include "engine/data/mixture.h"
#include "engine/runtime/feed.h"
#include "engine/runtime/session.h"
#include "strata/plugin.h"

namespace strata {

class RunData {
 public:
  // Of training or of validation. Throws Error as Mixture does, and where there are loss masks and the program does not
  // know of them. `session` must outlive it.
  RunData(const Session& session, Goal goal, int64_t vocabulary);

  // Puts this rank's part of the step that begins with sample `samples` into the program, and says how much each target
  // weighs: all of the step's that count, of whatever microbatch and rank, weigh the same, and together 1. Where none
  // counts, the step's loss and gradients are 0.
  void load(int64_t samples, Feed& feed, StepContext& step) const;

  const Mixture& mixture() const { return mixture_; }
  // Sets run.steps of a session whose run is by epochs.
  void set_steps(Session& session) const;
  // What is there, and how often `steps` steps go through it.
  std::string describe(int64_t steps) const;

 private:
  const Session& session_;
  BatchShape batch_;
  Mixture mixture_;
};

}  // namespace strata
