// The file behind the NVMe tier, read and written whole tensors at a time (plain calls).
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
namespace strata {
inline constexpr int64_t kNvmeAlignment = 4096;
class NvmeStore {
 public:
  struct Options {
    std::string directory;
    int64_t bytes = 0;
    int depth = 16;
    int64_t block = 1 << 20;
  };
  explicit NvmeStore(const Options& o);
  ~NvmeStore();
  class Channel {
   public:
    explicit Channel(int fd) : fd_(fd) {}
    void read(int64_t offset, void* to, int64_t bytes, std::string_view name);
    void write(int64_t offset, const void* from, int64_t bytes, std::string_view name);

   private:
    int fd_;
  };
  Channel channel() { return Channel(fd_); }
  bool direct() const { return true; }
  std::string note() const { return ""; }

 private:
  int fd_ = -1;
};
}  // namespace strata
