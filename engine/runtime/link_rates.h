// Measures exchanges between ranks over what will carry them.
#pragma once
#include <optional>
#include <string>

#include "engine/planning/rates.h"
#include "strata/communicator.h"

namespace strata {

// Seconds of each kind of exchange at several sizes, the slowest rank's, the best of a few tries; the same on all
// ranks, which all call it. Larger sizes are left out once one takes a tenth of a second. Under half a second where
// nothing is wrong.
Samples measure_link(Communicator& group);

// The same between processes of this host that are started for it, over libfabric's `provider` ("auto": shared memory).
// Nothing where that cannot be done, or takes longer than `seconds`.
std::optional<Samples> measure_link_apart(int ranks, const std::string& provider, double seconds);

// Kinds of exchanges whose samples measure_link gives: as the ops are called.
inline constexpr const char* kMeasuredExchanges[] = {"all_reduce", "reduce_scatter", "all_gather"};

}  // namespace strata
