// One block of memory of a tier, allocated once. Hands out nothing itself: offsets come from the plan.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

namespace strata {

// A file without a name in memory, of so many zeros, for Arena::share; the caller closes it.
int memory_file(int64_t bytes);

// Pages of host memory, zero until written; huge pages where the system gives them. Owns them.
class Arena {
 public:
  Arena() = default;
  explicit Arena(int64_t bytes);  // throws Error (failed) when the system refuses
  // Puts the file's memory in the place of the first `bytes` bytes, whole pages: what others write there is seen here.
  void share(int file, int64_t bytes);
  ~Arena();
  Arena(Arena&& other) noexcept { *this = std::move(other); }
  Arena& operator=(Arena&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  std::byte* base() const { return base_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* base_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace strata
