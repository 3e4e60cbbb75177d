// How GPT-2, Llama and Qwen2 folders of the Hugging Face ecosystem map to the gpt plugin's options and parameters.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "plugins/gpt/gpt_config.h"
#include "strata/plugin.h"

// From the text of a config.json; nothing when it is of another architecture. Throws strata::Error for a setting that
// the model does not have.
std::optional<GptConfig> gpt_from_external(const std::string& config_json);
std::string gpt_to_toml(const GptConfig& config);  // a [model] table
// For a resolved configuration (no zeros left). Throws strata::Error when no architecture matches.
std::string gpt_to_external(const GptConfig& config);
std::vector<strata::ExternalTensor> gpt_external_tensors(const GptConfig& config);
