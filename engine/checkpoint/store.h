// Checkpoints of a run: folders step-00000100 with safetensors shards and a manifest that carries a checksum of every
// tensor and of itself. Written under a hidden name, synced, then renamed: what has its name is whole.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/world.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/checkpoint/safetensors_writer.h"
#include "strata/json.h"
#include "strata/layout.h"

namespace strata {

struct TensorRecord {
  std::string name;
  Role role;
  DType dtype;
  Shape shape;  // of what this rank writes
  TensorBytes data;
  Shape offset{};  // where in the whole tensor it begins, by dimension; empty: at its start
  Shape whole{};   // shape of the whole tensor; empty: this is all of it
};

struct CheckpointInfo {
  int64_t step = 0;
  int64_t samples = 0;                         // sequences consumed: the position in the data
  std::map<std::string, std::string> notes{};  // of plugins, "plugin.name"
  std::string config{};                        // the configuration it was written under, for people
};

class CheckpointStore {
 public:
  // `directory` must exist. Removes what a killed save left behind only when it saves.
  CheckpointStore(std::string directory, int keep);

  // A checkpoint in the making, gone unless it is committed. With several ranks all do the same, each with the rows
  // that it alone writes, in files of its own; rank 0 finishes.
  class Saving {
   public:
    // Throws Error (failed) on all ranks when the folder cannot be made.
    Saving(CheckpointStore& store, CheckpointInfo info, World* world = nullptr);
    ~Saving();
    Saving(const Saving&) = delete;
    // Any number of times; what goes wrong is said by commit.
    void write(const std::vector<TensorRecord>& tensors);
    // Throws Error (failed) on all ranks when anything could not be written; then nothing of it remains and older
    // checkpoints are untouched.
    void commit();

   private:
    CheckpointStore& store_;
    CheckpointInfo info_;
    World* world_;
    std::string hidden_, target_, problem_;
    int files_ = 0;
    bool committed_ = false;
    Json::Array written_;
  };
  // All three.
  void save(const CheckpointInfo& info, const std::vector<TensorRecord>& tensors, World* world = nullptr);
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
  struct StoredBox {
    std::string file, checksum;
    Box box;                       // of the whole tensor
    mutable bool checked = false;  // the checksum is right
  };
  struct Entry {
    Role role;
    DType dtype;
    Shape shape;                // of the whole tensor
    std::vector<StoredBox> pieces;  // by where they begin, without gaps or overlaps
  };
  const std::map<std::string, Entry>& tensors() const { return entries_; }
  // Copies a tensor out and checks its shape, dtype and checksum; after an Error `out` may hold some of it.
  void read(const std::string& name, DType dtype, const Shape& shape, void* out) const;
  // The same of elements [first, first + count) of one box, counted row-major, whoever wrote them; `shape` is the whole
  // tensor's. Where it is read part by part, its checksum is checked with the first.
  void read_box(const std::string& name, DType dtype, const Shape& shape, const Box& box, int64_t first, int64_t count,
                void* out) const;
  // Throws Error when anything of it is missing or damaged; reads all of it.
  void verify() const;

 private:
  const StoredTensor& stored(const std::string& name, const Entry& entry, const StoredBox& piece) const;

  std::string path_;
  CheckpointInfo info_;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::shared_ptr<SafetensorsFile>> files_;
};

// A checkpoint folder itself, or the newest one of a run folder. Throws Error when there is none; `option` names where
// the path came from.
std::string find_checkpoint(const std::string& path, const std::string& option);

}  // namespace strata
