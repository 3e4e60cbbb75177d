// Cuts the updates of large tensors that rest on NVMe, and the moves around them, into slices of rows: while one slice
// is on its way to the disk the next is updated and the one after it read, so that a step does not end with a whole
// tensor's way there.
#pragma once
#include "engine/planning/memory_plan.h"

namespace strata {

// In a program whose moves have their places. Only updates that change each element by itself
// (is_elementwise_update) and casts of what they make. Slices are views of the same memory (Tensor::part_of), of
// whole blocks of the disk. A parameter has four, but more where one would be over a 64th of all parameters that are
// cut, and none has less than about so many `bytes`; parameters of less than two are not cut. Tensors live no longer
// than before, and results keep their bits. Returns how many updates were cut.
int slice_updates(Program& program, int64_t bytes);

}  // namespace strata
