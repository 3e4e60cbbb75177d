// What is known of ranges of bytes whose ends are known beforehand: looked up by number instead of searched for, as
// planning asks for the ranges of every op several times.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace strata {

// The places where ranges begin and end, in order and numbered.
class Places {
 public:
  void add(int64_t place) {
    if (list_.size() >= most_) sort();
    list_.push_back(place);
  }
  // Once all are added, and before any is asked for.
  void sort() {
    std::sort(list_.begin(), list_.end());
    list_.erase(std::unique(list_.begin(), list_.end()), list_.end());
    most_ = std::max(most_, 2 * list_.size());
  }
  size_t size() const { return list_.size(); }
  // Of one that was added.
  uint32_t operator[](int64_t place) const {
    return uint32_t(std::lower_bound(list_.begin(), list_.end(), place) - list_.begin());
  }

 private:
  size_t most_ = size_t{1} << 14;  // before those that are there several times go
  std::vector<int64_t> list_;
};

// A value for each piece between two places, in as few pieces as there need be: what is written at once is one, and is
// divided again where other ranges begin or end.
template <class Value>
class RangeValues {
 public:
  explicit RangeValues(size_t places) : begins_(places / 64 + 1), values_(places) { begins_[0] = 1; }

  // Calls visit(value) for every piece from one place to another.
  template <class Visit>
  void over(uint32_t begin, uint32_t end, Visit&& visit) {
    if (begin == end) return;
    divide(begin);
    divide(end);
    for (uint32_t at = begin; at < end; at = next(at)) visit(values_[at]);
  }
  // One piece, unless it is empty.
  void set(uint32_t begin, uint32_t end, Value value) {
    if (begin == end) return;
    divide(begin);
    divide(end);
    for (uint32_t at = next(begin); at < end; at = next(at)) begins_[at / 64] &= ~bit(at);
    values_[begin] = std::move(value);
  }

 private:
  static uint64_t bit(uint32_t place) { return uint64_t{1} << (place % 64); }
  void divide(uint32_t at) {
    if (begins_[at / 64] & bit(at)) return;
    values_[at] = values_[before(at)];
    begins_[at / 64] |= bit(at);
  }
  // The last beginning before a place that is none; the first place is one.
  uint32_t before(uint32_t at) const {
    size_t word = at / 64;
    uint64_t bits = begins_[word] & (bit(at) - 1);
    while (bits == 0) bits = begins_[--word];
    return uint32_t(word * 64 + 63 - size_t(std::countl_zero(bits)));
  }
  // The next beginning, of which there is one.
  uint32_t next(uint32_t at) const {
    size_t word = at / 64;
    uint64_t bits = begins_[word] & ~(bit(at) | (bit(at) - 1));
    while (bits == 0) bits = begins_[++word];
    return uint32_t(word * 64 + size_t(std::countr_zero(bits)));
  }

  std::vector<uint64_t> begins_;  // a bit for each place: a piece begins there
  std::vector<Value> values_;     // by place, where one begins
};

}  // namespace strata
