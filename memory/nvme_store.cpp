// NvmeStore on liburing; see nvme_store.h.
#include "memory/nvme_store.h"

#include <fcntl.h>
#include <liburing.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "strata/error.h"
#include "strata/tensor.h"

namespace strata {
namespace {

bool aligned(int64_t value) { return value % kNvmeAlignment == 0; }

// Zero, or -errno. No flags: at these block sizes the ones for fewer interrupts change nothing that can be measured.
int open_ring(int depth, io_uring* ring) { return io_uring_queue_init(unsigned(depth), ring, 0); }

// At most one block on its way, or what is left of it.
struct Request {
  size_t file = 0;
  int64_t offset = 0;  // there
  std::byte* memory = nullptr;
  int64_t left = 0;
  int fault = 0;  // see NvmeStore::Faults
};

// Moves the request on by what a system call or a completion said; returns 0, or the errno to stop with.
int advance(Request& request, int result) {
  if (result == -EINTR || result == -EAGAIN) return 0;
  if (result < 0) return -result;
  // Direct I/O goes on only at aligned places, so the odd rest is done again. Nothing done: the file was cut short.
  const int64_t done = result / kNvmeAlignment * kNvmeAlignment;
  if (done == 0) return EIO;
  request.offset += done;
  request.memory += done;
  request.left -= done;
  return 0;
}

}  // namespace

// One file with its lock; gives the space back when it goes.
class NvmeStore::File {
 public:
  File(const std::string& directory, const Faults& faults)
      : called_("the NVMe directory " + directory), lock_(directory, "strata-nvme.lock", called_), faults_(faults) {
    // The name is gone before the file has a size: a killed run leaves no data. The lock makes the name ours.
    const std::string path = directory + "/strata-nvme.data";
    unlink(path.c_str());
    file_ = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file_ < 0) refuse(std::string("cannot take a file: ") + std::strerror(errno));
    unlink(path.c_str());
  }
  ~File() {
    if (file_ >= 0) close(file_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // `all`: the bytes of all files together. Unless it `takes` them it only looks whether there is room.
  void reserve(int64_t bytes, int64_t all, bool takes) const;
  // Returns what is slower than it should be, if anything is.
  std::string choose_direct();

  int descriptor() const { return file_; }
  bool direct() const { return direct_; }
  const std::string& called() const { return called_; }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(called_ + " " + what + ". Free some space, or name another one.");
  }
  std::string called_;  // the directory in messages
  DirectoryLock lock_;
  const Faults& faults_;
  int file_ = -1;
  bool direct_ = false;
};

// All disks are asked for room before one is taken on any (reserve), so that a hopeless size does not fill them for
// others before it fails.
NvmeStore::Files NvmeStore::open_files(const Options& options) {
  STRATA_CHECK(options.bytes > 0 && aligned(options.bytes));
  STRATA_CHECK(options.stripes.files() == options.directories.size());
  Files files;
  for (const std::string& directory : options.directories)
    files.push_back(std::make_unique<File>(directory, options.faults));
  for (size_t f = 0; f < files.size(); ++f)
    files[f]->reserve(options.stripes.bytes_of(f, options.bytes), options.bytes, false);
  return files;
}

void NvmeStore::look(const Options& options) { open_files(options); }

NvmeStore::NvmeStore(Options options) : options_(std::move(options)), files_(open_files(options_)) {
  STRATA_CHECK(options_.block > 0 && options_.block <= (1 << 30) && aligned(options_.block));
  STRATA_CHECK(options_.depth > 0);
  for (size_t f = 0; f < files_.size(); ++f)
    files_[f]->reserve(options_.stripes.bytes_of(f, options_.bytes), options_.bytes, true);
  for (const auto& file : files_)
    if (const std::string slower = file->choose_direct(); !slower.empty()) note_ += (note_.empty() ? "" : " ") + slower;
  choose_ring();
}

NvmeStore::~NvmeStore() = default;

bool NvmeStore::direct() const {
  return std::all_of(files_.begin(), files_.end(), [](const auto& file) { return file->direct(); });
}

int NvmeStore::file(size_t of) const { return files_[of]->descriptor(); }

void NvmeStore::File::reserve(int64_t bytes, int64_t all, bool takes) const {
  if (bytes == 0) return;
  struct statvfs status {};
  const bool known = fstatvfs(file_, &status) == 0;
  const int64_t free = known ? int64_t(status.f_bavail) * int64_t(status.f_frsize) : 0;
  int problem = ENOSPC;
  if (!known || free >= bytes) {
    if (!takes) return;
    do problem = posix_fallocate(file_, 0, bytes);
    while (problem == EINTR);
  }
  if (problem == 0) return;
  const std::string needed = "cannot hold " + (bytes == all ? "the " : "its " + bytes_text(bytes) + " of the ") +
                             bytes_text(all) + " that offloading needs";
  if (problem == ENOSPC && known) refuse(needed + ": " + bytes_text(free) + " are free");
  refuse(needed + ": " + std::strerror(problem));
}

std::string NvmeStore::File::choose_direct() {
  // Some file systems take the flag and refuse the first request, so one is tried.
  void* page = std::aligned_alloc(kNvmeAlignment, kNvmeAlignment);
  STRATA_CHECK(page);
  std::memset(page, 0, kNvmeAlignment);
  direct_ = !faults_.no_direct && fcntl(file_, F_SETFL, O_DIRECT) == 0 &&
            (pwrite(file_, page, kNvmeAlignment, 0) == kNvmeAlignment || errno != EINVAL);
  std::free(page);
  if (direct_) return "";
  fcntl(file_, F_SETFL, 0);
  return called_ +
         " is on a file system without direct I/O: offloading goes through the system's page cache, which is "
         "slower and takes memory beyond the budget.";
}

void NvmeStore::choose_ring() {
  io_uring ring;
  const int result = options_.faults.no_ring ? -ENOSYS : open_ring(options_.depth * int(files_.size()), &ring);
  ring_ = result == 0;
  if (ring_) return io_uring_queue_exit(&ring);
  note_ += std::string(note_.empty() ? "" : " ") + "io_uring is not available here (" + std::strerror(-result) +
           "): offloading has one request at a time in flight, which is slower.";
}

// The ring and the requests on it, and the loop that keeps it full: so many requests of each file, so that none waits
// for a slower one. Files are not registered with the ring: that saves nothing at these block sizes, and the kernel
// would give the space back only some time after the ring is closed.
struct NvmeStore::Channel::State {
  enum class Operation { read, write };

