// Curves of one run or several over each other, from their logs: one self-contained HTML page with loss, gradient norm,
// learning rate, tokens/s, memory and what compute waited for. Inline SVG and CSS; no scripts, nothing fetched.
#pragma once
#include <span>
#include <string>

#include "engine/runtime/run_history.h"

namespace strata {

enum class Along : uint8_t { steps, tokens, seconds };  // what the horizontal axis counts

// Where a curve has more points than the page has columns, its mean in each column is drawn, with the range of its
// values behind. At least one run.
std::string run_page(std::span<const RunHistory> runs, Along along);

}  // namespace strata
