// Disks by stat(2) and sysfs; see disk.h.
#include "memory/disk.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <filesystem>
#include <fstream>

namespace strata {

std::optional<uint64_t> disk_of(const std::string& directory) {
  struct stat status {};
  if (stat(directory.c_str(), &status) != 0) return {};
  // A partition's folder in sysfs is within its disk's.
  namespace fs = std::filesystem;
  std::error_code problem;
  const fs::path device = fs::canonical(
      "/sys/dev/block/" + std::to_string(major(status.st_dev)) + ":" + std::to_string(minor(status.st_dev)), problem);
  if (problem || !fs::exists(device / "partition", problem)) return status.st_dev;
  std::ifstream number(device.parent_path() / "dev");
  unsigned above = 0, below = 0;
  char colon = 0;
  return number >> above >> colon >> below ? makedev(above, below) : status.st_dev;
}

std::string same_disk_note(const std::vector<std::string>& directories) {
  std::string note;
  std::vector<char> told(directories.size(), false);
  for (size_t a = 0; a < directories.size(); ++a) {
    const auto disk = disk_of(directories[a]);
    std::string names = directories[a];
    for (size_t b = a + 1; disk && b < directories.size(); ++b)
      if (!told[b] && disk_of(directories[b]) == disk) names += " and " + directories[b], told[b] = true;
    if (names == directories[a] || told[a]) continue;
    note += (note.empty() ? "" : " ") + ("the NVMe directories " + names) +
            " are on one disk: together they are no faster than one of them.";
  }
  return note;
}

}  // namespace strata
