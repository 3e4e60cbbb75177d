// Rounds and pieces; see stripes.h.
#include "memory/stripes.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "memory/nvme_store.h"
#include "strata/error.h"

namespace strata {

Stripes::Stripes(const std::vector<double>& shares) : pieces_(shares.size()), starts_(shares.size()) {
  const double sum = std::accumulate(shares.begin(), shares.end(), 0.0);
  STRATA_CHECK(!shares.empty() && sum > 0 && std::isfinite(sum));
  constexpr int64_t kWhole = int64_t{1} << 62;  // more than any tier has
  const int64_t blocks =
      shares.size() == 1 ? kWhole / kNvmeAlignment : int64_t(shares.size()) * kPiece / kNvmeAlignment;
  for (size_t f = 0; f < shares.size(); ++f) {
    STRATA_CHECK(shares[f] >= 0);
    pieces_[f] = std::llround(double(blocks) * (shares[f] / sum)) * kNvmeAlignment;
    starts_[f] = round_;
    round_ += pieces_[f];
  }
}

int64_t Stripes::bytes_of(size_t file, int64_t bytes) const {
  return bytes / round_ * pieces_[file] + std::clamp<int64_t>(bytes % round_ - starts_[file], 0, pieces_[file]);
}

Stripes::Run Stripes::next(size_t file, int64_t offset, int64_t end) const {
  const int64_t start = starts_[file], stop = start + pieces_[file];
  const int64_t round = offset / round_ + (offset % round_ >= stop), begin = round * round_;
  const int64_t from = std::max(offset, begin + start), to = std::min(end, begin + stop);
  if (from >= to || start == stop) return {};
  return {from, round * pieces_[file] + from - begin - start, to - from};
}

}  // namespace strata
