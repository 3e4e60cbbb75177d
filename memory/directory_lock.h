// Keeps a directory to one process: a lock file in it, which the kernel unlocks when the process ends, however it ends.
#pragma once
#include <string>
#include <utility>

namespace strata {

class DirectoryLock {
 public:
  // Creates `name` in the directory, or takes over what an ended process left, and writes this process's id into it.
  // `called` is what messages call the directory. Throws Error (usage) when it is none, is not writable, or is held.
  DirectoryLock(const std::string& directory, const std::string& name, const std::string& called);
  ~DirectoryLock();  // removes the file
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  std::string path_;
  int file_ = -1;
};

}  // namespace strata
