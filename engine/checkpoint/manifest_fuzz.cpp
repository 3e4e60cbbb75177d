// Fuzz target: any manifest.json is refused with an Error or read; the tensor file beside it is always the same.
#include <unistd.h>

#include <cstdio>
#include <filesystem>

#include "engine/checkpoint/store.h"
#include "strata/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string folder = [] {
    const std::string path = "/tmp/strata-manifest-fuzz-" + std::to_string(getpid());
    std::filesystem::create_directory(path);
    const float value = 1;
    strata::write_safetensors(path + "/tensors-00000.safetensors", {{"w", strata::DType::f32, {1}, &value}}, {});
    return path;
  }();
  std::FILE* file = std::fopen((folder + "/manifest.json").c_str(), "wb");
  std::fwrite(data, 1, size, file);
  std::fclose(file);
  try {
    const strata::Checkpoint checkpoint(
        folder, strata::ManifestChecksum::ignore);  // or nothing but the checksum would be tested
    for (const auto& [name, entry] : checkpoint.tensors()) {
      float out[1];
      if (entry.shape == strata::Shape{1}) checkpoint.read(name, strata::DType::f32, {1}, out);
    }
  } catch (const strata::Error&) {
  }
  return 0;
}
