// How the bytes of the NVMe tier spread over files on several disks: in rounds, of which each file has one piece, as
// large as its share. A tensor of several rounds lies on all disks at once, and each is done with it at the same time.
// Arithmetic only; files and requests are nvme_store.h's.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace strata {

class Stripes {
 public:
  static constexpr int64_t kPiece = 1 << 20;  // bytes of a file in a round, on the average

  Stripes() : Stripes(std::vector<double>{1}) {}
  // Shares by file, in any unit, not negative and not all 0. What is less than a block of a round (kNvmeAlignment) is
  // none. One file holds everything in one piece.
  explicit Stripes(const std::vector<double>& shares);
  static Stripes even(size_t files) { return Stripes(std::vector<double>(files, 1)); }

  size_t files() const { return pieces_.size(); }
  int64_t round() const { return round_; }
  double share(size_t file) const { return double(pieces_[file]) / double(round_); }
  // Of the first `bytes` bytes, those that are in a file. Of whole blocks, whole blocks.
  int64_t bytes_of(size_t file, int64_t bytes) const;

  // Bytes that lie together both in the tier and in a file; none where `bytes` is 0.
  struct Run {
    int64_t offset = 0, in_file = 0, bytes = 0;
  };
  // The first of a file within [offset, end).
  Run next(size_t file, int64_t offset, int64_t end) const;

 private:
  std::vector<int64_t> pieces_, starts_;  // by file, within a round
  int64_t round_ = 0;
};

}  // namespace strata
