// cuFile, opened when the first file is; see direct_storage.h.
#include "cuda/direct_storage.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "cuda/cufile.h"
#include "cuda/library.h"
#include "strata/error.h"

namespace strata::cuda {
namespace {

constexpr const char* kAdvice =
    ", or leave out device.direct_storage: what rests on NVMe then goes through host memory.";

void must(CUfileError_t result, const std::string& what) {
  if (result.err != 0)
    throw Error(what + " (cuFile's error " + std::to_string(result.err) +
                (result.cu_err != 0 ? ", CUDA's " + std::to_string(result.cu_err) : std::string()) +
                "; its log, cufile.log, may say more). Check that the disk's file system and driver take part in "
                "GPUDirect Storage (NVIDIA's gdscheck tells)" +
                kAdvice);
}

struct CuFile {
  const Library library{"libcufile.so.0",
                        "install the package libcufile-" + std::to_string(CUDART_VERSION / 1000) + "-" +
                            std::to_string(CUDART_VERSION % 1000 / 10) +
                            " of NVIDIA's repository or set LD_LIBRARY_PATH" + kAdvice,
                        "is it another version of cuFile?"};
  decltype(&cuFileHandleRegister) add = STRATA_SYMBOL(library, cuFileHandleRegister);
  decltype(&cuFileHandleDeregister) remove = STRATA_SYMBOL(library, cuFileHandleDeregister);
  decltype(&cuFileBufRegister) add_memory = STRATA_SYMBOL(library, cuFileBufRegister);
  decltype(&cuFileBufDeregister) remove_memory = STRATA_SYMBOL(library, cuFileBufDeregister);
  decltype(&cuFileRead) read = STRATA_SYMBOL(library, cuFileRead);
  decltype(&cuFileWrite) write = STRATA_SYMBOL(library, cuFileWrite);
  CuFile() { must(STRATA_SYMBOL(library, cuFileDriverOpen)(), "cuFile does not start"); }
};

const CuFile& cufile() {
  static const CuFile& one = *new CuFile;
  return one;
}

class DirectFile final : public DeviceFile {
 public:
  DirectFile(int device, int file, void* memory, int64_t bytes)
      : device_(device), base_(static_cast<std::byte*>(memory)) {
    if (cudaSetDevice(device_) != cudaSuccess)
      throw Error("cannot use CUDA device " + std::to_string(device_) + ".", ExitCode::failed);
    CUfileDescr_t description{};
    description.type = 1;
    description.handle.fd = file;
    must(cufile().add(&handle_, &description), "cuFile does not take the file of the NVMe directory");
    // Else cuFile would stage in memory of the device that no plan knows.
    const CUfileError_t result = cufile().add_memory(base_, size_t(bytes), 0);
    if (result.err != 0) cufile().remove(handle_);
    must(result, "cuFile does not take the device's " + bytes_text(bytes));
  }
  ~DirectFile() override {
    cufile().remove_memory(base_);
    cufile().remove(handle_);
  }
  void read(int64_t offset, void* to, int64_t bytes) override {
    const auto at = static_cast<std::byte*>(to) - base_;
    transfer("read", bytes, [&](int64_t done, int64_t part) {
      return cufile().read(handle_, base_, size_t(part), offset + done, at + done);
    });
  }
  void write(int64_t offset, const void* from, int64_t bytes) override {
    const auto at = static_cast<const std::byte*>(from) - base_;
    transfer("write", bytes, [&](int64_t done, int64_t part) {
      return cufile().write(handle_, base_, size_t(part), offset + done, at + done);
    });
  }

 private:
  template <class Move>
  void transfer(const char* what, int64_t bytes, Move&& move) const {
    constexpr int64_t kMost = int64_t{1} << 30;  // a call of Linux moves no more than 2 GiB less a page
    cudaSetDevice(device_);                      // of this thread, as cuFile asks
    for (int64_t done = 0; done < bytes;) {
      const ssize_t moved = move(done, std::min(kMost, bytes - done));
      if (moved == -1 && errno == EINTR) continue;
      if (moved <= 0)
        throw Error(std::string("cannot ") + what + ": " +
                        (moved == 0    ? "the file ends"
                         : moved == -1 ? std::strerror(errno)
                                       : "cuFile's error " + std::to_string(-moved)),
                    ExitCode::failed);
      done += moved;
    }
  }

  int device_;
  std::byte* base_;
  CUfileHandle_t handle_ = nullptr;
};

}  // namespace

std::unique_ptr<DeviceFile> open_direct(int device, int file, void* memory, int64_t bytes) {
  return std::make_unique<DirectFile>(device, file, memory, bytes);
}

}  // namespace strata::cuda
