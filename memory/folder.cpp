#include "memory/folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

namespace strata {
namespace {

bool is_itself_or_above(const char* name) { return std::strcmp(name, ".") == 0 || std::strcmp(name, "..") == 0; }

// Takes the descriptor.
void empty(int folder) {
  DIR* const entries = fdopendir(folder);
  if (!entries) {
    close(folder);
    return;
  }
  while (const dirent* entry = readdir(entries)) {
    const char* const name = entry->d_name;
    if (is_itself_or_above(name)) continue;
    if (unlinkat(folder, name, 0) == 0) continue;
    if (const int inner = openat(folder, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); inner >= 0) {
      empty(inner);
      unlinkat(folder, name, AT_REMOVEDIR);
    }
  }
  closedir(entries);
}

}  // namespace

std::vector<std::string> names_in(const std::string& folder, std::error_code& problem) {
  std::vector<std::string> names;
  problem.clear();
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(opendir(folder.c_str()), closedir);
  errno = entries ? 0 : errno;
  while (entries) {
    const dirent* const entry = readdir(entries.get());
    if (!entry) break;
    if (!is_itself_or_above(entry->d_name)) names.emplace_back(entry->d_name);
    errno = 0;
  }
  problem.assign(errno, std::generic_category());
  return names;
}

void remove_folder(const char* path) noexcept {
  if (const int folder = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); folder >= 0) empty(folder);
  rmdir(path);
}

}  // namespace strata
