// Where figures measured on this machine are kept from run to run; deleting them is harmless.
#pragma once
#include <cstdlib>
#include <string>

namespace strata {

// $XDG_CACHE_HOME/strata/NAME, or ~/.cache/strata/NAME; empty where neither is set.
inline std::string cache_path(const std::string& name) {
  if (const char* folder = std::getenv("XDG_CACHE_HOME"); folder && *folder)
    return std::string(folder) + "/strata/" + name;
  if (const char* home = std::getenv("HOME"); home && *home) return std::string(home) + "/.cache/strata/" + name;
  return "";
}

}  // namespace strata
