// MappedFile on mmap(2); see mapped_file.h.
#include "memory/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "strata/error.h"

namespace strata {

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw Error(path + ": cannot open it: " + std::strerror(errno) + ".");
  struct stat status {};
  const bool regular = fstat(file, &status) == 0 && S_ISREG(status.st_mode);
  if (regular && status.st_size > 0) {
    void* data = mmap(nullptr, size_t(status.st_size), PROT_READ, MAP_PRIVATE, file, 0);
    const int problem = errno;
    if (data == MAP_FAILED) {
      close(file);
      throw Error(path + ": cannot map it: " + std::strerror(problem) + ".");
    }
    data_ = static_cast<const std::byte*>(data);
    size_ = size_t(status.st_size);
  }
  close(file);
  if (!regular) throw Error(path + ": is not a regular file.");
}

MappedFile::~MappedFile() {
  if (data_) munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace strata
