// Collective operations of a group of ranks: one interface whatever carries the bytes. A group is one axis of the mesh.
// Every rank of a group calls the same operations in the same order; each call returns when this rank's part is done.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "strata/tensor.h"

namespace strata {

// A piece of memory.
struct Piece {
  std::byte* data = nullptr;
  int64_t bytes = 0;
};

// Pieces one after the other, taken as one sequence of bytes: grouped operations need no repacking.
class Pieces {
 public:
  Pieces() = default;
  Pieces(std::initializer_list<Piece> list) {
    for (const Piece& piece : list) add(piece);
  }
  void add(Piece piece) {
    if (piece.bytes > 0) list_.push_back(piece), ends_.push_back(bytes() + piece.bytes);
  }
  int64_t bytes() const { return ends_.empty() ? 0 : ends_.back(); }
  const std::vector<Piece>& list() const { return list_; }
  // Calls visit(data, bytes, offset from begin) for the pieces that make up [begin, end), cut to what is there.
  template <class Visit>
  void over(int64_t begin, int64_t end, Visit&& visit) const {
    size_t i = size_t(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
    for (int64_t at = begin; i < ends_.size() && at < end; ++i) {
      const int64_t into = at - (ends_[i] - list_[i].bytes), count = std::min(end, ends_[i]) - at;
      visit(list_[i].data + into, count, at - begin);
      at += count;
    }
  }
  // The bytes of [begin, end) as pieces of their own.
  Pieces part(int64_t begin, int64_t end) const {
    Pieces result;
    over(begin, end, [&](std::byte* data, int64_t count, int64_t) { result.add({data, count}); });
    return result;
  }

 private:
  std::vector<Piece> list_;
  std::vector<int64_t> ends_;
};

enum class Reduction : uint8_t { sum, max };

// Sums are taken in a balanced tree over the ranks, ((0 + 1) + (2 + 3)) + …, split at the largest power of two below
// their number: the same bits on every rank, in every run, and for every way the bytes take. bf16 and f16 are summed in
// fp32 and rounded once. Errors (Error, failed) name the rank that is missing and the operation; after one, the group
// is of no use any more.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // In place, over all ranks. f32, f64, bf16, f16, i32. Bytes are equal on all ranks.
  virtual void all_reduce(const Pieces& data, DType dtype, Reduction reduction = Reduction::sum) = 0;
  // parts[r]: what this rank contributes to rank r's result. Own part: result, which may be parts[rank()] itself.
  virtual void reduce_scatter(const std::vector<Pieces>& parts, const Pieces& result, DType dtype,
                              Reduction reduction = Reduction::sum) = 0;
  // parts[r]: where rank r's part is to be; parts[rank()] is where this rank's is already.
  virtual void all_gather(const std::vector<Pieces>& parts) = 0;
  virtual void broadcast(const Pieces& data, int root) = 0;
  // send[r] goes to rank r; receive[r] comes from it. Sizes may differ by pair, zero included.
  virtual void all_to_all(const std::vector<Pieces>& send, const std::vector<Pieces>& receive) = 0;
  virtual void send(const Pieces& data, int to) = 0;
  virtual void receive(const Pieces& data, int from) = 0;
  virtual void barrier() = 0;
  // Within this rank's memory, in order with its operations.
  virtual void copy_bytes(void* to, const void* from, int64_t bytes) { std::memcpy(to, from, size_t(bytes)); }
  // The same for `rows` rows of `bytes` bytes each, that begin `to_step` and `from_step` bytes after one another.
  virtual void copy_rows(void* to, int64_t to_step, const void* from, int64_t from_step, int64_t bytes, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r)
      copy_bytes(static_cast<std::byte*>(to) + r * to_step, static_cast<const std::byte*>(from) + r * from_step, bytes);
  }

  // Operations of an asynchronous group go into a queue of a device, and calls return at once. Who waits for that queue
  // calls `watch` meanwhile: it throws Error (failed), naming the rank, when one has failed or has not come for too
  // long; then `abort` ends what is under way, and the group is of no use any more. Pieces are cut alike on all ranks.
  virtual bool asynchronous() const { return false; }
  virtual void watch() {}
  virtual void abort() {}

  // Bytes this rank handed to others so far, as a wire would count them.
  int64_t bytes_sent() const { return bytes_sent_; }

 protected:
  int64_t bytes_sent_ = 0;
};

// [begin, end) of `count` rows that rank `rank` of `size` holds: sizes differ by one at most, the first are larger.
struct Range {
  int64_t begin = 0, end = 0;
  int64_t count() const { return end - begin; }
};
Range share_of(int64_t count, int rank, int size);

}  // namespace strata
