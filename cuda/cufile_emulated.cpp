// cuFile on the emulated runtime: memory must be registered, and no call moves more than a few pages at once.
#include "cuda/cufile.h"

#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

#include "cuda/emulated/machine.h"

namespace {

constexpr size_t kMost = 5 << 12;
constexpr int kNotStarted = 5001, kInvalid = 5004;  // CUfileOpError: driver not initialized, invalid value

std::mutex mutex;
std::map<const void*, size_t> registered;
bool started = false;

bool is_registered(const void* base, size_t size, off_t offset) {
  const std::lock_guard lock(mutex);
  const auto found = registered.find(base);
  return found != registered.end() && offset >= 0 && size_t(offset) + size <= found->second;
}

// Moves bytes by way of host memory, which direct I/O wants aligned.
template <class Move>
ssize_t move(CUfileHandle_t handle, void* base, size_t size, off_t address_offset, Move&& transfer) {
  if (!is_registered(base, size, address_offset)) return -kInvalid;
  size = std::min(size, kMost);
  const std::unique_ptr<void, decltype(&std::free)> pages(std::aligned_alloc(4096, kMost), &std::free);
  return transfer(*static_cast<int*>(handle), pages.get(), static_cast<char*>(base) + address_offset, size);
}

}  // namespace

CUfileError_t cuFileDriverOpen() {
  started = strata::cuda::machine().direct_storage;
  return {started ? 0 : kNotStarted, 0};
}
CUfileError_t cuFileHandleRegister(CUfileHandle_t* handle, CUfileDescr_t* description) {
  if (!started) return {kNotStarted, 0};
  if (description->type != 1 || !strata::cuda::machine().direct_storage) return {kInvalid, 0};
  *handle = new int(description->handle.fd);
  return {0, 0};
}
void cuFileHandleDeregister(CUfileHandle_t handle) { delete static_cast<int*>(handle); }
CUfileError_t cuFileBufRegister(const void* base, size_t length, int) {
  const std::lock_guard lock(mutex);
  return {registered.emplace(base, length).second ? 0 : kInvalid, 0};
}
CUfileError_t cuFileBufDeregister(const void* base) {
  const std::lock_guard lock(mutex);
  return {registered.erase(base) > 0 ? 0 : kInvalid, 0};
}
ssize_t cuFileRead(CUfileHandle_t handle, void* base, size_t size, off_t file_offset, off_t address_offset) {
  return move(handle, base, size, address_offset, [&](int file, void* pages, void* memory, size_t bytes) -> ssize_t {
    const ssize_t got = pread(file, pages, bytes, file_offset);
    if (got > 0 && !strata::cuda::copy_now(memory, pages, size_t(got))) return -kInvalid;
    return got;
  });
}
ssize_t cuFileWrite(CUfileHandle_t handle, const void* base, size_t size, off_t file_offset, off_t address_offset) {
  return move(handle, const_cast<void*>(base), size, address_offset,
              [&](int file, void* pages, void* memory, size_t bytes) -> ssize_t {
                if (!strata::cuda::copy_now(pages, memory, bytes)) return -kInvalid;
                return pwrite(file, pages, bytes, file_offset);
              });
}
