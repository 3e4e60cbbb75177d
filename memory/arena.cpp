// Arena on anonymous mmap; see arena.h.
#include "memory/arena.h"

#include <sys/mman.h>

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

Arena::~Arena() {
  if (base_) munmap(base_, size_t(bytes_));
}

}  // namespace strata
