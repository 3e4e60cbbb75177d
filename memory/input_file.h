// A file read piece by piece at any place, without mapping it: what is read counts once, where the caller puts it, and
// a disk that fails is an error and no signal.
#pragma once
#include <cstddef>
#include <span>
#include <string>
#include <utility>

namespace strata {

class InputFile {
 public:
  explicit InputFile(const std::string& path);  // throws Error naming the file: cannot open it, not a regular file
  ~InputFile();
  InputFile(InputFile&& other) noexcept
      : path_(std::move(other.path_)), file_(std::exchange(other.file_, -1)), size_(other.size_) {}
  InputFile& operator=(InputFile&&) = delete;
  size_t size() const { return size_; }  // bytes, when it was opened
  // Fills `out` from byte `offset` on. Throws Error (failed) when the file does not give that much.
  void read_at(size_t offset, std::span<std::byte> out) const;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int file_ = -1;
  size_t size_ = 0;
};

// A whole small file. Throws Error when it is larger than `most` bytes.
std::string read_text(const std::string& path, size_t most = size_t{256} << 20);

}  // namespace strata
