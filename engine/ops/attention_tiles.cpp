// Tiles of attention; see attention_tiles.h.
#include "engine/ops/attention_tiles.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <span>

#include "engine/ops/gemm.h"
#include "engine/ops/registration.h"
#include "engine/ops/vector.h"

namespace strata::attention {
namespace {

using simd::F;
using simd::get;
using simd::put;

constexpr int64_t kQueries = 64;  // rows of a tile
constexpr int64_t kKeys = 256;    // columns of a tile
constexpr int64_t kTile = kQueries * kKeys;

// One row of scores in place: p = exp(scale·s - m) for the first `count` columns, 0 after; m is the larger of `before`
// and the row's maximum. Returns the row's sum; sets the new maximum.
STRATA_SIMD float softmax_row(float* s, int64_t count, int64_t columns, float scale, float before, float* maximum) {
  float top = before;
  F highest = simd::set(-3.0e38f);
  int64_t i = 0;
  for (; i + simd::kLanes <= count; i += simd::kLanes) highest = simd::max(highest, simd::load(s + i));
  float row = simd::max(highest);
  for (; i < count; ++i) row = s[i] > row ? s[i] : row;
  if (count > 0 && row * scale > top) top = row * scale;
  F sum{};
  simd::map(count, [&](int64_t j, int64_t c) STRATA_INLINE_LAMBDA {
    F e = simd::exp(get(s + j, c) * scale - top);
    for (int64_t l = c; l < simd::kLanes; ++l) e[l] = 0;
    put(s + j, e, c);
    sum += e;
  });
  if (count < columns) std::memset(s + count, 0, size_t(columns - count) * 4);
  *maximum = top;
  return simd::sum(sum);
}

STRATA_SIMD void scale_row(float* x, float factor, int64_t n) {
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA { put(x + i, get(x + i, c) * factor, c); });
}

STRATA_SIMD void write_row(const float* x, float factor, float* y, int64_t n) {
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA { put(y + i, get(x + i, c) * factor, c); });
}

// Scores s to probabilities p = exp(scale·s - lse) in place, and dp to ds = p·(dp - dot)·scale in place.
STRATA_SIMD void gradient_row(float* s, float* dp, int64_t count, int64_t columns, float scale, float lse, float dot) {
  simd::map(count, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA {
    const F p = simd::exp(get(s + i, c) * scale - lse);
    put(s + i, p, c);
    put(dp + i, p * (get(dp + i, c) - dot) * scale, c);
  });
  if (count < columns) {
    std::memset(s + count, 0, size_t(columns - count) * 4);
    std::memset(dp + count, 0, size_t(columns - count) * 4);
  }
}

STRATA_SIMD void multiply_row(float* x, const float* factors, int64_t n) {
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA { put(x + i, get(x + i, c) * get(factors + i, c), c); });
}

STRATA_SIMD float dot_row(const float* x, const float* y, int64_t n) {
  F sum{};
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA { sum += get(x + i, c) * get(y + i, c); });
  return simd::sum(sum);
}

// Scores s to cap·tanh(scale·s / cap) in place.
STRATA_SIMD void cap_row(float* s, int64_t count, float scale, float cap) {
  const float inner = scale / cap;
  simd::map(count,
            [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA { put(s + i, cap * simd::tanh(get(s + i, c) * inner), c); });
}
// As gradient_row, from scores that cap_row has made: d tanh is in the slope.
STRATA_SIMD void capped_gradient_row(float* s, float* dp, int64_t count, float scale, float cap, float lse, float dot) {
  simd::map(count, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA {
    const F score = get(s + i, c), p = simd::exp(score - lse), share = score / cap;
    put(s + i, p, c);
    put(dp + i, p * (get(dp + i, c) - dot) * (1.0f - share * share) * scale, c);
  });
}

// Items handed out one by one; body(item, thread).
template <class Body>
void share(Threads& threads, int64_t items, Body&& body) {
  std::atomic<int64_t> next{0};
  threads.parallel([&](int thread) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) body(i, thread);
  });
}

