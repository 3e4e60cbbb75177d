// A folder among the system's temporary files, removed with what is in it.
#pragma once
#include <cstdlib>
#include <filesystem>
#include <string>

#include "memory/folder.h"
#include "strata/error.h"

namespace strata::verifying {

class TemporaryFolder {
 public:
  // Its name begins with this. Throws Error (failed) where it cannot be made.
  explicit TemporaryFolder(const std::string& name)
      : path_((std::filesystem::temp_directory_path() / (name + "-XXXXXX")).string()) {
    if (!mkdtemp(path_.data())) throw Error(path_ + ": cannot make the folder.", ExitCode::failed);
  }
  ~TemporaryFolder() { remove_folder(path_.c_str()); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace strata::verifying
