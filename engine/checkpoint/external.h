// Hugging Face model folders: config.json with one or many safetensors files. Which tensor is what is the model
// plugin's business (Plugin::external_tensors); here they are found, checked, converted to f32 and copied row by row.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "strata/plugin.h"

namespace strata {

std::string read_external_config(const std::string& folder);  // text of config.json

// Fills every parameter named by `mapping` (name -> shape); f32, bf16 and f16 sources. Throws Error when a tensor is
// missing, has another shape, or is not known to the mapping, or a parameter is not filled whole.
std::map<std::string, std::vector<float>> import_tensors(const std::string& folder,
                                                         const std::vector<ExternalTensor>& mapping,
                                                         const std::map<std::string, Shape>& parameters);

// Writes config.json and model.safetensors (f32).
void export_tensors(const std::string& folder, const std::string& config_json,
                    const std::vector<ExternalTensor>& mapping,
                    const std::map<std::string, std::vector<float>>& parameters);

}  // namespace strata
