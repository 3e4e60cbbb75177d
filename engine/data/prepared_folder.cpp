// See prepared_folder.h.
#include "engine/data/prepared_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "memory/folder.h"
#include "strata/error.h"

namespace strata {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(const fs::path& path, const char* what, const std::error_code& problem) {
  throw Error(path.string() + ": " + what + ": " + problem.message() + ".", ExitCode::failed);
}

// Is this the name of a shard, such as train_000.bin, or of what stands beside one?
bool is_shard(const std::string& name) {
  const size_t digits = name.find('_') + 1;
  if (name.rfind("train_", 0) != 0 && name.rfind("validation_", 0) != 0) return false;
  const size_t dot = name.find_first_not_of("0123456789", digits);
  if (dot == name.npos || dot < digits + 3) return false;
  const std::string extension = name.substr(dot);
  return extension == ".bin" || extension == kMask || extension == kDocuments;
}

}  // namespace

PreparedFolder::PreparedFolder(const std::string& directory)
    : directory_(directory), aside_(directory_ / ".preparing") {
  std::error_code problem;
  made_ = fs::create_directories(directory_, problem);
  if (problem) throw Error(directory + ": cannot make the folder: " + problem.message() + ".");
  lock_ = open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (lock_ < 0) throw Error(directory + ": cannot open the folder: " + std::strerror(errno) + ".");
  if (flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    const int reason = errno;
    close(lock_);
    if (reason == EWOULDBLOCK)
      throw Error(directory + ": another strata data prepare is writing there; wait for it or name another folder.",
                  ExitCode::failed);
    throw Error(directory + ": cannot lock the folder: " + std::strerror(reason) + ".", ExitCode::failed);
  }
  fs::remove_all(aside_, problem);  // of a run that was killed
  if (!problem) fs::create_directory(aside_, problem);
  if (problem) {
    close(lock_);
    refuse(aside_, "cannot make the folder", problem);
  }
}

PreparedFolder::~PreparedFolder() {
  remove_folder(aside_.c_str());  // where that fails, nothing more can be done; the next run tries again
  if (made_ && !published_) rmdir(directory_.c_str());
  close(lock_);
}

void PreparedFolder::publish(const std::vector<std::string>& names) {
  std::error_code problem;
  std::vector<fs::path> old{directory_ / "tokenizer.json", directory_ / "tokenizer.model",
                            directory_ / "tokenizer.txt"};
  for (const std::string& name : names_in(directory_, problem))
    if (is_shard(name)) old.push_back(directory_ / name);
  if (problem) refuse(directory_, "cannot list the folder", problem);
  for (const fs::path& path : old)
    if (fs::remove(path, problem); problem) refuse(path, "cannot remove it", problem);
  for (const std::string& name : names)
    if (fs::rename(aside_ / name, directory_ / name, problem); problem)
      refuse(directory_ / name, "cannot write it", problem);
  sync_folder(directory_.string());
  published_ = true;
}

ShardWriter::ShardWriter(fs::path folder, std::string prefix, bool wide, int64_t limit, uint64_t tokenizer)
    : folder_(std::move(folder)), prefix_(std::move(prefix)), wide_(wide), limit_(limit), tokenizer_(tokenizer) {}

void ShardWriter::append(std::span<const int32_t> ids, std::span<const uint8_t> counts) {
  while (!ids.empty()) {
    if (!writer_) {
      char number[32];
      std::snprintf(number, sizeof number, "_%03zu.bin", names_.size());
      names_.push_back(prefix_ + number);
      writer_.emplace((folder_ / names_.back()).string(), wide_, tokenizer_);
      marks_.emplace((folder_ / names_.back()).string());
    }
    if (begins_) marks_->begin_document();
    begins_ = false;
    const size_t count = std::min(ids.size(), size_t(limit_ - writer_->tokens()));
    writer_->append(ids.first(count));
    ids = ids.subspan(count);
    if (counts.empty()) {
      marks_->append(int64_t(count), true);
      counted_ += int64_t(count);
    } else {
      marks_->append(counts.first(count));
      counted_ += std::count_if(counts.begin(), counts.begin() + int64_t(count), [](uint8_t one) { return one != 0; });
      counts = counts.subspan(count);
    }
    tokens_ += int64_t(count);
    if (writer_->tokens() == limit_) close();
  }
}

void ShardWriter::begin_document() {
  begins_ = true;
  ++documents_;
}

void ShardWriter::close() {
  if (!writer_) return;
  marks_->commit();
  writer_->commit();
  marks_.reset();
  writer_.reset();
}

}  // namespace strata