  explicit State(const NvmeStore& opened) : store(opened), taken(opened.files_.size()) {
    if (!store.ring_) return;
    requests.resize(size_t(store.options_.depth) * store.files_.size());
    for (size_t r = 0; r < requests.size(); ++r) requests[r].file = r % store.files_.size();
    if (const int result = open_ring(int(requests.size()), &ring); result < 0) {
      throw Error(std::string("offloading cannot have a further io_uring: ") + std::strerror(-result) +
                      ". Raise the limits on open files and locked memory (ulimit -n, ulimit -l).",
                  ExitCode::failed);
    }
  }
  ~State() {
    if (store.ring_) io_uring_queue_exit(&ring);
  }

  void transfer(Operation wanted, int64_t offset, std::byte* memory, int64_t bytes, std::string_view name) {
    STRATA_CHECK(aligned(offset) && aligned(bytes) && aligned(int64_t(reinterpret_cast<uintptr_t>(memory))));
    STRATA_CHECK(offset >= 0 && bytes >= 0 && bytes <= store.bytes() && offset <= store.bytes() - bytes);
    operation = wanted;
    begin = offset, end = offset + bytes, base = memory;
    std::fill(taken.begin(), taken.end(), begin);
    problem = 0;
    store.ring_ ? run_ring() : run_blocking();
    if (problem == 0) return;
    throw Error(store.files_[problem_file]->called() + ": cannot " + (operation == Operation::read ? "read" : "write") +
                    " tensor \"" + std::string(name) + "\" at byte " + std::to_string(problem_offset) +
                    " of the file there: " + std::strerror(problem) +
                    ". Check the disk, or name another directory, and resume from the last checkpoint.",
                ExitCode::failed);
  }

