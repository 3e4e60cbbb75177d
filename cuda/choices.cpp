// A line a choice: hexadecimal digits, a space, the key. The first line of a key counts; see choices.h.
#include "cuda/choices.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <optional>
#include <string_view>

namespace strata::cuda {
namespace {

std::string hexadecimal(std::string_view bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char c : bytes) text += {kDigits[uint8_t(c) >> 4], kDigits[uint8_t(c) & 15]};
  return text;
}

std::optional<std::string> bytes_of(std::string_view text) {
  std::string bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    int value = 0;
    for (const char c : text.substr(i, 2)) {
      const size_t digit = std::string_view("0123456789abcdef").find(c);
      if (digit == std::string_view::npos) return {};
      value = value * 16 + int(digit);
    }
    bytes += char(value);
  }
  return text.empty() || text.size() % 2 ? std::nullopt : std::optional(bytes);
}

// Unlocked when closed, and when the process ends.
struct LockedFile {
  int file = -1;
  explicit LockedFile(const std::string& path)
      : file(open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644)) {
    if (file >= 0 && flock(file, LOCK_EX) != 0) close(file), file = -1;
  }
  ~LockedFile() {
    if (file >= 0) close(file);
  }
  LockedFile(const LockedFile&) = delete;
  std::string text() const {
    struct stat info;
    if (fstat(file, &info) != 0) return "";
    std::string text(size_t(info.st_size), '\0');
    const ssize_t got = pread(file, text.data(), text.size(), 0);
    text.resize(got > 0 ? size_t(got) : 0);
    return text;
  }
};

}  // namespace

Choices::Choices(std::string path) : path_(std::move(path)) {}

std::string Choices::get(const std::string& key, const std::function<std::string()>& measure,
                         const std::function<std::string()>& otherwise) const {
  if (path_.empty()) return otherwise();
  std::error_code ignored;
  std::filesystem::create_directories(std::filesystem::path(path_).parent_path(), ignored);
  const LockedFile file(path_);
  if (file.file < 0) return otherwise();
  const std::string text = file.text();
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\n', at);
    if (end == std::string::npos) break;  // a process ended while it wrote
    const std::string_view line = std::string_view(text).substr(at, end - at);
    at = end + 1;
    const size_t space = line.find(' ');
    if (space == std::string_view::npos || line.substr(space + 1) != key) continue;
    if (auto bytes = bytes_of(line.substr(0, space))) return *bytes;
  }
  const std::string bytes = measure();
  const std::string line = (text.empty() || text.back() == '\n' ? "" : "\n") + hexadecimal(bytes) + " " + key + "\n";
  return write(file.file, line.data(), line.size()) == ssize_t(line.size()) ? bytes : otherwise();
}

}  // namespace strata::cuda
