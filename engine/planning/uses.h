// Where a program uses its tensors, and what restores them, found once for all plans that are made of it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "strata/program.h"

namespace strata {

// A tensor on its way to the op at `use`; kNever: no op uses it again, but restoring others may.
inline constexpr int32_t kNever = INT32_MAX;
struct Gap {
  int32_t tensor = -1, use = -1;
  bool operator==(const Gap&) const = default;
};

struct Uses {
  std::vector<std::vector<int32_t>> of;  // by tensor: ops, ascending; parts count for their whole
  // By op: counts stretches of one block, microbatch and pass; of one chunk instead where each has at most one block.
  std::vector<int32_t> visit;
  // The same, but what comes for the whole step amid such a stretch does not end it: gathers of parameters, of the next
  // bucket or of what other ranks share than what was gathered at its beginning, and exchanges of gradients.
  std::vector<int32_t> whole_visit;
  // By tensor: its forms, empty where it has none, and the tensors whose forms restore from it.
  std::vector<SharedVector<RestingForm>> forms;
  std::vector<std::vector<TensorId>> restores;
  bool inverts = false;  // some form restores from what comes after its tensor
  explicit Uses(const Program& program);

  // Gaps are numbered: those of a tensor follow each other, that before its first use first and that after its last
  // one last.
  size_t gaps() const { return first_.back(); }
  size_t first_gap(int32_t tensor) const { return first_[size_t(tensor)]; }
  // The next gap of the tensor for an op at `position`.
  size_t number(Gap gap) const {
    const std::vector<int32_t>& uses = of[size_t(gap.tensor)];
    return first_gap(gap.tensor) + size_t(std::lower_bound(uses.begin(), uses.end(), gap.use) - uses.begin());
  }

 private:
  std::vector<size_t> first_{0};  // by tensor: the number of its first gap
};

}  // namespace strata
