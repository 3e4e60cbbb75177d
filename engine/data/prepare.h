// Text files to token files with a train and validation split: `strata data prepare`.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace strata {

struct PrepareArguments {
  std::vector<std::string> inputs;  // UTF-8 text; "-" is standard input
  std::string output_directory;
  std::string tokenizer = "bytes";  // or a .model file, or "train:SIZE"
  double validation_fraction = 0.05;
  int64_t shard_tokens = 100'000'000;
};

struct PrepareResult {
  std::vector<std::string> files;
  int64_t train_tokens = 0, validation_tokens = 0, text_bytes = 0, vocabulary = 0;
};

// Streams: memory stays bounded. The last `validation_fraction` of each input is validation. Files appear whole or not
// at all. Throws Error for missing or empty input.
PrepareResult prepare(const PrepareArguments& arguments);

}  // namespace strata
