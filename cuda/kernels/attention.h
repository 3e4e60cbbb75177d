// Sizes of an attention op, on host and device. The last dimension of qkv holds, for each group, its query heads, its
// key and its value.
#pragma once
#include <cmath>

#include "cuda/bind.h"
#include "cuda/philox.h"
#include "engine/ops/attention_tiles.h"

namespace strata::cuda::attention_kernels {

// Dropout of probabilities, as attention::Dropped has it; kernels are made with and without (`kDrops`).
struct Dropped {
  const double *seed = nullptr, *step = nullptr;
  uint64_t stream = 0;
  uint32_t threshold = 0;
  float factor = 1;
  int64_t sequence = 0, time = 0, row = 0;
  int head = 0, heads = 0;

  // Of rows and columns that are at hand: a query's place among all of the first key, and what of it is kept.
  STRATA_DEVICE int64_t index(int n, int h, int query) const {
    return (((sequence + n) * heads + head + h) * time + query) * row;
  }
  STRATA_DEVICE Words words(int64_t index) const {
    return random_words(uint64_t(*seed), stream ^ (uint64_t(*step) * 0x9E3779B97F4A7C15ull), uint64_t(index) / 4);
  }
  STRATA_DEVICE float kept(const Words& words, int64_t index) const {
    return pick(words, uint32_t(index % 4)) >= threshold ? factor : 0.0f;
  }
  STRATA_DEVICE float kept(int n, int h, int query, int key) const {
    const int64_t at = index(n, h, query) + key;
    return kept(words(at), at);
  }
};

struct Sizes {
  int time, queries, size, width, groups, heads;
  int window;  // positions that a query sees, its own and those before it
  float scale, soft_cap;
  Dropped dropped{};
  const int32_t* documents = nullptr;  // (batch, time): where the document of a row begins; null: all at 0
  Sizes(const OpView& v, const Tensor& qkv)
      : time(int(qkv.shape[1])),
        queries(int(v.attributes().integer("queries_per_group"))),
        size(int(v.attributes().integer("head_size"))),
        width(int(qkv.shape[2])),
        groups(width / ((queries + 2) * size)),
        heads(groups * queries),
        window(int(std::min<int64_t>(v.attributes().integer("window", 0), time))),
        scale(float(v.attributes().real("scale", 1 / std::sqrt(double(size))))),
        soft_cap(float(v.attributes().real("soft_cap", 0.0))) {
    if (window == 0) window = time;
    require(size <= 256, v, "heads of at most 256 on the cuda backend");
  }
  // Of sequence n, for rows below time: the first column that a row, and with it those after it, sees.
  STRATA_DEVICE int begin(int n, int row) const {
    const int of_window = row >= window ? row + 1 - window : 0;
    const int document = documents ? documents[int64_t(n) * time + row] : 0;
    return document > of_window ? document : of_window;
  }
  // Rows from `time` on see what those of no documents would.
  STRATA_DEVICE bool sees(int n, int row, int column) const {
    return column <= row && column > row - window && (!documents || row >= time || column >= begin(n, row));
  }
  // A row behind all that see `column`: the first of a tile of `step` rows from `first` on that sees it no more.
  STRATA_DEVICE int end(int n, int column, int first, int step) const {
    const int end = time - column > window ? column + window : time;
    for (int row = first + step; documents && row < end; row += step)
      if (documents[int64_t(n) * time + row] > column) return row;
    return end;
  }
  // Of a product of query and key the score, and of a score its slope by the product.
  STRATA_DEVICE float score(float product) const {
    return soft_cap > 0 ? soft_cap * tanhf(product * scale / soft_cap) : product * scale;
  }
  STRATA_DEVICE float slope(float score) const {
    return soft_cap > 0 ? scale * (1 - score / soft_cap * (score / soft_cap)) : scale;
  }
  STRATA_DEVICE int per_group() const { return queries; }
  STRATA_DEVICE int query(int group, int of_group) const { return (group * (per_group() + 2) + of_group) * size; }
  STRATA_DEVICE int query(int head) const { return query(head / per_group(), head % per_group()); }
  STRATA_DEVICE int key(int group) const { return (group * (per_group() + 2) + per_group()) * size; }
  STRATA_DEVICE int value(int group) const { return key(group) + size; }
};

}  // namespace strata::cuda::attention_kernels
