// Fuzz target: any config.json is refused with an Error, of another architecture, or gives sizes that can be built.
#include <string>

#include "plugins/gpt/external.h"
#include "strata/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const auto config = gpt_from_external(std::string(reinterpret_cast<const char*>(data), size));
    if (!config) return 0;
    if (config->layers < 1 || config->heads < 1 || config->hidden < 1 || config->vocabulary < 1) __builtin_trap();
    gpt_to_toml(*config);
  } catch (const strata::Error&) {
  }
  return 0;
}
