// Fuzz target: any model.safetensors.index.json is refused with an Error or names plain files of the folder.
#include <string>

#include "engine/checkpoint/external_folder.h"
#include "strata/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const std::string text(reinterpret_cast<const char*>(data), size);
    for (const auto& [tensor, file] : strata::read_safetensors_index(text, "index"))
      if (file.empty() || file == ".." || file.find('/') != std::string::npos) __builtin_trap();
  } catch (const strata::Error&) {
  }
  return 0;
}
