// What the tests of this folder share: a folder that goes when the test ends, and the message of an Error.
#pragma once
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

#include "strata/error.h"

namespace strata {

class TestFolder {
 public:
  TestFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "strata_test_XXXXXX").string();
    if (!mkdtemp(name.data())) throw std::runtime_error("mkdtemp failed for " + name);
    path_ = name;
  }
  ~TestFolder() { std::filesystem::remove_all(path_); }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  std::string path() const { return path_.string(); }
  std::string write(const std::string& name, const std::string& content) const {
    std::ofstream file(path_ / name, std::ios::binary);
    file << content;
    if (!file.flush()) throw std::runtime_error("cannot write " + name);
    return *this / name;
  }
  std::string read(const std::string& name) const {
    std::ifstream file(path_ / name, std::ios::binary);
    if (!file) throw std::runtime_error("cannot read " + name);
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  std::filesystem::path path_;
};

// The message of the Error that `work` throws, without the folder's name; "no error" when it throws none.
template <class Work>
std::string error_of(const TestFolder& folder, Work&& work) {
  try {
    work();
  } catch (const Error& error) {
    std::string message = error.what();
    for (size_t at; (at = message.find(folder.path() + "/")) != message.npos;)
      message.erase(at, folder.path().size() + 1);
    return message;
  }
  return "no error";
}

}  // namespace strata
