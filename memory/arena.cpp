// Arena on anonymous mmap; see arena.h.
#include "memory/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "strata/error.h"

namespace strata {

Arena::Arena(int64_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* pages = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED)
    throw Error("cannot allocate an arena of " + std::to_string(bytes) + " bytes: " + std::strerror(errno) +
                    ". Set device.memory to what the machine has and let the plan say what would help.",
                ExitCode::failed);
  base_ = static_cast<std::byte*>(pages);
  madvise(pages, size_t(bytes), MADV_HUGEPAGE);  // a hint: without huge pages everything works, a little slower
}

void Arena::share(int file, int64_t bytes) {
  STRATA_CHECK(bytes <= bytes_);
  if (bytes == 0) return;
  if (mmap(base_, size_t(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED)
    throw Error(
        "cannot map " + std::to_string(bytes) + " bytes of memory that ranks share: " + std::strerror(errno) + ".",
        ExitCode::failed);
  madvise(base_, size_t(bytes), MADV_HUGEPAGE);
}

int memory_file(int64_t bytes) {
  const int file = memfd_create("strata", MFD_CLOEXEC);
  if (file >= 0 && ftruncate(file, bytes) == 0) return file;
  const std::string why = std::strerror(errno);
  if (file >= 0) close(file);
  throw Error("cannot make shared memory of " + std::to_string(bytes) + " bytes: " + why + ".", ExitCode::failed);
}

Arena::~Arena() {
  if (base_) munmap(base_, size_t(bytes_));
}

}  // namespace strata