// The tiles of keys that some of the queries [q, q + rows) of sequence n see: visit(first key in memory, its position,
// columns).
template <class Visit>
void over_tiles(const Work& w, int64_t n, int64_t q, int64_t rows, Visit&& visit) {
  const int64_t last = w.query_at(q + rows - 1), first = w.first_seen(n, q);
  const Run all{0, w.keys};
  int64_t before = 0;
  for (const Run& run : w.key_at.empty() ? std::span(&all, 1) : std::span(w.key_at)) {
    for (int64_t k = std::max<int64_t>(0, first - run.first) / kKeys * kKeys; k < run.count && run.first + k <= last;
         k += kKeys)
      visit(before + k, run.first + k, std::min({kKeys, run.count - k, last + 1 - run.first - k}));
    before += run.count;
  }
}
// Which of a tile's keys a query sees: [begin, end).
struct Seen {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
};
Seen seen(const Work& w, int64_t n, int64_t query, int64_t position, int64_t columns) {
  const int64_t at = w.query_at(query), end = std::clamp<int64_t>(at + 1 - position, 0, columns);
  return {std::clamp<int64_t>(w.first_seen(n, query) - position, 0, end), end};
}
void clear(float* row, int64_t count) {
  if (count > 0) std::memset(row, 0, size_t(count) * 4);
}

// The row of probabilities `row` of query q in a tile of `position`, after softmax, or of ones: what is kept of it.
void drop_seen(const Work& w, int64_t n, int64_t head, int64_t q, int64_t position, const Seen& here, const float* from,
               float* to) {
  const int64_t begin = here.begin / 4 * 4;  // before what is seen everything is 0
  const int64_t first = w.dropped.index(n, head, w.query_at(q), position + begin);
  drop_row(from + begin, to + begin, here.end - begin, first, w.dropped.threshold, float(w.dropped.factor),
           w.dropped.draw);
}

int64_t forward_each(const Work& w) { return kTile + kQueries * w.size + 2 * kQueries; }
int64_t backward_each(const Work& w) { return 2 * kTile + kQueries + (w.dropped.any() ? 2 * kKeys : 0); }

}  // namespace

Attributes own_attributes(const Attributes& attributes) {
  Attributes own;
  for (const auto& [name, value] : attributes.all())
    if (name == "head_size" || name == "queries_per_group" || name == "scale" || name == "window" ||
        name == "soft_cap" || name == "dropout" || name == "stream")
      own.set(name, value);
  return own;
}

Dropped dropped_by(const OpView& b, bool gradient) {
  const double probability = b.attributes().real("dropout", 0.0);
  if (probability == 0) return {};
  const Tensor& out = b.output(0);
  const int64_t size = b.attributes().integer("head_size"), per_group = b.attributes().integer("queries_per_group");
  const auto heads_in = [&](int64_t columns) {
    return gradient ? columns / ((per_group + 2) * size) * per_group : columns / size;
  };
  const Shape all = out.full_shape();
  Dropped d;
  d.threshold = dropout_threshold(probability);
  d.factor = 1 / (1 - probability);
  d.sequence = std::max(0, b.op().microbatch) * all[0] + Indices(out, 0)(0);
  d.head = heads_in(Indices(out, 2)(0));
  d.heads = heads_in(all[2]);
  d.time = all[1];
  d.row = (all[1] + 3) / 4 * 4;
  return d;
}

Dropped drawn_by(const Binding& b, bool gradient, int scalars) {
  Dropped d = dropped_by(b, gradient);
  if (d.any()) d.draw = {*b.in<double>(scalars), *b.in<double>(scalars + 1), b.attributes().integer("stream")};
  return d;
}

bool drops_right(const OpView& v, int scalars) {
  const double probability = v.attributes().real("dropout", 0.0);
  if (probability == 0) return v.inputs() <= scalars;
  const auto scalar = [&](int i) {
    return v.has_input(i) && v.input(i).dtype == DType::f64 && v.input(i).shape == Shape{1};
  };
  return probability > 0 && probability < 1 && v.attributes().has("stream") && scalar(scalars) && scalar(scalars + 1) &&
         v.inputs() == scalars + 2;
}

