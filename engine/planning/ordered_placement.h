// Buffers in a given order, each at the smallest gap that is free over its whole life: where place_by_time loses more
// than it should. What lives at the same time is found by stretches of ops, and what a stretch takes is kept as few
// ranges, so that a buffer looks at some dozens of them, however many others there are.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "engine/planning/memory_plan.h"

namespace strata {

// Disjoint ranges of bytes in order, none beginning where another ends.
class Cover {
 public:
  void clear() { list_.clear(), added_ = 0; }
  void add(int64_t from, int64_t to);
  const std::vector<std::pair<int64_t, int64_t>>& ranges() const { return list_; }
  int64_t added() const { return added_; }  // how many that were

 private:
  std::vector<std::pair<int64_t, int64_t>> list_;
  int64_t added_ = 0;
};

class OrderedPlacement {
 public:
  // `visits`: how often a neighbour may be looked at before there is no more time, were all looked at one by one.
  OrderedPlacement(std::vector<Buffer> buffers, size_t ops, int64_t visits);

  // The bytes it takes; -1: not below `most`, or not found in reasonable time.
  int64_t place(const std::vector<uint32_t>& order, int64_t most);
  const std::vector<Buffer>& buffers() const { return buffers_; }
  // Where in the order of the last placement the buffer stood that ends highest.
  size_t highest() const { return highest_; }
  bool has_time() const { return visits_ >= 0; }

 private:
  struct Placed {
    int64_t from, to;     // bytes
    int32_t first, last;  // ops
  };
  // Of some ops in a row: what begins there, and what ends there and began before.
  struct Stretch {
    std::vector<Placed> begin, end;
  };
  void find_taken(const Buffer& buffer);
  int64_t fit(int64_t bytes);
  void add(const Buffer& buffer);

  static constexpr int64_t kSorted = 8;  // visits that sorting one that was found takes
  int64_t visits_;                       // that are left
  std::vector<Buffer> buffers_;
  size_t width_;  // ops of a stretch
  std::vector<Stretch> stretches_;
  // What begins in a stretch, and what in two, four and more in a row: the second half is by stretch, and what two
  // neighbours have together stands at half their place.
  std::vector<Cover> begun_;
  // What lives through whole stretches, begins before them and ends behind them: each buffer is in the few that are its
  // life together, and a stretch asks those that it is a part of.
  std::vector<Cover> through_;
  std::vector<std::pair<int64_t, int64_t>> taken_;  // what lives at the same time as the buffer that is placed
  size_t highest_ = 0;
};

}  // namespace strata
