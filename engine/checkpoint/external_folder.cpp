// Opening a model folder; see external_folder.h.
#include "engine/checkpoint/external_folder.h"

#include <filesystem>
#include <set>

#include "memory/input_file.h"
#include "strata/error.h"
#include "strata/json.h"

namespace strata {
namespace {

namespace fs = std::filesystem;
constexpr const char* kWhole = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

// Also for a link that leads nowhere, which is then refused as what it is.
bool is_there(const fs::path& path) { return fs::exists(fs::symlink_status(path)); }

[[noreturn]] void no_weights(const fs::path& folder) {
  for (const char* other : {"pytorch_model.bin", "pytorch_model.bin.index.json"})
    if (is_there(folder / other))
      throw Error(folder.string() + ": holds " + other +
                  " but no model.safetensors; transformers' save_pretrained turns it into safetensors.");
  throw Error(folder.string() + ": holds neither " + kWhole + " nor " + kIndex + ".");
}

}  // namespace

std::map<std::string, std::string> read_safetensors_index(const std::string& text, const std::string& where) {
  const Json json = Json::parse(text, where);
  const Json* map = json.find("weight_map");
  if (!map) throw Error(where + ": lacks \"weight_map\".");
  std::map<std::string, std::string> files;
  for (const auto& [tensor, file] : map->object(where + ": weight_map")) {
    const std::string& name = file.string(where + ": the file of \"" + tensor + "\"");
    if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
        name.find('\0') != std::string::npos)
      throw Error(where + ": names \"" + name + "\", which is no file of this folder.");
    files[tensor] = name;
  }
  if (files.empty()) throw Error(where + ": its \"weight_map\" names no tensor.");
  return files;
}

ExternalFolder::ExternalFolder(const std::string& folder) : path_(folder) {
  const fs::path base(folder);
  if (!fs::is_directory(base)) throw Error(folder + ": there is no such folder.");
  if (!is_there(base / "config.json"))
    throw Error(folder + ": holds no config.json; expected a Hugging Face model folder.");
  config_ = read_text((base / "config.json").string());
  if (!is_there(base / kIndex)) {
    if (!is_there(base / kWhole)) no_weights(base);
    add(kWhole);
    return;
  }
  const std::string index = (base / kIndex).string();
  const auto placed = read_safetensors_index(read_text(index), index);
  std::set<std::string> names;
  for (const auto& [tensor, file] : placed) names.insert(file);
  if (is_there(base / kWhole) && !names.contains(kWhole))
    throw Error(folder + ": holds " + kWhole + " and, by " + kIndex + ", " + *names.begin() +
                ": two models. Remove the files of one.");
  for (const std::string& name : names) {
    if (!is_there(base / name)) throw Error(index + ": names " + name + ", which is not in the folder.");
    add(name);
  }
  for (const auto& [tensor, file] : placed)
    if (const auto found = tensors_.find(tensor); found == tensors_.end() || found->second.file != files_.at(file))
      throw Error(index + ": says that \"" + tensor + "\" is in " + file + ", which lacks it.");
}

ExternalFolder::ExternalFolder(const std::string& folder, const std::string& config_name,
                               const std::string& tensors_name)
    : path_(folder), config_name_(config_name) {
  const fs::path base(folder);
  if (!fs::is_directory(base)) throw Error(folder + ": there is no such folder.");
  for (const std::string& name : {config_name, tensors_name})
    if (!is_there(base / name)) throw Error(folder + ": holds no " + name + ".");
  config_ = read_text((base / config_name).string());
  add(tensors_name);
}

void ExternalFolder::add(const std::string& name) {
  const auto file = std::make_shared<SafetensorsFile>((fs::path(path_) / name).string());
  files_[name] = file;
  for (const auto& [tensor, stored] : file->tensors())
    if (const auto [at, fresh] = tensors_.emplace(tensor, Found{file, stored}); !fresh)
      throw Error(path_ + ": the tensor \"" + tensor + "\" is in two files, " +
                  fs::path(at->second.file->path()).filename().string() + " and " + name + ".");
}

}  // namespace strata