Work work_of_self(const OpView& v, const Tensor& qkv) {
  Work w;
  w.batch = qkv.shape[0];
  w.queries = w.keys = qkv.shape[1];
  w.per_group = v.attributes().integer("queries_per_group");
  w.size = v.attributes().integer("head_size");
  w.width = w.key_width = qkv.shape[2];
  w.key_step = (w.per_group + 2) * w.size;
  w.key_first = w.per_group * w.size;
  w.groups = w.width / w.key_step;
  w.heads = w.groups * w.per_group;
  w.scale = v.attributes().real("scale", 1 / std::sqrt(double(w.size)));
  w.window = v.attributes().integer("window", 0);
  w.soft_cap = v.attributes().real("soft_cap", 0.0);
  w.dropped.threshold = dropout_threshold(v.attributes().real("dropout", 0.0));  // the rest when the op runs
  return w;
}

int64_t forward_floats(const Work& w, int threads) { return threads * forward_each(w); }
int64_t backward_floats(const Work& w, int threads) { return threads * backward_each(w); }

void forward(const Work& w, Threads& threads, const float* qkv, const float* kv, const float* before,
             const float* lse_before, float* out, float* lse, float* workspace) {
  const int64_t blocks = (w.queries + kQueries - 1) / kQueries, out_width = w.out_width();
  const float scale = float(w.scale), cap = float(w.soft_cap);
  share(threads, w.batch * w.heads * blocks, [&](int64_t item, int thread) {
    // The longest rows first, so that the team ends together.
    const int64_t block = blocks - 1 - item / (w.batch * w.heads), head = item % w.heads, n = item / w.heads % w.batch;
    float* scores = workspace + thread * forward_each(w);
    float *sum = scores + kTile, *top = sum + kQueries * w.size, *total = top + kQueries;
    const int64_t q = block * kQueries, rows = std::min(kQueries, w.queries - q);
    const float *query = qkv + (n * w.queries + q) * w.width + w.query(head),
                *key = kv + n * w.keys * w.key_width + w.key(head / w.per_group), *value = key + w.size;
    const int64_t first_out = (n * w.queries + q) * out_width + head * w.size,
                  first_lse = (n * w.heads + head) * w.queries + q;
    for (int64_t i = 0; i < rows; ++i) {
      top[i] = before ? lse_before[first_lse + i] : -3.0e38f, total[i] = before ? 1 : 0;
      if (before) std::memcpy(sum + i * w.size, before + first_out + i * out_width, size_t(w.size) * 4);
    }
    bool begun = before;
    over_tiles(w, n, q, rows, [&](int64_t k, int64_t position, int64_t columns) {
      gemm(Transpose::no, Transpose::yes, rows, columns, w.size, query, w.width, key + k * w.key_width, w.key_width, 0,
           scores, kKeys);
      for (int64_t i = 0; i < rows; ++i) {
        const float top_before = top[i];
        const Seen here = seen(w, n, q + i, position, columns);
        float* const row = scores + i * kKeys + here.begin;
        clear(scores + i * kKeys, here.begin);
        if (cap > 0) cap_row(row, here.count(), scale, cap);
        const float add =
            softmax_row(row, here.count(), columns - here.begin, cap > 0 ? 1 : scale, top_before, &top[i]);
        const float keep = std::exp(top_before - top[i]);
        total[i] = total[i] * keep + add;
        if (w.dropped.any()) drop_seen(w, n, head, q + i, position, here, scores + i * kKeys, scores + i * kKeys);
        if (begun && keep != 1) scale_row(sum + i * w.size, keep, w.size);
      }
      gemm(Transpose::no, Transpose::no, rows, w.size, columns, scores, kKeys, value + k * w.key_width, w.key_width,
           begun ? 1.0f : 0.0f, sum, w.size);
      begun = true;
    });
    for (int64_t i = 0; i < rows; ++i) {
      write_row(sum + i * w.size, 1 / total[i], out + first_out + i * out_width, w.size);
      lse[first_lse + i] = top[i] + std::log(total[i]);
    }
  });
}

