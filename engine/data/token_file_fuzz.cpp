// libFuzzer target for the token file parser: whatever the bytes are, opening either throws Error or gives a file whose
// every token can be read, with the vocabulary check in agreement. Build with -DSTRATA_FUZZ=ON and clang.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "engine/data/token_file.h"
#include "strata/error.h"

namespace {

// A file in memory with the given bytes and a path that opens it.
class MemoryFile {
 public:
  MemoryFile(const uint8_t* data, size_t size) : file_(memfd_create("fuzz", 0)) {
    if (file_ < 0 || write(file_, data, size) != ssize_t(size)) std::abort();
  }
  ~MemoryFile() { close(file_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  std::string path() const { return "/proc/self/fd/" + std::to_string(file_); }

 private:
  int file_;
};

void check(const strata::TokenFile& file, int64_t vocabulary) {
  std::vector<int32_t> tokens(static_cast<size_t>(file.tokens()));
  file.read(0, file.tokens(), tokens.data());
  int64_t expected = -1;
  for (size_t i = 0; expected < 0 && i < tokens.size(); ++i)
    if (int64_t(uint32_t(tokens[i])) >= vocabulary) expected = int64_t(i);
  if (file.first_at_least(vocabulary) != expected) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const MemoryFile memory(data, size);
  try {
    const strata::TokenFile file(memory.path());
    for (const int64_t vocabulary : {int64_t{1}, int64_t{256}, int64_t{65535}, int64_t{65536}, int64_t{INT32_MAX}})
      check(file, vocabulary);
  } catch (const strata::Error&) {
  }
  return 0;
}
