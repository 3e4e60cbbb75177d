// Error feedback: what an exchange form leaves out of gradients in one step it adds in a later one, so what was summed
// over all steps, and what its states hold at the end, are together what the gradients were. Looked at in runs that add
// gradients up and change no parameter, so that those of one rank are the same.
#pragma once
#include <string>

#include "engine/verify/compare.h"

namespace strata::verifying {

// An optimizer that adds gradients up and leaves parameters as they are. It is no plugin that can be found before the
// first call of `register_sums`.
inline constexpr const char* kSumsPlugin = "verify_sums";
void register_sums();

// Of two outcomes of runs with that optimizer: the parameter whose gradients are least accounted for. `pattern`: names
// of the states that hold what has not crossed, of `ranks` ranks that split the batch. `bound`: how far sums may be
// off, as a part of a gradient's norm.
Difference balance(const Outcome& actual, const Outcome& expected, const std::string& pattern, int ranks, double bound);
// Of three such outcomes: the parameter whose sum lies least between those of fewer and of more steps, by how much
// longer the way from one to the other is that passes through it, as a part of the straight one.
Difference detour(const Outcome& actual, const Outcome& fewer, const Outcome& more);
// With error feedback: sums of a few steps in f32 are off by 1e-6 of what they add up; what is lost or counted twice is
// a part of a gradient.
inline constexpr double kBalanceBound = 1e-4;

}  // namespace strata::verifying
