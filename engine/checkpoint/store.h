// Checkpoints of a run: folders step-00000100 with safetensors shards and a manifest that carries a checksum of every
// tensor and of itself. Written under a hidden name, synced, then renamed: what has its name is whole.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/checkpoint/safetensors.h"

namespace strata {

struct TensorRecord {
  std::string name;
  Role role;
  DType dtype;
  Shape shape;
  TensorBytes data;
};

struct CheckpointInfo {
  int64_t step = 0;
  int64_t samples = 0;                       // sequences consumed: the position in the data
  std::map<std::string, std::string> notes;  // of plugins, "plugin.name"
  std::string config;                        // the configuration it was written under, for people
};

class CheckpointStore {
 public:
  // `directory` must exist. Removes what a killed save left behind only when it saves.
  CheckpointStore(std::string directory, int keep);
  // Throws Error (failed) when it cannot be written; then nothing of it remains and older checkpoints are untouched.
  void save(const CheckpointInfo& info, const std::vector<TensorRecord>& tensors);
  std::optional<std::string> latest() const;  // path of the newest one
  std::vector<std::string> all() const;       // oldest first

 private:
  std::string directory_;
  int keep_;
};

enum class ManifestChecksum { verify, ignore };

class Checkpoint {
 public:
  // Throws Error when the manifest is damaged or missing.
  explicit Checkpoint(const std::string& path, ManifestChecksum manifest = ManifestChecksum::verify);
  const CheckpointInfo& info() const { return info_; }
  struct Entry {
    Role role;
    DType dtype;
    Shape shape;
    std::string file, checksum;
  };
  const std::map<std::string, Entry>& tensors() const { return entries_; }
  // Copies a tensor out after checking its shape, dtype and checksum.
  void read(const std::string& name, DType dtype, const Shape& shape, void* out) const;

 private:
  std::string path_;
  CheckpointInfo info_;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::shared_ptr<SafetensorsFile>> files_;
};

// A checkpoint folder itself, or the newest one of a run folder. Throws Error when there is none; `option` names where
// the path came from.
std::string find_checkpoint(const std::string& path, const std::string& option);

}  // namespace strata
