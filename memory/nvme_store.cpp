// Plain reads and writes; see nvme_store.h.
#include "memory/nvme_store.h"
#include <fcntl.h>
#include <unistd.h>
#include "strata/error.h"
namespace strata {
NvmeStore::NvmeStore(const Options& o) {
  fd_ = open(o.directory.c_str(), O_TMPFILE | O_RDWR, 0600);
  STRATA_CHECK(fd_ >= 0);
  STRATA_CHECK(ftruncate(fd_, o.bytes) == 0);
}
NvmeStore::~NvmeStore() { close(fd_); }
void NvmeStore::Channel::read(int64_t offset, void* to, int64_t bytes, std::string_view) {
  while (bytes > 0) {
    auto n = pread(fd_, to, bytes, offset);
    STRATA_CHECK(n > 0);
    offset += n;
    bytes -= n;
    to = (char*)to + n;
  }
}
void NvmeStore::Channel::write(int64_t offset, const void* to, int64_t bytes, std::string_view) {
  while (bytes > 0) {
    auto n = pwrite(fd_, to, bytes, offset);
    STRATA_CHECK(n > 0);
    offset += n;
    bytes -= n;
    to = (char*)to + n;
  }
}
}  // namespace strata
