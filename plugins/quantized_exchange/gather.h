// Parameters that cross as codes (ZeRO++'s qwZ, arXiv 2306.10209): gathers of what ranks hold shares of, put in the
// place of those that a program has. Which parameters are shared, and when they are gathered, is somebody else's
// matter.
#pragma once
#include <cstdint>
#include <string>

#include "strata/stages.h"

namespace strata::quantized {

// Registers "quantized_gather" and "quantized_gather_rows": as the engine's all_gather and gather_rows of shares of
// rows, but what comes together is codes, and all ranks read all of them, also their own. And "quantized_rows", which
// makes of whole tensors what they would be, had they been gathered so, in a step whose scalar is 1.
void register_gathers();

struct GatheredAs {
  std::string format;    // of codes.h
  int64_t minimum;       // parameters of fewer elements come together as they are
  bool gathers = false;  // whether any comes together at all
  bool any = false;      // whether any crosses as codes now
  bool loaded = false;   // whether there is a scalar kLoadedScalar
};
// 1 in the first step of a process, in which parameters are what a checkpoint's masters or first values make them.
inline constexpr const char* kLoadedScalar = "quantized_exchange.loaded";

// Replaces each gather of parameters over an axis that splits the batch, in the list of ops and in resting forms.
// Throws Error where what crosses would be no less, or where a parameter has no master to go on from.
void gather_as_codes(ProgramStage& stage, GatheredAs& as);

}  // namespace strata::quantized
