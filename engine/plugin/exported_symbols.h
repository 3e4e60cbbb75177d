// Names that a shared library exports, read from the file without loading it, so that no code of it runs.
// For 64-bit little-endian ELF; Boost.DLL's library_info reads the table that `strip` removes, so it cannot be used.
#pragma once
#include <string>
#include <vector>

namespace strata {

// Throws Error when the file cannot be read or is not a shared library. Never reads outside of the file, whatever its
// headers say.
std::vector<std::string> exported_symbols(const std::string& path);

}  // namespace strata
