// The state of a run and its checkpoints: persistent tensors of any layout, loaded from what any other layout wrote and
// saved at once or behind training.
#pragma once
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "engine/checkpoint/store.h"
#include "engine/runtime/storage.h"
#include "memory/arena.h"
#include "strata/mesh.h"

namespace strata {

class Saver {
 public:
  // `directory` must exist before the first save. `behind`: a save copies what rests in RAM (snapshot_bytes of memory),
  // writes what rests on NVMe, and returns; the rest is written while training goes on.
  Saver(Storage& storage, const Mesh& mesh, World& world, Threads& threads, std::string directory, int keep,
        bool behind);
  ~Saver();

  // Fills parameters, and the optimizer's state when `everything`, from a checkpoint of any number of ranks under any
  // strategies. Throws Error when it holds another model.
  // `check` sees what the checkpoint says of itself before anything is read from it, and throws when it does not fit.
  // What may begin anew (Lasting) and is not in the checkpoint gets its first values, of `seed`.
  // Ranks that train apart (Lasting::own_over) go on each with its own values, where the checkpoint is of as many;
  // otherwise with what it holds under the tensors' own names: what they had together, or the first one's.
  struct Loaded {
    CheckpointInfo info;
    std::vector<std::string> begun_anew{};      // names of tensors
    std::vector<std::string> begun_together{};  // of tensors that had other values on other ranks
    bool dropped = false;  // what it has of microbatches under way, as this run's steps leave nothing
  };
  Loaded load(const std::string& path, bool everything, uint64_t seed,
              const std::function<void(const CheckpointInfo&)>& check = {});
  // Between steps, all ranks. Returns what went wrong, on all ranks; empty: nothing. A save before that is still being
  // written is awaited first, and its problem returned.
  std::string save(const CheckpointInfo& info);
  // What went wrong behind; waits for what is being written.
  std::string finish();
  std::optional<std::string> latest() const { return store_.latest(); }

 private:
  std::vector<TensorRecord> records(bool on_nvme);
  bool keeps_other(const Checkpoint& checkpoint) const;
  std::string stored_name(const Tensor& tensor) const;
  bool holds_own(const Checkpoint& checkpoint, const Tensor& tensor) const;

  Storage& storage_;
  const Mesh& mesh_;
  World& world_;
  Threads& threads_;
  CheckpointStore store_;
  bool behind_;
  std::set<std::string> written_before_;  // names of tensors that ranks of an earlier program write
  std::set<std::string> stood_for_;       // names of tensors for which others stand (Lasting::stands_for)
  Arena snapshot_;
  std::future<std::string> writing_;
};

// Elements [first, first + count) of what `tensor.layout` gives this rank of a tensor, from whatever a checkpoint holds
// for it.
void read_into(const Checkpoint& checkpoint, const Tensor& tensor, void* out, int64_t first, int64_t count);
// The same of what it holds under that name.
void read_into(const Checkpoint& checkpoint, const Tensor& tensor, const std::string& name, void* out, int64_t first,
               int64_t count);
// False for what a plugin adds to a model where the checkpoint is of the model alone: then first values stay.
bool is_in(const Checkpoint& checkpoint, const Tensor& tensor);

// Whether this rank writes a tensor: of ranks that hold the same, the first does.
bool writes(const Tensor& tensor, const Mesh& mesh);

// Bytes of the copy that a save behind training takes, of a program's tensors.
int64_t snapshot_bytes(const std::vector<Tensor>& tensors, const Mesh& mesh);

}  // namespace strata
