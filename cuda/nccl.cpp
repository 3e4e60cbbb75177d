// NCCL behind strata/communicator.h, opened when the first group is made; see nccl.h.
#include "cuda/nccl.h"

#include <cuda_runtime.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "cuda/library.h"
#include "strata/error.h"
#include "strata/threads.h"

namespace strata::cuda {
namespace {

using Clock = std::chrono::steady_clock;

struct Nccl {
  const Library library{
      "libnccl.so.2",
      "install the package libnccl2 of NVIDIA's repository or set LD_LIBRARY_PATH, or exchange through "
      "host memory with network.provider = \"tcp\" or \"shm\".",
      "NCCL 2.18 or newer is needed."};
  decltype(&ncclGetUniqueId) unique_id = STRATA_SYMBOL(library, ncclGetUniqueId);
  decltype(&ncclCommInitRank) init = STRATA_SYMBOL(library, ncclCommInitRank);
  decltype(&ncclCommDestroy) destroy = STRATA_SYMBOL(library, ncclCommDestroy);
  decltype(&ncclCommAbort) abort = STRATA_SYMBOL(library, ncclCommAbort);
  decltype(&ncclCommGetAsyncError) state = STRATA_SYMBOL(library, ncclCommGetAsyncError);
  decltype(&ncclGetErrorString) text = STRATA_SYMBOL(library, ncclGetErrorString);
  decltype(&ncclGetLastError) last_error = STRATA_SYMBOL(library, ncclGetLastError);
  decltype(&ncclGroupStart) group_start = STRATA_SYMBOL(library, ncclGroupStart);
  decltype(&ncclGroupEnd) group_end = STRATA_SYMBOL(library, ncclGroupEnd);
  decltype(&ncclAllReduce) all_reduce = STRATA_SYMBOL(library, ncclAllReduce);
  decltype(&ncclReduceScatter) reduce_scatter = STRATA_SYMBOL(library, ncclReduceScatter);
  decltype(&ncclReduce) reduce = STRATA_SYMBOL(library, ncclReduce);
  decltype(&ncclAllGather) all_gather = STRATA_SYMBOL(library, ncclAllGather);
  decltype(&ncclBroadcast) broadcast = STRATA_SYMBOL(library, ncclBroadcast);
  decltype(&ncclSend) send = STRATA_SYMBOL(library, ncclSend);
  decltype(&ncclRecv) receive = STRATA_SYMBOL(library, ncclRecv);
};

const Nccl& nccl() {
  static const Nccl& one = *new Nccl;
  return one;
}

void must_copy(cudaError_t error) {
  if (error != cudaSuccess)
    throw Error(std::string("cannot copy within the CUDA device: ") + cudaGetErrorString(error) + ".",
                ExitCode::failed);
}

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return ncclFloat32;
    case DType::f64:
      return ncclFloat64;
    case DType::bf16:
      return ncclBfloat16;
    case DType::f16:
      return ncclFloat16;
    case DType::i32:
      return ncclInt32;
    default:
      throw Error("NCCL reduces no numbers of type " + std::string(name_of(dtype)) + ".", ExitCode::failed);
  }
}

