// Measures how fast this machine computes, copies, stores and exchanges, and keeps it
// (rates_cache.h) in $XDG_CACHE_HOME/strata/rates.json or ~/.cache/strata/rates.json; deleting it measures again. Where
// there is no such file, what is measured once is kept as long as the cache object is.
#pragma once
#include <string>
#include <vector>

#include "engine/planning/rates.h"
#include "engine/planning/stalls.h"
#include "engine/runtime/exchange_times.h"
#include "engine/runtime/rates_cache.h"
#include "strata/mesh.h"

namespace strata {

// What is to be run, as far as its speed is concerned.
struct RatesWanted {
  int threads = 1, host_threads = 0;  // of the compute and host streams
  std::string backend = "cpu";
  int device = 0;                                  // its number, of an asynchronous backend
  std::vector<std::string> storage_directories{};  // of the NVMe tier; of what is missing the rates are assumed
  const Program* program = nullptr;                // whose kernels are measured; null: none
  Mesh mesh{};                                     // whose axes are exchanged over
  int ranks_here = 1;                              // ranks on this host, which compute at the same time
  std::string provider = "auto";                   // of the network
  bool has_ranks = false;                          // they run already, and measure their links themselves (keep_link)
  // They are threads of this process, which cannot be forked: what nobody knows is measured in it, and no more.
  bool is_one_process = false;
};

// Of the file that figures are kept in, if there is one.
RatesCache rates_cache();

// What is known, after measuring what is not known well enough: less than three seconds, of which a line on stderr
// tells. With an asynchronous backend the rates are its device's, or a data sheet's where there is none; what is
// assumed is named in the result.
Rates machine_rates(const RatesWanted& wanted, RatesCache& cache);

// Measured by the ranks themselves: of an axis with that many.
void keep_link(const RatesWanted& wanted, RatesCache& cache, int ranks, const Samples& samples);

// Corrects what is kept by a step that ran: what its ops took is one more try of each, which counts for what could not
// be measured before (a device's kernels), too; of figures what was faster than `rates`, which it was planned with. Of
// exchanges also how long they waited for ranks that came late, in that step or in those of the run.
void learn_rates(const RatesWanted& wanted, RatesCache& cache, const Program& program, const std::vector<Span>& spans,
                 const Rates& rates);
void learn_rates(const RatesWanted& wanted, RatesCache& cache, const Program& program, const std::vector<Span>& spans,
                 const Rates& rates, const ExchangeTimes& exchanges);

}  // namespace strata
