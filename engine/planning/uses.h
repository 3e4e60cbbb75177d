// Where a program uses its tensors, found once for all plans that are made of it.
#pragma once
#include <cstdint>
#include <vector>

#include "strata/program.h"

namespace strata {

struct Uses {
  std::vector<std::vector<int32_t>> of;  // by tensor: ops, ascending; parts count for their whole
  // By op: counts stretches of one block, microbatch and pass; of one chunk instead where each has at most one block.
  std::vector<int32_t> visit;
  // The same, but what comes for the whole step amid such a stretch does not end it: gathers of parameters, of the next
  // bucket or of what other ranks share than what was gathered at its beginning, and exchanges of gradients.
  std::vector<int32_t> whole_visit;
  explicit Uses(const Program& program);
};

}  // namespace strata
