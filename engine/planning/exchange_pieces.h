// Lets exchanges between ranks that share the work of each op (Stream::model_exchange) run behind compute. What an
// exchange waits for comes early, and where that leaves nothing to hide behind, a product and the exchange that takes
// or hands it its tokens are cut in pieces along them: while a piece is exchanged, the product of the next runs.
#pragma once
#include <functional>
#include <string>
#include <string_view>

#include "engine/planning/memory_plan.h"
#include "engine/planning/rates.h"
#include "strata/mesh.h"

namespace strata {

// Plugins set this attribute of an exchange in stage placement, where it may be cut: into so many pieces, or (0) as it
// is predicted to be fastest. An op that is a piece says of how many; every other such exchange 1.
inline constexpr std::string_view kPieces = "pieces";

// In the backward pass of one step, products whose results are summed over ranks, or that read what was gathered, come
// before the weight gradients beside them, which hide the exchange. Only the order changes: results keep their bits.
void begin_exchanges_early(Program& program);

// Cuts the exchanges with that attribute, and for each one product that makes what is exchanged or reads it, as far as
// they have as many pieces: views of the same memory (Tensor::part_of) along the first dimension of several elements.
// Sums that are cut stay sums of the same numbers; the rows of a product are those of the product of all.
// With a mesh, pieces begin at multiples of kAlignment on all of its ranks. Returns how many exchanges were cut.
int cut_exchanges(Program& program, int pieces, const Mesh* aligned_on);

struct CutSettings {
  std::string backend = "cpu";
  int threads = 1;
  Rates rates{};
  const Mesh* mesh = nullptr;
  std::function<bool(const MemoryPlan&)> fits{};  // in the budgets
};

// Decides for a program after residency, of whose exchanges some may be cut, into how many pieces; returns the memory
// plan of what it becomes. Throws Error where a number of pieces was asked for and nothing can be cut so.
MemoryPlan plan_pieces(Program& program, MemoryPlan plan, const CutSettings& settings);

// "24 of 30 in 2 pieces each", or "whole": what was decided; empty where there was nothing to decide.
std::string pieces_text(const Program& program);

}  // namespace strata
