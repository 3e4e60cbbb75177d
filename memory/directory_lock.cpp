// DirectoryLock on flock(2); see directory_lock.h.
#include "memory/directory_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "strata/error.h"

namespace strata {
namespace {

// The holder may have removed the file between our opening and locking it: then what we locked is no longer `path`.
bool still_at(const std::string& path, int file) {
  struct stat ours {
  }, named{};
  return fstat(file, &ours) == 0 && stat(path.c_str(), &named) == 0 && ours.st_ino == named.st_ino &&
         ours.st_dev == named.st_dev;
}

// "process 123 ", or "" when the holder has not written its id yet.
std::string holder(int file) {
  char text[32] = {};
  const ssize_t count = pread(file, text, sizeof(text) - 1, 0);
  const std::string id(text, count > 0 ? std::strcspn(text, "\n") : 0);
  return id.empty() ? "" : "process " + id + " ";
}

void check_directory(const std::string& directory, const std::string& called) {
  struct stat status {};
  if (stat(directory.c_str(), &status) != 0) {
    throw Error(called + ": " + std::strerror(errno) + ". Create it, or name another one.");
  }
  if (!S_ISDIR(status.st_mode)) throw Error(called + " is not a directory. Name a directory.");
}

}  // namespace

DirectoryLock::DirectoryLock(const std::string& directory, const std::string& name, const std::string& called)
    : path_(directory + "/" + name) {
  check_directory(directory, called);
  while (true) {
    file_ = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (file_ < 0) {
      throw Error(called + " is not writable: " + std::strerror(errno) + " (" + name +
                  "). Give yourself the right to write there, or name another one.");
    }
    int locked;
    do locked = flock(file_, LOCK_EX | LOCK_NB);
    while (locked != 0 && errno == EINTR);
    if (locked != 0) {
      const int problem = errno;
      const std::string by = holder(file_);
      close(file_);
      if (problem != EWOULDBLOCK) {
        throw Error(called + " cannot be locked: " + std::strerror(problem) + ". Name one on a local disk.");
      }
      throw Error(called + " is in use by another run (" + by + "holds " + name +
                  "). Wait until it ends, or name another directory.");
    }
    if (still_at(path_, file_)) break;
    close(file_);
  }
  // Only for the message above; the lock holds without it.
  const std::string id = std::to_string(getpid()) + "\n";
  if (ftruncate(file_, 0) != 0 || pwrite(file_, id.data(), id.size(), 0) != ssize_t(id.size())) {
    const int problem = errno;
    unlink(path_.c_str());
    close(file_);
    throw Error(called + " cannot be written to: " + std::strerror(problem) +
                ". Free some space, or name another one.");
  }
}

DirectoryLock::~DirectoryLock() {
  unlink(path_.c_str());  // before it is unlocked, so that nobody's file is removed but ours
  close(file_);
}

}  // namespace strata