void backward(const Work& w, Threads& threads, const float* d_outs, const float* qkv, const float* kv,
              const float* outs, const float* lses, float* d_qkv, bool onto, float* d_kv, float* workspace) {
  const int64_t out_width = w.out_width();
  const float scale = float(w.scale), cap = float(w.soft_cap);
  share(threads, w.batch * w.groups, [&](int64_t item, int thread) {
    const int64_t n = item / w.groups, group = item % w.groups;
    float* scores = workspace + thread * backward_each(w);
    float *slopes = scores + kTile, *dots = slopes + kTile, *const ones = dots + kQueries, *const kept = ones + kKeys;
    if (w.dropped.any()) std::fill_n(ones, kKeys, 1.0f);
    const float *key = kv + n * w.keys * w.key_width + w.key(group), *value = key + w.size;
    float *d_key = d_kv + n * w.keys * w.key_width + w.key(group), *d_value = d_key + w.size;
    for (int64_t t = 0; t < w.keys; ++t) std::memset(d_key + t * w.key_width, 0, size_t(2 * w.size) * 4);
    if (d_kv != d_qkv && !onto)
      for (int64_t t = 0; t < w.queries; ++t)
        std::memset(d_qkv + (n * w.queries + t) * w.width + w.own_key(group), 0, size_t(2 * w.size) * 4);
    for (int64_t head = group * w.per_group; head < (group + 1) * w.per_group; ++head)
      for (int64_t q = 0; q < w.queries; q += kQueries) {
        const int64_t rows = std::min(kQueries, w.queries - q), row = n * w.queries + q;
        const float* query = qkv + row * w.width + w.query(head);
        const float *d_out = d_outs + row * out_width + head * w.size, *out = outs + row * out_width + head * w.size;
        const float* lse = lses + (n * w.heads + head) * w.queries + q;
        float* d_query = d_qkv + row * w.width + w.query(head);
        for (int64_t i = 0; i < rows; ++i) dots[i] = dot_row(d_out + i * out_width, out + i * out_width, w.size);
        bool begun = onto;
        over_tiles(w, n, q, rows, [&](int64_t k, int64_t position, int64_t columns) {
          gemm(Transpose::no, Transpose::yes, rows, columns, w.size, query, w.width, key + k * w.key_width, w.key_width,
               0, scores, kKeys);
          gemm(Transpose::no, Transpose::yes, rows, columns, w.size, d_out, out_width, value + k * w.key_width,
               w.key_width, 0, slopes, kKeys);
          for (int64_t i = 0; i < rows; ++i) {
            const Seen here = seen(w, n, q + i, position, columns);
            float *const row = scores + i * kKeys, *const slope = slopes + i * kKeys;
            clear(row, here.begin), clear(slope, here.begin);
            if (w.dropped.any()) {
              drop_seen(w, n, head, q + i, position, here, ones, kept);
              multiply_row(slope + here.begin, kept + here.begin, here.count());
            }
            if (cap > 0) {
              cap_row(row + here.begin, here.count(), scale, cap);
              capped_gradient_row(row + here.begin, slope + here.begin, here.count(), scale, cap, lse[i], dots[i]);
              clear(row + here.end, columns - here.end), clear(slope + here.end, columns - here.end);
            } else {
              gradient_row(row + here.begin, slope + here.begin, here.count(), columns - here.begin, scale, lse[i],
                           dots[i]);
            }
            // Gradients of values are of what was kept, those of scores of all probabilities.
            if (w.dropped.any()) multiply_row(row + here.begin, kept + here.begin, here.count());
          }
          gemm(Transpose::yes, Transpose::no, columns, w.size, rows, scores, kKeys, d_out, out_width, 1,
               d_value + k * w.key_width, w.key_width);
          gemm(Transpose::yes, Transpose::no, columns, w.size, rows, slopes, kKeys, query, w.width, 1,
               d_key + k * w.key_width, w.key_width);
          gemm(Transpose::no, Transpose::no, rows, w.size, columns, slopes, kKeys, key + k * w.key_width, w.key_width,
               begun ? 1.0f : 0.0f, d_query, w.width);
          begun = true;
        });
        for (int64_t i = 0; !begun && i < rows; ++i) std::memset(d_query + i * w.width, 0, size_t(w.size) * 4);
      }
  });
}

}  // namespace strata::attention
