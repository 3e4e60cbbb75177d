// Splits the forward program of one microbatch over axes of the mesh. Plugins say which named dimensions are split
// (NamedSplit); sharding rules (engine/program/sharding.h) say what follows for each op; where an op cannot take what
// it gets, an exchange is inserted. Partial sums wait through ops that are linear in them and are summed once. The
// backward pass is autodiff's: each op that is inserted has a gradient rule, which is its dual exchange.
#pragma once
#include <vector>

#include "strata/stages.h"

namespace strata {

// Afterwards `kept`, the losses and what is read after the step are whole; every other tensor of the program that was
// there before holds what it did, or this rank's part of it. A tensor that an op left as a partial sum keeps its name,
// once summed; the partial sum is a new one. Throws Error for what cannot be split so, naming tensor and axis.
void split_program(Program& program, const std::vector<NamedSplit>& splits, const std::vector<TensorId>& kept,
                   const Mesh& mesh);

}  // namespace strata
