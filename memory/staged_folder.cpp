// Staging with mkdtemp, flock and rename; see staged_folder.h.
#include "memory/staged_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "memory/atomic_file.h"
#include "memory/folder.h"
#include "strata/error.h"

namespace strata {
namespace {

namespace fs = std::filesystem;
const std::string kHidden = ".unfinished-", kOld = ".replaced";

// What is wrong with the path is the user's to mend; what is wrong with the disk is not in the command's words.
ExitCode blame(int problem) {
  for (const int disk : {ENOSPC, EDQUOT, EIO, ENOMEM, EMFILE, ENFILE})
    if (problem == disk) return ExitCode::failed;
  return ExitCode::usage;
}

[[noreturn]] void refuse(const std::string& path, const char* what, int problem) {
  throw Error(path + ": " + what + ": " + std::strerror(problem) + ".", blame(problem));
}

std::vector<std::string> names_of(const std::string& folder) {
  std::error_code problem;
  std::vector<std::string> names = names_in(folder, problem);
  if (problem) refuse(folder, "cannot list the folder", problem.value());
  return names;
}

// Renames that can be taken back.
class Renames {
 public:
  void operator()(const fs::path& from, const fs::path& to) {
    if (rename(from.c_str(), to.c_str()) != 0)
      throw Error(to.string() + ": cannot rename to it: " + std::strerror(errno) + ".", ExitCode::failed);
    done_.emplace_back(from, to);
  }
  void take_back() {
    for (; !done_.empty(); done_.pop_back()) rename(done_.back().second.c_str(), done_.back().first.c_str());
  }

 private:
  std::vector<std::pair<fs::path, fs::path>> done_;
};

}  // namespace

StagedFolder::StagedFolder(const std::string& target) : target_(target) {
  if (target.empty()) throw Error("the folder to write has no name.");
  try {
    prepare();
  } catch (...) {
    clean();
    throw;
  }
}

StagedFolder::~StagedFolder() { clean(); }

void StagedFolder::prepare() {
  std::vector<std::string> missing;
  for (fs::path path = target_; !path.empty() && !fs::exists(fs::symlink_status(path)); path = path.parent_path())
    if (path.has_filename()) missing.insert(missing.begin(), path.string());
  for (const std::string& path : missing) {
    if (mkdir(path.c_str(), 0777) == 0)
      made_.push_back(path);
    else if (errno != EEXIST)
      refuse(path, "cannot make the folder", errno);
  }
  lock_ = open(target_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (lock_ < 0) refuse(target_, "cannot write into it", errno);
  // Some file systems of networks have no locks; there two at once are not noticed.
  const bool locked = flock(lock_, LOCK_EX | LOCK_NB) == 0;
  if (!locked && errno == EWOULDBLOCK)
    throw Error(target_ + ": another strata command is writing into this folder; wait for it or name another one.",
                ExitCode::failed);
  for (const std::string& name : names_of(target_)) {
    if (name.rfind(kHidden, 0) != 0)
      before_.push_back(name);
    else if (locked)
      remove_folder((target_ + "/" + name).c_str());
  }
  std::string name = (fs::path(target_) / (kHidden + "XXXXXX")).string();
  if (!mkdtemp(name.data())) refuse(target_, "cannot write into it", errno);
  staging_ = name;
}

void StagedFolder::clean() {
  if (!staging_.empty()) remove_folder(staging_.c_str());
  for (; !made_.empty(); made_.pop_back()) rmdir(made_.back().c_str());  // not when something is in it
  if (lock_ >= 0) close(lock_);
}

void StagedFolder::publish(const std::string& last, const std::function<bool(const std::string&)>& replaced) {
  std::vector<std::string> names = names_of(staging_);
  std::stable_partition(names.begin(), names.end(), [&](const std::string& name) { return name != last; });
  STRATA_CHECK(!names.empty() && names.back() == last);
  publish(names, replaced);
}

void StagedFolder::publish(const std::vector<std::string>& names,
                           const std::function<bool(const std::string&)>& replaced) {
  const std::string& last = names.back();
  sync_folder(staging_);
  const fs::path old = fs::path(staging_) / kOld;
  if (mkdir(old.c_str(), 0777) != 0) refuse(old.string(), "cannot make the folder", errno);
  // `last` goes first and comes last: what lies between is no set of files to anybody.
  std::stable_partition(before_.begin(), before_.end(), [&](const std::string& name) { return name == last; });
  Renames move;
  try {
    for (const std::string& name : before_)
      if (replaced(name)) move(fs::path(target_) / name, old / name);
    for (const std::string& name : names) {
      if (name == last) sync_folder(target_);
      move(fs::path(staging_) / name, fs::path(target_) / name);
    }
    sync_folder(target_);
  } catch (...) {
    move.take_back();
    throw;
  }
  made_.clear();  // they stay
}

}  // namespace strata