  void run_ring() {
    int in_flight = 0;
    for (Request& request : requests) {
      request.left = 0;
      if (!take(request)) continue;
      start(request);
      ++in_flight;
    }
    while (in_flight > 0) {
      const int result = io_uring_submit_and_wait(&ring, 1);
      // Any other error would leave requests in flight that nobody can wait for.
      STRATA_CHECK(result >= 0 || result == -EINTR || result == -EAGAIN || result == -EBUSY);
      io_uring_cqe* completion;
      while (io_uring_peek_cqe(&ring, &completion) == 0) {
        Request& request = *static_cast<Request*>(io_uring_cqe_get_data(completion));
        finish(request, completion->res);
        io_uring_cqe_seen(&ring, completion);
        if (go_on(request)) {
          start(request);
        } else {
          --in_flight;
        }
      }
    }
  }

  void run_blocking() {
    for (size_t f = 0; f < store.files_.size(); ++f) {
      Request request{.file = f};
      while (go_on(request)) {
        const size_t count = admit(request);
        const ssize_t done = operation == Operation::read
                                 ? pread(store.file(f), request.memory, count, request.offset)
                                 : pwrite(store.file(f), request.memory, count, request.offset);
        finish(request, done < 0 ? -errno : int(done));
      }
    }
  }

  // Gives the request the next block of the transfer that is in its file; false when there is none.
  bool take(Request& request) {
    const Stripes::Run run = store.options_.stripes.next(request.file, taken[request.file], end);
    if (run.bytes == 0) return false;
    const int64_t part = std::min(run.bytes, store.options_.block);
    request = {request.file, run.in_file, base + (run.offset - begin), part};
    taken[request.file] = run.offset + part;
    return true;
  }

  // Whether the request is to be started again, for its own rest or the next block. After an error nothing starts.
  bool go_on(Request& request) { return problem == 0 && (request.left > 0 || take(request)); }

  // How many bytes the request may move now.
  unsigned admit(Request& request) {
    request.fault = store.options_.faults.request ? store.options_.faults.request(request.file, request.offset) : 0;
    return unsigned(request.fault > 0 ? std::min<int64_t>(request.left, request.fault) : request.left);
  }

  void start(Request& request) {
    const unsigned count = admit(request);
    io_uring_sqe* entry = io_uring_get_sqe(&ring);
    STRATA_CHECK(entry);  // the ring has as many entries as there are requests
    if (operation == Operation::read) {
      io_uring_prep_read(entry, store.file(request.file), request.memory, count, uint64_t(request.offset));
    } else {
      io_uring_prep_write(entry, store.file(request.file), request.memory, count, uint64_t(request.offset));
    }
    io_uring_sqe_set_data(entry, &request);
  }

  void finish(Request& request, int result) {
    const int64_t offset = request.offset;
    const int failed = advance(request, request.fault < 0 ? request.fault : result);
    if (failed == 0 || problem != 0) return;
    problem = failed;
    problem_file = request.file;
    problem_offset = offset;
  }

  const NvmeStore& store;
  io_uring ring{};
  std::vector<Request> requests;
  Operation operation = Operation::read;
  // Of the transfer: the bytes of the tier from and to memory at `base`, and by file those that requests have taken.
  int64_t begin = 0, end = 0;
  std::byte* base = nullptr;
  std::vector<int64_t> taken;
  int problem = 0;
  size_t problem_file = 0;
  int64_t problem_offset = 0;
};

NvmeStore::Channel NvmeStore::channel() const { return Channel(std::make_unique<Channel::State>(*this)); }

NvmeStore::Channel::Channel(std::unique_ptr<State> state) : state_(std::move(state)) {}
NvmeStore::Channel::Channel(Channel&&) noexcept = default;
NvmeStore::Channel& NvmeStore::Channel::operator=(Channel&&) noexcept = default;
NvmeStore::Channel::~Channel() = default;

void NvmeStore::Channel::read(int64_t offset, void* to, int64_t bytes, std::string_view name) {
  state_->transfer(State::Operation::read, offset, static_cast<std::byte*>(to), bytes, name);
}

void NvmeStore::Channel::write(int64_t offset, const void* from, int64_t bytes, std::string_view name) {
  auto* memory = static_cast<std::byte*>(const_cast<void*>(from));  // Request serves both ways; a write only reads it
  state_->transfer(State::Operation::write, offset, memory, bytes, name);
}

}  // namespace strata
