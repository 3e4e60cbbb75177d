// A Hugging Face model folder as it is found: config.json, and the tensors of its one or many safetensors files by
// name. Which tensor is what is the model plugin's business (Plugin::external_tensors); what to do with them is
// external_import.h's.
#pragma once
#include <map>
#include <memory>
#include <string>

#include "engine/checkpoint/safetensors.h"

namespace strata {

inline constexpr int64_t kElementsAtOnce = 1 << 20;  // converted at a time, on the way in and out

class ExternalFolder {
 public:
  // Throws Error when config.json or a file that the index names is missing, a tensor is in two files or not in the one
  // that the index says, or two models lie in the folder (one file, and an index of others).
  explicit ExternalFolder(const std::string& folder);
  // A folder of other files: of a configuration and one of tensors. Throws Error when one is missing.
  ExternalFolder(const std::string& folder, const std::string& config_name, const std::string& tensors_name);
  const std::string& path() const { return path_; }
  const std::string& config() const { return config_; }  // text of config.json, or of what is in its place
  const std::string& config_name() const { return config_name_; }

  struct Found {
    std::shared_ptr<const SafetensorsFile> file;
    StoredTensor tensor;
  };
  const std::map<std::string, Found>& tensors() const { return tensors_; }

 private:
  void add(const std::string& name);
  std::string path_, config_, config_name_ = "config.json";
  std::map<std::string, std::shared_ptr<const SafetensorsFile>> files_;
  std::map<std::string, Found> tensors_;
};

// Which file each tensor is in, from the text of a model.safetensors.index.json; `where` begins the Errors. Refuses
// names that are no plain file names.
std::map<std::string, std::string> read_safetensors_index(const std::string& text, const std::string& where);

}  // namespace strata
