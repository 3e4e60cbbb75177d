// An adapter of LoRA: what stands beside one weight of the model.
#pragma once
#include <string>
#include <vector>

#include "plugins/lora/matrix.h"
#include "strata/plugin.h"

namespace strata::lora {

struct Adapter {
  std::string weight;  // the model's parameter, (out, in)
  std::string a, b;    // the adapter's: (r · adapted matrices, in) and (adapted rows, r)
  int64_t out = 0, in = 0, rank = 0;
  Rows rows;
};

struct Settings {
  int64_t rank = 8;
  double alpha = 16, dropout = 0;
  double scale() const { return alpha / double(rank); }
};

// PEFT's files (github.com/huggingface/peft): which of their tensors is what, given the model's mapping to the files of
// transformers, and adapter_config.json. Throws Error where a tensor there is of several of an adapter's matrices.
ExternalAddition peft_files(const std::vector<Adapter>& adapters, const std::vector<ExternalTensor>& model,
                            const Settings& settings);
// Throws Error unless an adapter_config.json (`where` begins the message) says what is meant by `settings`.
void check_peft_config(std::string_view json, const std::string& where, const Settings& settings);

}  // namespace strata::lora
