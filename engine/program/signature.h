// One number for all that shape, cost and kernel rules can see of an op, so that planning asks a rule once for ops that
// are the same for it: the copies of an op for many microbatches.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "strata/op_kind.h"

namespace strata {

// Of two ops, equal numbers mean equal kinds, attributes, addends, streams and tiers, and equal shapes, types, roles,
// layouts and places of their tensors (but for a chance of 2^-64). Names, ids, blocks and microbatches do not count.
uint64_t signature(const OpView& view);

// The ops of a program that a rule can tell apart, each with how often it is there, in the order of the first of them.
std::vector<std::pair<const Op*, int64_t>> distinct_ops(const Program& program);

}  // namespace strata
