// Fuzz target: a safetensors file with any header is read inside its bounds or refused.
#include <unistd.h>

#include <cstdio>

#include "engine/checkpoint/safetensors.h"
#include "strata/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string path = "/tmp/strata-safetensors-fuzz-" + std::to_string(getpid());
  std::FILE* file = std::fopen(path.c_str(), "wb");
  // The header's length is put in front, so that the fuzzer need not find it.
  const uint64_t header = size > 1 ? (uint64_t(data[0]) << 8 | data[1]) % (size - 1) : 0;
  std::fwrite(&header, 8, 1, file);
  if (size > 2) std::fwrite(data + 2, 1, size - 2, file);
  std::fclose(file);
  try {
    const strata::SafetensorsFile tensors(path);
    volatile unsigned sum = 0;
    for (const auto& [name, tensor] : tensors.tensors())
      for (std::byte byte : tensors.read(tensor)) sum = sum + unsigned(byte);
  } catch (const strata::Error&) {
  }
  return 0;
}
