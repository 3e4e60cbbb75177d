// Generation with a cache: a program for the logits of whole sequences becomes one that goes on with them by some next
// tokens. Kinds that look at other tokens, or at positions, are replaced by ones that do the same from a position on;
// what the program computes else is by token, and only its shapes change. Knows kinds, and no model.
#pragma once
#include <cstdint>

#include "engine/planning/build.h"

namespace strata {

inline constexpr const char* kPosition = "position@0";  // data i32 (sequences): where the next tokens begin

// What a program that goes on is for: caches to be filled from a prompt, or the logits of what comes next.
enum class Goes { to_fill, for_logits };

// `built` is of Goal::logits on one rank; it takes `tokens` tokens of each of its sequences afterwards. Keys and values
// of all positions of a sequence become persistent tensors, the same in all programs made of one. Throws Error with the
// kind of an op that looks at other tokens and has no such counterpart.
void go_on(BuiltProgram& built, int64_t tokens, Goes goes);

}  // namespace strata
