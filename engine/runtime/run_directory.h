// The folder of a run, run.directory: made, and kept to one run at a time. What is in it: checkpoints (store.h),
// log.jsonl, and while a run is on, strata-run.lock.
#pragma once
#include <optional>
#include <string>

#include "memory/directory_lock.h"

namespace strata {

class RunDirectory {
 public:
  // Looks, makes the folder with those above it, locks it, and looks again. Throws Error (usage) as look does, and
  // where the folder cannot be made or another run is in it.
  RunDirectory(const std::string& path, bool resume);

  // The checkpoint to go on from; empty when a new run begins.
  const std::string& newest() const { return newest_; }
  // Why another run could start in it now: file systems without locks, full disks. Empty: none could.
  std::string problem() const;

  // What `train` would refuse, and changes nothing: a folder that cannot be made or written to, that another run is in,
  // that holds checkpoints of a run which is not resumed, or none to resume from. Returns newest().
  static std::string look(const std::string& path, bool resume);

 private:
  std::string path_, newest_, problem_;
  std::optional<DirectoryLock> lock_;
};

// Throws Error (usage) when a checkpoint of `step` leaves nothing to do.
void require_steps_left(const std::string& checkpoint, int64_t step, int64_t steps);

// Words that follow the reason why `checkpoint` does not load: which older one in the folder is whole, and how to go on
// from it. Empty when `checkpoint` itself is whole: another model's, for instance. Reads all of both.
std::string older_checkpoint(const std::string& directory, const std::string& checkpoint);

}  // namespace strata
