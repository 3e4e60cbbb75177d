// InputFile on pread(2); see input_file.h.
#include "memory/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "strata/error.h"

namespace strata {

InputFile::InputFile(const std::string& path) : path_(path) {
  file_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe without a writer would not open otherwise
  if (file_ < 0) throw Error(path + ": cannot open it: " + std::strerror(errno) + ".");
  struct stat status {};
  if (fstat(file_, &status) != 0 || !S_ISREG(status.st_mode)) {
    close(file_);
    throw Error(path + ": is not a regular file.");
  }
  size_ = size_t(status.st_size);
}

InputFile::~InputFile() {
  if (file_ >= 0) close(file_);
}

void InputFile::read_at(size_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t count = pread(file_, out.data(), std::min<size_t>(out.size(), 1 << 30), off_t(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw Error(path_ + ": cannot read it: " + std::strerror(errno) + ".", ExitCode::failed);
    if (count == 0)
      throw Error(path_ + ": ends at byte " + std::to_string(offset) + "; it was longer when it was opened.",
                  ExitCode::failed);
    out = out.subspan(size_t(count));
    offset += size_t(count);
  }
}

std::string read_text(const std::string& path, size_t most) {
  const InputFile file(path);
  if (file.size() > most)
    throw Error(path + ": has " + std::to_string(file.size()) + " bytes; at most " + std::to_string(most) +
                " were expected.");
  std::string text(file.size(), '\0');
  file.read_at(0, std::as_writable_bytes(std::span(text)));
  return text;
}

}  // namespace strata
