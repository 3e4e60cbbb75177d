// The last step of planning: every rank plans as rank 0 of the mesh, so that all have the same program and the same
// places in memory; then each makes the program its own.
#pragma once
#include "strata/mesh.h"
#include "strata/program.h"

namespace strata {

// Shapes and places of split tensors become those of the mesh's rank, and microbatches count over all ranks.
// `microbatches` are those of one rank.
void localize(Program& program, const Mesh& mesh, int64_t microbatches);

}  // namespace strata
