// The NVMe tier: a preallocated file on each of its disks, read and written with io_uring and direct I/O, all at once.
// What lies where comes from the plan, over how many files it spreads from Stripes; nothing outlives the process.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "memory/directory_lock.h"
#include "memory/stripes.h"

namespace strata {

// Direct I/O takes offsets, sizes and addresses of this many bytes and their multiples.
inline constexpr int64_t kNvmeAlignment = 4096;

class NvmeStore {
 public:
  // What tests break on purpose.
  struct Faults {
    // Called with the file of each request and the offset there. 0: none; negative: it ends with this -errno; positive:
    // it moves at most so many bytes. Called by all threads that use channels.
    std::function<int(size_t file, int64_t offset)> request;
    bool no_ring = false;    // as a kernel without io_uring
    bool no_direct = false;  // as a file system without direct I/O
  };
  struct Options {
    std::vector<std::string> directories;  // one a file
    Stripes stripes = Stripes::even(directories.size());
    int64_t bytes = 0;        // of all files together, a multiple of kNvmeAlignment
    int depth = 16;           // requests a channel keeps in flight, of each file
    int64_t block = 1 << 20;  // most bytes of one request, a multiple of kNvmeAlignment
    Faults faults;
  };
  class Channel;

  // Throws Error (usage) when a directory is missing, not writable, too full, or in use by another run.
  explicit NvmeStore(Options options);
  // Throws what the constructor would throw now, but takes no space and leaves nothing behind.
  static void look(const Options& options);
  ~NvmeStore();  // gives the space back; every channel must be gone
  NvmeStore(const NvmeStore&) = delete;
  NvmeStore& operator=(const NvmeStore&) = delete;

  Channel channel() const;  // throws Error (failed) when the kernel refuses a further ring
  int64_t bytes() const { return options_.bytes; }
  bool direct() const;        // false: some file is read and written through the page cache
  int file(size_t of) const;  // its descriptor
  // What is slower here than it should be and why, in sentences; empty when all is well.
  const std::string& note() const { return note_; }

 private:
  class File;
  using Files = std::vector<std::unique_ptr<File>>;
  static Files open_files(const Options& options);
  void choose_ring();

  Options options_;
  Files files_;
  bool ring_ = false;
  std::string note_;
};

// A way to the files with its own ring: one thread at a time uses one channel, different channels may run at once.
class NvmeStore::Channel {
 public:
  Channel(Channel&&) noexcept;
  Channel& operator=(Channel&&) noexcept;
  ~Channel();
  // Both return when all bytes are there, and allocate nothing. Offset, address and bytes are multiples of
  // kNvmeAlignment. On an I/O error they wait for what is in flight, then throw Error (failed) with the tensor's
  // `name`; what the destination holds then is unspecified, and the channel can be used again.
  void read(int64_t offset, void* to, int64_t bytes, std::string_view name);
  void write(int64_t offset, const void* from, int64_t bytes, std::string_view name);

 private:
  friend class NvmeStore;
  struct State;
  explicit Channel(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace strata
