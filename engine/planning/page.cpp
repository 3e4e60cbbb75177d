// temporary
#include "engine/planning/page.h"
namespace strata {
std::string memory_page(const std::string&, const std::string&, std::span<const PageRun>) { return ""; }
}  // namespace strata
