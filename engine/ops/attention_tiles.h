// Causal attention of some queries on some keys, tile by tile with a running softmax (FlashAttention, arXiv 2205.14135
// and 2307.08691): queries × keys scores never exist. Queries and keys say at which positions of a sequence they are;
// softmax can go on from what other keys gave. What op kinds of attention have in common; they are in attention.cpp and
// context_attention.cpp.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "engine/ops/dropout_draw.h"
#include "strata/layout.h"
#include "strata/op_kind.h"

namespace strata::attention {

// Keys that lie one after the other in memory and in the sequence.
struct Run {
  int64_t first, count;  // position of the first
};

// Dropout of the probabilities, between softmax and the sum of values: that of query q and key k of head h in sequence
// n draws, as an element of `dropout` does, by where it is among those of all heads, sequences and microbatches, rows
// rounded up to a multiple of 4. So it does not matter who holds what, nor which tile it is in.
struct Dropped {
  uint32_t threshold = 0;  // 0: nothing is dropped
  double factor = 1;       // of what is kept
  DropoutDraw draw{0, 0, 0};
  int64_t sequence = 0, head = 0;        // the first ones here
  int64_t heads = 0, time = 0, row = 0;  // of all: heads, queries, and keys with what rounds them up
  bool any() const { return threshold > 0; }
  int64_t index(int64_t n, int64_t h, int64_t q, int64_t k) const {
    return (((sequence + n) * heads + head + h) * time + q) * row + k;
  }
  double kept(int64_t n, int64_t h, int64_t q, int64_t k) const {
    return !any() || is_kept(draw, uint64_t(index(n, h, q, k)), threshold) ? factor : 0;
  }
};

// Sizes and places. Queries are rows of `width` numbers, in which a group's are its P query heads of D numbers each,
// then its key and its value; keys are rows of `key_width`, in which key heads of groups begin at `key_first` and are
// `key_step` apart, each with its value behind it.
struct Work {
  int64_t batch = 0, queries = 0, keys = 0;
  int64_t per_group = 0, size = 0, groups = 0, heads = 0;
  int64_t width = 0, key_width = 0, key_first = 0, key_step = 0;
  double scale = 0;
  int64_t window = 0;   // a query sees this many positions, its own and those before it; 0: all of them
  double soft_cap = 0;  // scores s become cap·tanh(s / cap) (Gemma 2, arXiv 2408.00118); 0: they stay
  Indices query_at{};   // positions of queries, ascending
  // (batch, queries): of each query the position where its document begins, before which it sees nothing; ascending in
  // a sequence. Null: all see from 0 on.
  const int32_t* documents = nullptr;
  std::vector<Run> key_at{};  // and of keys; empty: from 0 on
  Dropped dropped{};

  // The first position that a query of sequence n sees.
  int64_t first_seen(int64_t n, int64_t query) const {
    const int64_t of_window = window > 0 ? query_at(query) + 1 - window : 0;
    return documents ? std::max<int64_t>(of_window, documents[n * queries + query]) : of_window;
  }
  bool sees(int64_t n, int64_t query, int64_t position) const {
    return position <= query_at(query) && position >= first_seen(n, query);
  }
  int64_t query(int64_t head) const { return (head / per_group * (per_group + 2) + head % per_group) * size; }
  int64_t key(int64_t group) const { return key_first + group * key_step; }
  int64_t out_width() const { return heads * size; }
  int64_t own_key(int64_t group) const { return (group * (per_group + 2) + per_group) * size; }
};

// A score and its slope by the product of query and key: what the loops that tests compare with have in common.
template <class T>
struct PlainScore {
  T value, slope;
  PlainScore(const Work& w, T product) : value(product * T(w.scale)), slope(T(w.scale)) {
    if (w.soft_cap == 0) return;
    const T bent = std::tanh(value / T(w.soft_cap));
    value = T(w.soft_cap) * bent;
    slope *= 1 - bent * bent;
  }
};

// The attributes of attention, and of what takes its place: head_size, queries_per_group, scale, window, soft_cap, and
// dropout (a probability) with the stream of its random numbers.
Attributes own_attributes(const Attributes& attributes);

// What an op drops, but for the draw, which is of a step; nothing without attribute dropout. By the layout of its
// output 0, which is the gradient of qkv where it is a `gradient`, else what attention gives.
Dropped dropped_by(const OpView& view, bool gradient);
// And with the draw, from the scalars seed and step, which are inputs `scalars` and the one after.
Dropped drawn_by(const Binding& binding, bool gradient, int scalars);
// For shape rules: whether dropout and stream are right, with the scalars they need, and no input behind.
bool drops_right(const OpView& view, int scalars);

// Of queries with keys and values among them, which are the keys' (plain attention). Attributes head_size and
// queries_per_group, and at most scale (1/√D when absent), window and soft_cap; `qkv` (B, T, K·(P+2)·D).
Work work_of_self(const OpView& view, const Tensor& qkv);

int64_t forward_floats(const Work& work, int threads);
int64_t backward_floats(const Work& work, int threads);

// out (B, T, H·D) and lse (B, H, T). `before`, which may be `out`, and `lse_before`, which may be `lse`: what other
// keys gave, or null: then each query must see a key.
void forward(const Work& work, Threads& threads, const float* qkv, const float* kv, const float* before,
             const float* lse_before, float* out, float* lse, float* workspace);

// Gradients of queries, `onto` what is there or from nothing, and of keys and values. Where d_kv is not in d_qkv, the
// places of keys and values in that are cleared unless `onto`. One task owns a key/value head: sums have a fixed order.
void backward(const Work& work, Threads& threads, const float* d_outs, const float* qkv, const float* kv,
              const float* outs, const float* lses, float* d_qkv, bool onto, float* d_kv, float* workspace);

}  // namespace strata::attention
