// Writes residency decisions into a program. Knows where valid copies of each tensor are, op by op, and adds what
// brings a tensor where the next op needs it; decides nothing itself (residency.h).
#pragma once
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "engine/planning/uses.h"
#include "strata/op_kind.h"

namespace strata {

// What becomes of a tensor on the device on its way to a use: `form` is an index into Program::forms, or -1 to move
// the tensor itself to `tier`; with a form, `tier` is where that what it keeps goes.
struct Decision {
  // Whether it is given up again once it is back: never, where its next use is in another stretch of one block, or
  // after every use.
  enum class Again : uint8_t { never, in_other_blocks, always };
  int form = -1;
  Tier tier = Tier::device;
  Again again = Again::always;
};

// A tensor is given up after its last use before the op at `use` of the original program; kNever: no op there uses it
// again, but restoring others may.
inline constexpr int32_t kNever = INT32_MAX;
struct Gap {
  int32_t tensor = -1, use = -1;
  bool operator==(const Gap&) const = default;
};
struct GapHash {
  size_t operator()(const Gap& gap) const { return size_t(gap.tensor) * 0x9E3779B97F4A7C15ull + size_t(gap.use); }
};
using Decisions = std::unordered_map<Gap, Decision, GapHash>;

// A stretch of the new program in which a tensor waits in memory for its next use: what a decision could change.
struct Waiting {
  Gap gap;
  Tier tier;         // where it waits
  int32_t from, to;  // ops of the new program that use it before and after
};

struct Materialized {
  Program program;
  std::vector<Waiting> waiting;
};

// `staged`: nothing moves between device and NVMe but by way of host memory. Nothing where it would have more than
// `most` ops: what restores from what is restored can grow without bound.
std::optional<Materialized> materialize(const Program& program, const Decisions& decisions, const Uses& uses,
                                        bool staged, size_t most = SIZE_MAX);

}  // namespace strata
