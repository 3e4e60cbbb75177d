// What a schedule's passes are made of: which ops of the program of one microbatch belong to which pass, which passes
// need which, and whether an order keeps to that. Nothing here knows kinds of ops; it all follows from who reads what.
#pragma once
#include <array>
#include <span>
#include <string>
#include <vector>

#include "strata/stages.h"

namespace strata {

// The default order of the passes of a step.
std::vector<Pass> default_order(int microbatches, int chunks, bool backward);

// How many blocks the ops of a program name.
int blocks_of(const Program& program);

class PassTable {
 public:
  // Gives every op of `single` its chunk. `activation_gradients`: what flows from op to op in the backward pass; an op
  // on which none of them depends belongs to the weight gradients. Throws Error for chunks that are none.
  PassTable(Program& single, const std::vector<TensorId>& activation_gradients, const std::vector<int>& chunks);

  // The ops of a pass, in program order.
  std::span<const int32_t> ops(const Pass& pass) const { return list(pass.part, pass.chunk); }
  // Whether the op that makes a gradient belongs to the pass; what no backward op makes belongs to the weight gradients
  // of chunk 0.
  bool makes(const Pass& pass, TensorId tensor) const;
  // Throws Error unless each pass runs once, all of its microbatch that it needs having run before: in this step, or,
  // but in the first, in the one before, if this step leaves the same to the next.
  void check(const ScheduleStage& schedule) const;
  // The passes, undivided ones, that an order leaves to the next step, by microbatch.
  std::vector<Pass> left(const ScheduleStage& schedule) const;

 private:
  // A pass that cannot be divided: forward, input_gradient or weight_gradient of a chunk.
  static constexpr int kParts = 3;
  int unit(Pass::Part part, int chunk) const {
    return chunk * kParts + (part == Pass::Part::forward ? 0 : part == Pass::Part::input_gradient ? 1 : 2);
  }
  std::vector<int> units(const Pass& pass) const;
  Pass pass_of(int unit, int microbatch) const;
  const std::vector<int32_t>& list(Pass::Part part, int chunk) const { return ops_[size_t(chunk)][size_t(part)]; }
  void require_pass(const Pass& pass, const ScheduleStage& schedule, const std::string& where) const;
  void check_sent_later(const ScheduleStage& schedule) const;
  // By microbatch and unit: those that have ops and do not run in the step that their microbatch begins in.
  std::vector<std::vector<char>> left_units(const ScheduleStage& schedule) const;
  void find_needs(const Program& single);

  int chunks_ = 1;
  std::vector<std::array<std::vector<int32_t>, 4>> ops_;  // by chunk and part
  std::vector<int> unit_of_;                              // by op
  std::vector<int> maker_;                                // by tensor: the unit that makes it, or -1
  std::vector<std::vector<char>> needs_;                  // by unit, and unit that it needs
};

}  // namespace strata
