// Which disk a folder is on, as far as the system tells.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace strata {

// A number that folders on one disk share: the device of their file system, or the disk of which that is a partition.
// None where there is no such folder.
std::optional<uint64_t> disk_of(const std::string& directory);

// "the NVMe directories /a and /b are on one disk: together they are no faster than one of them." Empty: none are.
std::string same_disk_note(const std::vector<std::string>& directories);

}  // namespace strata
