// Saving and loading checkpoints; see store.h.
#include "engine/checkpoint/store.h"

#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "strata/json.h"
#include "strata/error.h"

namespace strata {
namespace {

namespace fs = std::filesystem;
constexpr int64_t kVersion = 1;
constexpr int64_t kShardBytes = int64_t{4} << 30;
const std::string kPrefix = "step-", kHidden = ".saving-";

std::string checksum(const void* data, size_t bytes) {
  const XXH128_hash_t hash = XXH3_128bits(data, bytes);
  char text[40];
  std::snprintf(text, sizeof text, "%016llx%016llx", (unsigned long long)hash.high64, (unsigned long long)hash.low64);
  return text;
}

std::string read_text(const std::string& path) {
  const MappedFile file(path);
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

Role role_of(const std::string& name, const std::string& where) {
  for (int r = 0; r < kRoles; ++r)
    if (name_of(Role(r)) == name) return Role(r);
  throw Error(where + " has the unknown role \"" + name + "\".");
}
DType dtype_of(const std::string& name, const std::string& where) {
  for (int d = 0; d <= int(DType::u8); ++d)
    if (name_of(DType(d)) == name) return DType(d);
  throw Error(where + " has the unknown dtype \"" + name + "\".");
}

Json manifest(const CheckpointInfo& info, const std::vector<TensorRecord>& tensors,
              const std::vector<std::string>& files) {
  Json::Object notes;
  for (const auto& [key, value] : info.notes) notes.emplace_back(key, value);
  Json::Array list;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorRecord& t = tensors[i];
    list.push_back(Json::Object{{"name", t.name},
                                {"role", std::string(name_of(t.role))},
                                {"dtype", std::string(name_of(t.dtype))},
                                {"shape", Json::Array(t.shape.begin(), t.shape.end())},
                                {"file", files[i]},
                                {"xxh3", checksum(t.data.get(), size_t(elements(t.shape) * size_of(t.dtype)))}});
  }
  return Json::Object{{"format", "strata checkpoint"},
                      {"version", kVersion},
                      {"step", info.step},
                      {"samples", info.samples},
                      {"notes", notes},
                      {"config", info.config},
                      {"tensors", list}};
}

}  // namespace

CheckpointStore::CheckpointStore(std::string directory, int keep) : directory_(std::move(directory)), keep_(keep) {}

std::vector<std::string> CheckpointStore::all() const {
  std::vector<std::string> found;
  std::error_code problem;
  for (const auto& entry : fs::directory_iterator(directory_, problem)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind(kPrefix, 0) == 0 && fs::exists(entry.path() / "manifest.json"))
      found.push_back(entry.path().string());
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::optional<std::string> CheckpointStore::latest() const {
  const auto found = all();
  return found.empty() ? std::nullopt : std::optional(found.back());
}

void CheckpointStore::save(const CheckpointInfo& info, const std::vector<TensorRecord>& tensors) {
  char name[32];
  std::snprintf(name, sizeof name, "step-%08lld", (long long)info.step);
  const fs::path folder(directory_), hidden = folder / (kHidden + name), target = folder / name;
  std::error_code problem;
  for (const auto& entry : fs::directory_iterator(folder, problem))
    if (entry.path().filename().string().rfind(kHidden, 0) == 0) fs::remove_all(entry.path(), problem);
  try {
    fs::create_directory(hidden, problem);
    if (problem)
      throw Error(hidden.string() + ": cannot make the folder: " + problem.message() + ".", ExitCode::failed);
    std::vector<std::string> files;
    std::vector<TensorToStore> shard;
    int64_t bytes = 0;
    int count = 0;
    const auto file_name = [&] {
      char text[40];
      std::snprintf(text, sizeof text, "tensors-%05d.safetensors", count);
      return std::string(text);
    };
    const auto flush = [&] {
      if (!shard.empty()) write_safetensors((hidden / file_name()).string(), shard, {});
      shard.clear();
      bytes = 0;
      ++count;
    };
    for (const TensorRecord& t : tensors) {
      const int64_t size = elements(t.shape) * size_of(t.dtype);
      if (bytes > 0 && bytes + size > kShardBytes) flush();
      files.push_back(file_name());
      shard.push_back({t.name, t.dtype, t.shape, t.data});
      bytes += size;
    }
    flush();
    const Json content = manifest(info, tensors, files);
    const std::string text = content.dump();
    AtomicFile file((hidden / "manifest.json").string());
    file.write(Json(Json::Object{{"xxh3", checksum(text.data(), text.size())}, {"content", content}}).dump(1) + "\n");
    file.commit();
    sync_folder(hidden.string());
    fs::remove_all(target, problem);  // the same step saved before a resume
    fs::rename(hidden, target, problem);
    if (problem)
      throw Error(target.string() + ": cannot rename the finished checkpoint: " + problem.message() + ".",
                  ExitCode::failed);
    sync_folder(directory_);
  } catch (...) {
    fs::remove_all(hidden, problem);
    throw;
  }
  const auto found = all();
  for (size_t i = 0; i + size_t(keep_) < found.size(); ++i) fs::remove_all(found[i], problem);
}

Checkpoint::Checkpoint(const std::string& path, ManifestChecksum manifest) : path_(path) {
  const std::string file = (fs::path(path) / "manifest.json").string();
  if (!fs::exists(file)) throw Error(path + ": is no checkpoint: it has no manifest.json.");
  const Json whole = Json::parse(read_text(file), file);
  const Json *content = whole.find("content"), *sum = whole.find("xxh3");
  if (!content || !sum) throw Error(file + ": is no manifest of a Strata checkpoint.");
  const std::string text = content->dump();
  if (manifest == ManifestChecksum::verify && sum->string(file + ": xxh3") != checksum(text.data(), text.size()))
    throw Error(file + ": is damaged: its checksum does not match. Use an older checkpoint.");
  const auto field = [&](const Json& from, const char* key, const std::string& where) -> const Json& {
    const Json* value = from.find(key);
    if (!value) throw Error(where + " lacks \"" + key + "\".");
    return *value;
  };
  if (const int64_t version = field(*content, "version", file).integer(file + ": version"); version != kVersion)
    throw Error(file + ": has version " + std::to_string(version) +
                " of the checkpoint format; this Strata reads version " + std::to_string(kVersion) + ".");
  info_.step = field(*content, "step", file).integer(file + ": step");
  info_.samples = field(*content, "samples", file).integer(file + ": samples");
  info_.config = field(*content, "config", file).string(file + ": config");
  for (const auto& [key, value] : field(*content, "notes", file).object(file + ": notes"))
    info_.notes[key] = value.string(file + ": note " + key);
  for (const Json& item : field(*content, "tensors", file).array(file + ": tensors")) {
    const std::string name = field(item, "name", file).string(file + ": a name"),
                      where = file + ": tensor \"" + name + "\"";
    Entry entry{role_of(field(item, "role", where).string(where), where),
                dtype_of(field(item, "dtype", where).string(where), where),
                {},
                field(item, "file", where).string(where),
                field(item, "xxh3", where).string(where)};
    for (const Json& size : field(item, "shape", where).array(where)) entry.shape.push_back(size.integer(where));
    if (entry.file.find('/') != std::string::npos) throw Error(where + " names a file outside of the checkpoint.");
    entries_[name] = entry;
    if (auto& opened = files_[entry.file]; !opened)
      opened = std::make_shared<SafetensorsFile>((fs::path(path) / entry.file).string());
  }
}

void Checkpoint::read(const std::string& name, DType dtype, const Shape& shape, void* out) const {
  const auto found = entries_.find(name);
  if (found == entries_.end())
    throw Error(path_ + ": holds no tensor \"" + name + "\"; it is a checkpoint of another model or other plugins.");
  const Entry& entry = found->second;
  if (entry.shape != shape || entry.dtype != dtype)
    throw Error(path_ + ": tensor \"" + name + "\" is " + std::string(name_of(entry.dtype)) + text(entry.shape) +
                ", but this model has " + std::string(name_of(dtype)) + text(shape) +
                "; it is a checkpoint of another model.");
  const SafetensorsFile& file = *files_.at(entry.file);
  const auto stored = file.tensors().find(name);
  if (stored == file.tensors().end())
    throw Error(file.path() + ": lacks the tensor \"" + name + "\" that the manifest promises.");
  const auto bytes = file.data(stored->second);
  if (bytes.size() != size_t(elements(shape) * size_of(dtype)) ||
      checksum(bytes.data(), bytes.size()) != entry.checksum)
    throw Error(file.path() + ": tensor \"" + name +
                "\" is damaged: its checksum does not match. Use an older checkpoint.");
  std::memcpy(out, bytes.data(), bytes.size());
}

std::string find_checkpoint(const std::string& path, const std::string& option) {
  if (fs::exists(fs::path(path) / "manifest.json")) return path;
  if (!fs::is_directory(path)) throw Error(path + ": there is no checkpoint or run folder here (" + option + ").");
  const auto newest = CheckpointStore(path, 1).latest();
  if (!newest) throw Error(path + ": holds no checkpoint (" + option + ").");
  return *newest;
}

}  // namespace strata
