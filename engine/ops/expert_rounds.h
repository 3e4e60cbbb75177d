// Which rows of padded experts come in which round (expert_dispatch.cpp): plain data, for kernels of every backend.
#pragma once
#include <cstdint>

#include "strata/layout.h"
#include "strata/op_kind.h"

namespace strata {

// An expert has `room` rows in a round. As many rounds as attribute `together` says are filled row by row in turn, so
// that all are equally full; those after them take what comes on top.
struct ExpertRounds {
  int64_t room, together;
  ExpertRounds(const OpView& view, int64_t room) : room(room), together(view.attributes().integer("together", 1)) {}

  // The slot of an expert's row with that number.
  STRATA_EVERYWHERE int64_t slot(int64_t row, int64_t expert, int64_t experts) const {
    const int64_t all = room * together, rest = row % all;
    const int64_t round = row / all * together + rest % together;
    return (round * experts + expert) * room + rest / together;
  }
  // Rows that an expert has in the rounds before those that are filled together with this one.
  STRATA_EVERYWHERE int64_t before(int64_t round) const { return round / together * together * room; }
  // How many of an expert's `rows`, which are those of all rounds, are in this one.
  STRATA_EVERYWHERE int64_t filled(int64_t rows, int64_t round) const {
    const int64_t left = rows - before(round), all = room * together;
    const int64_t here = left < 0 ? 0 : left < all ? left : all;
    return (here + together - 1 - round % together) / together;
  }
};

}  // namespace strata