class NcclGroup final : public Communicator {
 public:
  NcclGroup(World& world, std::string name, std::vector<int> members, int device, void* queue, double timeout_seconds)
      : world_(world),
        name_(std::move(name)),
        members_(std::move(members)),
        queue_(static_cast<cudaStream_t>(queue)),
        timeout_(timeout_seconds) {
    for (size_t i = 0; i < members_.size(); ++i)
      if (members_[i] == world.rank()) rank_ = int(i);
    ncclUniqueId id{};
    if (rank_ == 0) must(nccl().unique_id(&id), "ncclGetUniqueId");
    const std::string text = world.gather(std::string(id.internal, sizeof id.internal))[size_t(members_[0])];
    std::memcpy(id.internal, text.data(), sizeof id.internal);
    // NCCL waits for the others without end: on a thread of its own, so that this one can give up.
    struct Start {
      std::atomic<bool> done{false};
      ncclComm_t comm = nullptr;
      ncclResult_t result = ncclSuccess;
    };
    const auto start = std::make_shared<Start>();
    std::thread thread = start_thread("NCCL", [start, id, device, size = size(), rank = rank_] {
      cudaSetDevice(device);
      start->result = nccl().init(&start->comm, size, id, rank);
      start->done = true;
    });
    const auto began = Clock::now();
    try {
      while (!start->done) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        wait(std::chrono::duration<double>(Clock::now() - began).count());
      }
    } catch (...) {
      thread.detach();
      throw;
    }
    thread.join();
    must(start->result, "ncclCommInitRank");
    comm_ = start->comm;
    must_copy(cudaMalloc(&flag_, 4));
    void* progress = nullptr;
    must_copy(cudaHostAlloc(&progress, 8, cudaHostAllocPortable | cudaHostAllocMapped));
    std::memset(progress, 0, 8);
    progress_ = static_cast<volatile uint32_t*>(progress);
  }
  ~NcclGroup() override {
    if (comm_) nccl().destroy(comm_);
    cudaFree(flag_);
    cudaFreeHost(const_cast<uint32_t*>(progress_));
  }

  int rank() const override { return rank_; }
  int size() const override { return int(members_.size()); }
  bool asynchronous() const override { return true; }

  void all_reduce(const Pieces& data, DType dtype, Reduction reduction) override {
    grouped("all_reduce", [&] {
      for (const Piece& piece : data.list())
        must(nccl().all_reduce(piece.data, piece.data, count(piece, dtype), type_of(dtype), operation(reduction), comm_,
                               queue_),
             "ncclAllReduce");
    });
    bytes_sent_ += 2 * data.bytes() * (size() - 1) / size();
  }
  void reduce_scatter(const std::vector<Pieces>& parts, const Pieces& result, DType dtype,
                      Reduction reduction) override {
    const ncclDataType_t type = type_of(dtype);
    const auto count_of = [&](int64_t bytes) { return size_t(bytes / size_of(dtype)); };
    grouped("reduce_scatter", [&] {
      by_tensor(
          parts,
          [&](const Piece& first, int64_t at) {
            std::byte* const into = one_piece(result, at, first.bytes);
            if (into)
              must(nccl().reduce_scatter(first.data, into, count_of(first.bytes), type, operation(reduction), comm_,
                                         queue_),
                   "ncclReduceScatter");
            return into != nullptr;
          },
          [&](int root, const Piece& piece, int64_t at) {
            // Where it is not written, any place does.
            const Pieces to = root == rank_ ? result.part(at, at + piece.bytes) : Pieces{piece};
            to.over(0, piece.bytes, [&](std::byte* into, int64_t bytes, int64_t from) {
              must(nccl().reduce(piece.data + from, into, count_of(bytes), type, operation(reduction), root, comm_,
                                 queue_),
                   "ncclReduce");
            });
          });
    });
    for (int r = 0; r < size(); ++r)
      if (r != rank_) bytes_sent_ += parts[size_t(r)].bytes();
  }
  void all_gather(const std::vector<Pieces>& parts) override {
    grouped("all_gather", [&] {
      by_tensor(
          parts,
          [&](const Piece& first, int64_t) {
            must(nccl().all_gather(first.data + rank_ * first.bytes, first.data, size_t(first.bytes), ncclInt8, comm_,
                                   queue_),
                 "ncclAllGather");
            return true;
          },
          [&](int root, const Piece& piece, int64_t) {
            must(nccl().broadcast(piece.data, piece.data, size_t(piece.bytes), ncclInt8, root, comm_, queue_),
                 "ncclBroadcast");
          });
    });
    bytes_sent_ += parts[size_t(rank_)].bytes() * (size() - 1);
  }
  void broadcast(const Pieces& data, int root) override {
    grouped("broadcast", [&] {
      for (const Piece& piece : data.list())
        must(nccl().broadcast(piece.data, piece.data, size_t(piece.bytes), ncclInt8, root, comm_, queue_),
             "ncclBroadcast");
    });
    if (rank_ == root) bytes_sent_ += data.bytes();
  }
  void all_to_all(const std::vector<Pieces>& send, const std::vector<Pieces>& receive) override {
    Pieces from, to;
    grouped("all_to_all", [&] {
      for (int r = 0; r < size(); ++r) {
        if (r == rank_) continue;
        give(send[size_t(r)], r);
        take(receive[size_t(r)], r);
      }
    });
    both(send[size_t(rank_)], receive[size_t(rank_)],
         [&](std::byte* out, std::byte* in, int64_t bytes) { copy_bytes(in, out, bytes); });
  }
  void send(const Pieces& data, int to) override {
    grouped("send", [&] { give(data, to); });
  }
  void receive(const Pieces& data, int from) override {
    grouped("receive", [&] { take(data, from); });
  }
  void barrier() override {
    grouped("barrier",
            [&] { must(nccl().all_reduce(flag_, flag_, 1, ncclInt32, ncclMax, comm_, queue_), "ncclAllReduce"); });
  }
  void copy_bytes(void* to, const void* from, int64_t bytes) override {
    must_copy(cudaMemcpyAsync(to, from, size_t(bytes), cudaMemcpyDefault, queue_));
  }

  void copy_rows(void* to, int64_t to_step, const void* from, int64_t from_step, int64_t bytes, int64_t rows) override {
    if (bytes > 0 && rows > 0)
      must_copy(cudaMemcpy2DAsync(to, size_t(to_step), from, size_t(from_step), size_t(bytes), size_t(rows),
                                  cudaMemcpyDefault, queue_));
  }

  void watch() override {
    const uint32_t begun = progress_[0], done = progress_[1];
    const auto now = Clock::now();
    if (begun == done || done != seen_ || !waiting_) since_ = now;  // nothing waits, or something has come
    seen_ = done;
    waiting_ = begun != done;
    wait(std::chrono::duration<double>(now - since_).count());
    ncclResult_t state = ncclSuccess;
    if (comm_ && nccl().state(comm_, &state) == ncclSuccess) must(state, "an exchange");
  }
  void abort() override {
    if (comm_) nccl().abort(comm_);
    comm_ = nullptr;
  }

 private:
  static ncclRedOp_t operation(Reduction reduction) { return reduction == Reduction::sum ? ncclSum : ncclMax; }
  static size_t count(const Piece& piece, DType dtype) { return size_t(piece.bytes / size_of(dtype)); }

  // Takes pieces that follow each other in memory, one rank's after the other's, together: those are one tensor's.
  // Where all are of one size, one operation does for all ranks: even(rank 0's piece, where this rank's begins among
  // its bytes), which may decline. Otherwise uneven(rank, piece, where it begins among that rank's bytes) for each.
  template <class Even, class Uneven>
  void by_tensor(const std::vector<Pieces>& parts, Even&& even, Uneven&& uneven) {
    next_.assign(parts.size(), {});
    for (size_t first = 0; first < parts.size();) {
      const auto left = [&](size_t r) { return next_[r].piece < parts[r].list().size(); };
      if (!left(first)) {
        ++first;
        continue;
      }
      const Piece head = parts[first].list()[next_[first].piece];
      std::byte* end = head.data;
      size_t last = first, members = 0;
      for (size_t r = first; r < parts.size(); ++r) {
        Next& next = next_[r];
        next.joins = left(r) && parts[r].list()[next.piece].data == end;
        if (!next.joins) continue;
        last = r, ++members;
        end += parts[r].list()[next.piece].bytes;
      }
      bool alike = members == parts.size();
      for (size_t r = first; r <= last && alike; ++r) alike = parts[r].list()[next_[r].piece].bytes == head.bytes;
      const bool done = alike && even(head, next_[size_t(rank_)].at);
      for (size_t r = first; r <= last; ++r) {
        if (!next_[r].joins) continue;
        const Piece& piece = parts[r].list()[next_[r].piece];
        if (!done) uneven(int(r), piece, next_[r].at);
        next_[r].at += piece.bytes;
        ++next_[r].piece;
      }
    }
  }
  // The bytes [begin, begin + bytes) where they lie in one piece, else null.
  static std::byte* one_piece(const Pieces& pieces, int64_t begin, int64_t bytes) {
    std::byte* found = nullptr;
    pieces.over(begin, begin + bytes,
                [&](std::byte* data, int64_t n, int64_t) { found = n == bytes ? data : nullptr; });
    return found;
  }
  // Calls visit(from, to, bytes) along two sequences of equal length that are cut differently.
  template <class Visit>
  static void both(const Pieces& from, const Pieces& to, Visit&& visit) {
    from.over(0, from.bytes(), [&](std::byte* out, int64_t n, int64_t at) {
      to.over(at, at + n, [&](std::byte* in, int64_t m, int64_t into) { visit(out + into, in, m); });
    });
  }
  void give(const Pieces& data, int to) {
    for (const Piece& piece : data.list())
      must(nccl().send(piece.data, size_t(piece.bytes), ncclInt8, to, comm_, queue_), "ncclSend");
    bytes_sent_ += data.bytes();
  }
  void take(const Pieces& data, int from) {
    for (const Piece& piece : data.list())
      must(nccl().receive(piece.data, size_t(piece.bytes), ncclInt8, from, comm_, queue_), "ncclRecv");
  }

  template <class Calls>
  void grouped(const char* what, Calls&& calls) {
    if (!comm_) throw Error(std::string(what) + " on group \"" + name_ + "\", which has ended.", ExitCode::failed);
    count_up(progress_, queue_);
    must(nccl().group_start(), what);
    calls();
    must(nccl().group_end(), what);
    count_up(progress_ + 1, queue_);
  }
  void must(ncclResult_t result, const char* what) const {
    if (result == ncclSuccess || result == ncclInProgress) return;
    throw Error(std::string(what) + " on group \"" + name_ + "\" failed: " + nccl().text(result) + ": " +
                    nccl().last_error(comm_) + ".",
                ExitCode::failed);
  }
  // Throws when another rank has ended or was waited for for too long, which names those that did not come.
  void wait(double seconds) {
    world_.check();
    if (seconds <= timeout_) return;
    std::string ranks;
    for (const int rank : world_.missing(std::min(10.0, timeout_)))
      ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    throw Error(
        "group \"" + name_ + "\" waited " + std::to_string(int(timeout_)) + " s: " +
            (ranks.empty() ? "all ranks wait; is the network between them up?" : "rank " + ranks + " did not come") +
            ".",
        ExitCode::failed);
  }

  World& world_;
  std::string name_;
  std::vector<int> members_;  // of the world
  int rank_ = 0;
  cudaStream_t queue_;
  double timeout_;
  ncclComm_t comm_ = nullptr;
  void* flag_ = nullptr;                   // what a barrier reduces
  volatile uint32_t* progress_ = nullptr;  // operations begun and done in the queue, in pinned memory
  uint32_t seen_ = 0;
  bool waiting_ = false;
  Clock::time_point since_;
  struct Next {
    size_t piece = 0;  // of a rank's
    int64_t at = 0;    // bytes before it
    bool joins = false;
  };
  std::vector<Next> next_;  // by rank; see by_tensor
};

}  // namespace

std::unique_ptr<Communicator> nccl_group(World& world, const std::string& name, const std::vector<int>& members,
                                         int device, void* queue, double timeout_seconds) {
  return std::make_unique<NcclGroup>(world, name, members, device, queue, timeout_seconds);
}

}  // namespace strata::cuda
