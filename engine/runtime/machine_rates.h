// Measures how fast this machine computes, copies and stores, once, and keeps the figures in the user's cache folder.
#pragma once
#include <string>

#include "engine/planning/rates.h"

namespace strata {

// `storage_directory` is where the NVMe tier would be; empty or missing: storage rates stay at their defaults. With an
// asynchronous backend the rates are its device `index`'s, or a data sheet's where there is none. Figures are kept in
// $XDG_CACHE_HOME/strata/rates.json (or ~/.cache) by processor and threads, or device and boot, and disk; deleting it
// measures again. Takes about two seconds the first time. A cache that cannot be read or written is measured anew.
Rates machine_rates(int threads, const std::string& storage_directory, const std::string& backend = "cpu",
                    int index = 0);

}  // namespace strata
