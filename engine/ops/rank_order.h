// Tokens that an axis splits, gathered in the order of ranks: where each stands, and whose it is. Of pairs of chunks
// (Split::pair) that is not their order in the sequence. For kernels on host and device.
#pragma once
#include "strata/builder.h"
#include "strata/layout.h"

namespace strata {

// Of `ranks` ranks the one of `coordinate`; each has `share` tokens in one run, or with `pair` above 0 two chunks of
// `pair`, the first of them from the front. Plain data.
struct RankOrder {
  int64_t share = 0, pair = 0, ranks = 1, coordinate = 0;

  // As the layout of dimension `d` says; all of it where nothing splits it.
  RankOrder(const Tensor& tensor, int d, const std::string& axis, int64_t size)
      : share(tensor.shape[size_t(d)]), ranks(size) {
    const Split* split = size > 1 ? last_split(tensor, d, axis) : nullptr;
    if (!split) return;
    pair = split->pair;
    coordinate = split->first / (pair > 0 ? pair : share);
  }
  STRATA_EVERYWHERE int64_t all() const { return share * ranks; }
  STRATA_EVERYWHERE int64_t owner(int64_t token) const {
    if (pair == 0) return token / share;
    const int64_t chunk = token / pair;
    return chunk < ranks ? chunk : 2 * ranks - 1 - chunk;
  }
  // The token that a rank has as its `local`.
  STRATA_EVERYWHERE int64_t token(int64_t rank, int64_t local) const {
    if (pair == 0) return rank * share + local;
    return local < pair ? rank * pair + local : (2 * ranks - 1 - rank) * pair + local - pair;
  }
  // Among the owner's tokens.
  STRATA_EVERYWHERE int64_t local(int64_t token) const {
    if (pair == 0) return token % share;
    return token % pair + (token / pair < ranks ? 0 : pair);
  }
};

// What all ranks have of tensors that the axis splits along dimension `d`, in the order of ranks. All use it alike, so
// that its gradient is each rank's own part of what any of them has.
inline TensorId gathered_by_rank(Builder& build, TensorId own, const std::string& axis, int size, int d) {
  Attributes attributes{{"axis", axis},
                        {"size", int64_t(size)},
                        {"dimension", int64_t(d)},
                        {"gradient", std::string("whole")}};
  const Split* split = last_split(build[own], d, axis);
  if (split && split->pair > 0) attributes.set("order", std::string("ranks"));
  return build.emit("all_gather", {own}, attributes);
}

}  // namespace strata
