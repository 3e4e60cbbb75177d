// Fuzz target: TOML text and options never crash; what is wrong is an Error.
#include "engine/config/sections.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const std::string text(reinterpret_cast<const char*>(data), size);
    const size_t line = text.find('\n');  // the first line is an override
    std::vector<std::string> sets;
    if (line != std::string::npos) sets.push_back(text.substr(0, line));
    strata::read_sections(
        strata::Config::parse(text.substr(line == std::string::npos ? 0 : line + 1), "fuzz.toml", sets));
  } catch (const strata::Error&) {
  }
  return 0;
}
