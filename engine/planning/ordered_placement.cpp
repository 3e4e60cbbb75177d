// Gaps between ranges of neighbours; see ordered_placement.h.
#include "engine/planning/ordered_placement.h"

#include <algorithm>

namespace strata {

void Cover::add(int64_t from, int64_t to) {
  ++added_;
  const auto first = std::partition_point(list_.begin(), list_.end(), [&](const auto& r) { return r.second < from; });
  auto last = first;
  for (; last != list_.end() && last->first <= to; ++last)
    from = std::min(from, last->first), to = std::max(to, last->second);
  if (first == last) {
    list_.insert(first, {from, to});
    return;
  }
  *first = {from, to};
  list_.erase(first + 1, last);
}

OrderedPlacement::OrderedPlacement(std::vector<Buffer> buffers, size_t ops, int64_t visits)
    : visits_(visits),
      buffers_(std::move(buffers)),
      width_(std::max<size_t>(1, ops / 512)),
      stretches_(ops / width_ + 1),
      begun_(2 * stretches_.size()),
      through_(2 * stretches_.size()) {}

int64_t OrderedPlacement::place(const std::vector<uint32_t>& order, int64_t most) {
  for (Stretch& stretch : stretches_) stretch.begin.clear(), stretch.end.clear();
  for (std::vector<Cover>* covers : {&begun_, &through_})
    for (Cover& cover : *covers) cover.clear();
  int64_t top = 0;
  for (size_t n = 0; n < order.size(); ++n) {
    Buffer& buffer = buffers_[order[n]];
    find_taken(buffer);
    buffer.offset = fit(buffer.bytes);
    add(buffer);
    if (buffer.offset + buffer.bytes > top) top = buffer.offset + buffer.bytes, highest_ = n;
    if (top >= most || visits_ < 0) return -1;
  }
  return top;
}

void OrderedPlacement::find_taken(const Buffer& buffer) {
  const size_t first = size_t(buffer.first) / width_, last = size_t(buffer.last) / width_, count = stretches_.size();
  taken_.clear();
  int64_t found = 0;
  const auto look = [&](const std::vector<Placed>& list) {
    visits_ -= int64_t(list.size());
    for (const Placed& p : list)
      if (p.last >= buffer.first && buffer.last >= p.first) taken_.push_back({p.from, p.to}), ++found;
  };
  const auto take = [&](const Cover& all) {
    visits_ -= all.added();
    found += all.added();
    taken_.insert(taken_.end(), all.ranges().begin(), all.ranges().end());
  };
  for (size_t at = count + first; at > 0; at /= 2) take(through_[at]);
  look(stretches_[first].end);
  look(stretches_[first].begin);
  for (size_t a = count + first + 1, b = count + last; a < b; a /= 2, b /= 2) {  // between the first and the last
    if (a % 2 == 1) take(begun_[a++]);
    if (b % 2 == 1) take(begun_[--b]);
  }
  if (last > first) look(stretches_[last].begin);
  visits_ -= kSorted * found;
}

// The lowest of the smallest gaps, or the end.
int64_t OrderedPlacement::fit(int64_t bytes) {
  std::sort(taken_.begin(), taken_.end());
  int64_t end = 0, best = -1, best_room = 0;
  for (const auto& [from, to] : taken_) {
    const int64_t room = from - end;
    if (room >= bytes && (best < 0 || room < best_room)) best = end, best_room = room;
    end = std::max(end, to);
  }
  return best >= 0 ? best : end;
}

void OrderedPlacement::add(const Buffer& buffer) {
  const size_t first = size_t(buffer.first) / width_, last = size_t(buffer.last) / width_, count = stretches_.size();
  const Placed placed{buffer.offset, buffer.offset + buffer.bytes, buffer.first, buffer.last};
  stretches_[first].begin.push_back(placed);
  for (size_t at = count + first; at > 0; at /= 2) begun_[at].add(placed.from, placed.to);
  for (size_t a = count + first + 1, b = count + last; a < b; a /= 2, b /= 2) {
    if (a % 2 == 1) through_[a++].add(placed.from, placed.to);
    if (b % 2 == 1) through_[--b].add(placed.from, placed.to);
  }
  if (last > first) stretches_[last].end.push_back(placed);
}

}  // namespace strata
