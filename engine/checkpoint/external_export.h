// From a model's parameters to the safetensors files of a Hugging Face folder: one file, or shards with an index as
// transformers writes them. A tensor at a time: besides the parameters that it is made of, little is held.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "strata/plugin.h"

namespace strata {

struct ExportOptions {
  DType dtype = DType::f32;                 // or bf16, f16: rounded to nearest, ties to even
  int64_t shard_bytes = 5'000'000'000;      // of tensors in one file; a larger tensor has a file of its own
  std::string whole = "model.safetensors";  // what the file is called where there is one
};

// Writes into `folder`, which exists. `mapping`: the model's (Plugin::external_tensors), in the order of the files;
// tensors without rows, and second names of earlier ones, are not written. `read` fills f32s of a parameter; of
// parameters that consecutive tensors share it is called once. Throws Error when a finite number becomes infinite in
// `dtype` (failed), or the files cannot be written.
void export_tensors(const std::string& folder, const std::vector<ExternalTensor>& mapping,
                    const std::map<std::string, Shape>& parameters,
                    const std::function<void(const std::string& parameter, float* out)>& read,
                    const ExportOptions& options = {});

}  // namespace strata
