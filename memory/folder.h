// Folders where memory may have run out: the standard library's directory_iterator and remove_all end the process when
// they find none, even where they are caught.
#pragma once
#include <string>
#include <system_error>
#include <vector>

namespace strata {

// Names of what is in a folder, without "." and "..", in no order; what came before `problem` where it is set.
std::vector<std::string> names_in(const std::string& folder, std::error_code& problem);

// With all that is in it, links themselves and not what they lead to. What cannot be removed stays; nobody is told.
void remove_folder(const char* path) noexcept;

}  // namespace strata
