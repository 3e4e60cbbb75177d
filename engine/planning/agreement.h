// What the ranks of a job exchange in a step, checked before the first one: every member of a group makes the same
// exchanges in the same order, and the steps of all ranks, run together, come to an end. Ranks whose programs differ
// (the stages of a pipeline) are safe by this alone.
#pragma once
#include <array>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "engine/planning/dependencies.h"
#include "strata/mesh.h"

namespace strata {

// One exchange of one rank's step.
struct ExchangeStep {
  std::string what;  // kind, attributes, types, whole shapes and layouts: the same for all members
  std::string axis;  // of the mesh, whose group through this rank exchanges
  Stream stream;
  // By stream: how many of its exchanges have ended before this one can begin. Of its own stream: all before it.
  std::array<int32_t, kStreams> after{};
  // Of a send or receive: how many coordinates on along the axis the other one is.
  int offset = 0;
};

// The exchanges of a planned program in its order. `waits` are those of plan_waits; streams for
// which `queued` says yes are filled by one thread in the order of the program, as in require_progress.
std::vector<ExchangeStep> exchanges_of(const Program& program, const Waits& waits,
                                       const std::function<bool(Stream)>& queued);

// What one rank brings to the check.
struct RankExchanges {
  Mesh mesh;
  std::vector<ExchangeStep> steps;
};

// Throws Error (failed) unless the ranks of a job (by rank; all of them) agree: the n-th exchange of a group on a
// stream is the same for all its members, each send meets its receive, and, with exchanges that begin only when every
// member has come to them, each rank gets to its end. The message names the ranks and the exchanges at which they
// stand.
void require_agreement(std::span<const RankExchanges> ranks);

// As one line of text without line breaks, and back. Throws Error for what `text_of` does not write.
std::string text_of(const std::vector<ExchangeStep>& steps);
std::vector<ExchangeStep> exchanges_from(const std::string& text);

}  // namespace strata
