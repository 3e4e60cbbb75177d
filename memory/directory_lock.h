// Keeps a directory to one process: a lock file in it, which the kernel unlocks when the process ends, however it ends.
#pragma once
#include <string>
#include <utility>

namespace strata {

class DirectoryLock {
 public:
  // Creates `name` in the directory, or takes over what an ended process left, and writes this process's id into it.
  // `called` is what messages call the directory. Throws Error (usage) when it is none, is not writable, or is held.
  // Where it cannot be locked (a file system without locks, a full disk) that is an Error too, unless there is a
  // `problem` to put the reason into.
  DirectoryLock(const std::string& directory, const std::string& name, const std::string& called,
                std::string* problem = nullptr);
  ~DirectoryLock();  // removes the file
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

  // Throws the same Error when another process holds it; changes nothing.
  static void require_free(const std::string& directory, const std::string& name, const std::string& called);

 private:
  std::string path_;
  int file_ = -1;  // -1: not locked
};

}  // namespace strata
