// Causal attention with grouped queries, tile by tile with a running softmax (FlashAttention, arXiv 2205.14135 and
// 2307.08691): time × time scores never exist.
//
// The last dimension of qkv holds, for each group: its query heads, then the key and the value that they share, D wide
// each, so that a split of that dimension by groups is a split of the model. Ops know the size of a head and the
// queries of a group, which a split does not change, and not how many heads there are.
#include <atomic>
#include <cmath>
#include <cstring>

#include "engine/ops/gemm.h"
#include "engine/ops/registration.h"
#include "engine/ops/vector.h"

namespace strata {
namespace {

using simd::F;
using simd::get;
using simd::put;

constexpr int64_t kQueries = 64;  // rows of a tile
constexpr int64_t kKeys = 256;    // columns of a tile

struct Sizes {
  int64_t batch, time, per_group, size, width, groups, heads;
  float scale;
  Sizes(const OpView& v, const Tensor& qkv)
      : batch(qkv.shape[0]),
        time(qkv.shape[1]),
        per_group(v.attributes().integer("queries_per_group")),
        size(v.attributes().integer("head_size")),
        width(qkv.shape[2]),
        groups(width / ((per_group + 2) * size)),
        heads(groups * per_group),
        scale(float(1 / std::sqrt(double(size)))) {}
  // Column of a head's slice in the last dimension of qkv.
  int64_t query(int64_t head) const { return (head / per_group * (per_group + 2) + head % per_group) * size; }
  int64_t key(int64_t group) const { return (group * (per_group + 2) + per_group) * size; }
  int64_t value(int64_t group) const { return key(group) + size; }
};

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

STRATA_SIMD float dot_row(const float* x, const float* y, int64_t n) {
  F sum{};
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA { sum += get(x + i, c) * get(y + i, c); });
  return simd::sum(sum);
}

constexpr int64_t kTile = kQueries * kKeys;
int64_t forward_floats(const Sizes& s) { return kTile + kQueries * s.size + 2 * kQueries; }
int64_t backward_floats() { return 2 * kTile + kQueries; }

// Items handed out one by one; body(item, thread).
template <class Body>
void share(Threads& threads, int64_t items, Body&& body) {
  std::atomic<int64_t> next{0};
  threads.parallel([&](int thread) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) body(i, thread);
  });
}

void forward(const Sizes& s, Threads& threads, const float* qkv, float* out, float* lse, float* workspace) {
  const int64_t blocks = (s.time + kQueries - 1) / kQueries, out_width = s.heads * s.size;
  share(threads, s.batch * s.heads * blocks, [&](int64_t item, int thread) {
    // The longest rows first, so that the team ends together.
    const int64_t block = blocks - 1 - item / (s.batch * s.heads), head = item % s.heads, n = item / s.heads % s.batch;
    float* scores = workspace + thread * forward_floats(s);
    float *sum = scores + kTile, *top = sum + kQueries * s.size, *total = top + kQueries;
    const float* base = qkv + n * s.time * s.width;
    const int64_t q = block * kQueries, rows = std::min(kQueries, s.time - q), end = q + rows;
    const float *query = base + q * s.width + s.query(head), *key = base + s.key(head / s.per_group),
                *value = base + s.value(head / s.per_group);
    for (int64_t i = 0; i < rows; ++i) top[i] = -3.0e38f, total[i] = 0;
    for (int64_t k = 0; k < end; k += kKeys) {
      const int64_t columns = std::min(kKeys, end - k);
      gemm(Transpose::no, Transpose::yes, rows, columns, s.size, query, s.width, key + k * s.width, s.width, 0, scores,
           kKeys);
      for (int64_t i = 0; i < rows; ++i) {
        const float before = top[i];
        const float add = softmax_row(scores + i * kKeys, std::clamp<int64_t>(q + i + 1 - k, 0, columns), columns,
                                      s.scale, before, &top[i]);
        const float keep = std::exp(before - top[i]);
        total[i] = total[i] * keep + add;
        if (k > 0 && keep != 1) scale_row(sum + i * s.size, keep, s.size);
      }
      gemm(Transpose::no, Transpose::no, rows, s.size, columns, scores, kKeys, value + k * s.width, s.width,
           k > 0 ? 1.0f : 0.0f, sum, s.size);
    }
    for (int64_t i = 0; i < rows; ++i) {
      write_row(sum + i * s.size, 1 / total[i], out + (n * s.time + q + i) * out_width + head * s.size, s.size);
      lse[(n * s.heads + head) * s.time + q + i] = top[i] + std::log(total[i]);
    }
  });
}

// One task owns a key/value head: its gradients are summed over its query heads and their rows in a fixed order.
void backward(const Sizes& s, Threads& threads, const float* d_outs, const float* qkv, const float* outs,
              const float* lses, float* d_qkv, float* workspace) {
  const int64_t out_width = s.heads * s.size;
  share(threads, s.batch * s.groups, [&](int64_t item, int thread) {
    const int64_t n = item / s.groups, group = item % s.groups;
    float* scores = workspace + thread * backward_floats();
    float *slopes = scores + kTile, *dots = slopes + kTile;
    const float* base = qkv + n * s.time * s.width;
    float* d_base = d_qkv + n * s.time * s.width;
    const float *key = base + s.key(group), *value = base + s.value(group);
    float *d_key = d_base + s.key(group), *d_value = d_base + s.value(group);
    for (int64_t t = 0; t < s.time; ++t) {
      std::memset(d_key + t * s.width, 0, size_t(s.size) * 4);
      std::memset(d_value + t * s.width, 0, size_t(s.size) * 4);
    }
    for (int64_t head = group * s.per_group; head < (group + 1) * s.per_group; ++head)
      for (int64_t q = 0; q < s.time; q += kQueries) {
        const int64_t rows = std::min(kQueries, s.time - q), end = q + rows;
        const float* query = base + q * s.width + s.query(head);
        const float* d_out = d_outs + (n * s.time + q) * out_width + head * s.size;
        const float* out = outs + (n * s.time + q) * out_width + head * s.size;
        const float* lse = lses + (n * s.heads + head) * s.time + q;
        float* d_query = d_base + q * s.width + s.query(head);
        for (int64_t i = 0; i < rows; ++i) dots[i] = dot_row(d_out + i * out_width, out + i * out_width, s.size);
        for (int64_t k = 0; k < end; k += kKeys) {
          const int64_t columns = std::min(kKeys, end - k);
          gemm(Transpose::no, Transpose::yes, rows, columns, s.size, query, s.width, key + k * s.width, s.width, 0,
               scores, kKeys);
          gemm(Transpose::no, Transpose::yes, rows, columns, s.size, d_out, out_width, value + k * s.width, s.width, 0,
               slopes, kKeys);
          for (int64_t i = 0; i < rows; ++i)
            gradient_row(scores + i * kKeys, slopes + i * kKeys, std::clamp<int64_t>(q + i + 1 - k, 0, columns),
                         columns, s.scale, lse[i], dots[i]);
          gemm(Transpose::yes, Transpose::no, columns, s.size, rows, scores, kKeys, d_out, out_width, 1,
               d_value + k * s.width, s.width);
          gemm(Transpose::yes, Transpose::no, columns, s.size, rows, slopes, kKeys, query, s.width, 1,
               d_key + k * s.width, s.width);
          gemm(Transpose::no, Transpose::no, rows, s.size, columns, slopes, kKeys, key + k * s.width, s.width,
               k > 0 ? 1.0f : 0.0f, d_query, s.width);
        }
      }
  });
}

// What has 16 bits is computed in f32, one sequence at a time on copies in the workspace.
Sizes one_sequence(Sizes s) {
  s.batch = 1;
  return s;
}
int64_t copied_floats(const OpView& v, const Sizes& s, int64_t widths, int64_t outs) {
  return is_half(compute_type(v)) ? s.time * (widths * s.width + outs * s.heads * s.size) : 0;
}
void copy_in(const Binding& b, int input, int64_t n, int64_t count, float* to) {
  const DType type = b.input(input).dtype;
  b.threads().split(count, kGrain, [&](int64_t i, int64_t e) {
    to_f32(type, at(b.in<void>(input), type, n * count + i), to + i, e - i);
  });
}
void copy_out(const Binding& b, int64_t n, int64_t count, const float* from) {
  const DType type = b.output(0).dtype;
  b.threads().split(count, kGrain, [&](int64_t i, int64_t e) {
    from_f32(type, from + i, at(b.out<void>(0), type, n * count + i), e - i);
  });
}

void forward(const Binding& b) {
  const Sizes s(b, b.input(0));
  if (!is_half(b.input(0).dtype))
    return forward(s, b.threads(), b.in<float>(0), b.out<float>(0), b.out<float>(1), b.workspace<float>());
  const int64_t of_qkv = s.time * s.width, of_out = s.time * s.heads * s.size;
  float *qkv = b.workspace<float>(), *out = qkv + of_qkv;
  for (int64_t n = 0; n < s.batch; ++n) {
    copy_in(b, 0, n, of_qkv, qkv);
    forward(one_sequence(s), b.threads(), qkv, out, b.out<float>(1) + n * s.heads * s.time, out + of_out);
    copy_out(b, n, of_out, out);
  }
}

void backward(const Binding& b) {
  const Sizes s(b, b.input(1));
  if (!is_half(b.input(0).dtype))
    return backward(s, b.threads(), b.in<float>(0), b.in<float>(1), b.in<float>(2), b.in<float>(3), b.out<float>(0),
                    b.workspace<float>());
  const int64_t of_qkv = s.time * s.width, of_out = s.time * s.heads * s.size;
  float *qkv = b.workspace<float>(), *d_qkv = qkv + of_qkv, *out = d_qkv + of_qkv, *d_out = out + of_out;
  for (int64_t n = 0; n < s.batch; ++n) {
    copy_in(b, 0, n, of_out, d_out);
    copy_in(b, 1, n, of_qkv, qkv);
    copy_in(b, 2, n, of_out, out);
    backward(one_sequence(s), b.threads(), d_out, qkv, out, b.in<float>(3) + n * s.heads * s.time, d_qkv,
             d_out + of_out);
    copy_out(b, n, of_qkv, d_qkv);
  }
}

// Probabilities of one query row, plain.
template <class T>
std::vector<T> reference_row(const Sizes& s, const T* base, int64_t head, int64_t t, T* lse) {
  std::vector<T> p(size_t(t + 1));
  const T scale = T(1 / std::sqrt(double(s.size)));
  T top = T(-1e30), sum = 0;
  for (int64_t k = 0; k <= t; ++k) {
    for (int64_t i = 0; i < s.size; ++i)
      p[k] += base[t * s.width + s.query(head) + i] * base[k * s.width + s.key(head / s.per_group) + i] * scale;
    top = std::max(top, p[k]);
  }
  for (T& value : p) sum += value = std::exp(value - top);
  for (T& value : p) value /= sum;
  *lse = top + std::log(sum);
  return p;
}

template <class T>
void reference_forward(const Binding& b) {
  const Sizes s(b, b.input(0));
  for (int64_t n = 0; n < s.batch; ++n)
    for (int64_t head = 0; head < s.heads; ++head)
      for (int64_t t = 0; t < s.time; ++t) {
        const T* base = b.in<T>(0) + n * s.time * s.width;
        const auto p = reference_row<T>(s, base, head, t, b.out<T>(1) + (n * s.heads + head) * s.time + t);
        for (int64_t i = 0; i < s.size; ++i) {
          T sum = 0;
          for (int64_t k = 0; k <= t; ++k) sum += p[k] * base[k * s.width + s.value(head / s.per_group) + i];
          b.out<T>(0)[(n * s.time + t) * s.heads * s.size + head * s.size + i] = sum;
        }
      }
}

template <class T>
void reference_backward(const Binding& b) {
  const Sizes s(b, b.input(1));
  const T scale = T(1 / std::sqrt(double(s.size)));
  std::fill_n(b.out<T>(0), elements(b.output(0).shape), T(0));
  for (int64_t n = 0; n < s.batch; ++n)
    for (int64_t head = 0; head < s.heads; ++head)
      for (int64_t t = 0; t < s.time; ++t) {
        const T* base = b.in<T>(1) + n * s.time * s.width;
        T* d_base = b.out<T>(0) + n * s.time * s.width;
        const T* d_out = b.in<T>(0) + (n * s.time + t) * s.heads * s.size + head * s.size;
        const int64_t query = t * s.width + s.query(head), key = s.key(head / s.per_group),
                      value = s.value(head / s.per_group);
        T lse;
        const auto p = reference_row<T>(s, base, head, t, &lse);
        std::vector<T> dp(p.size());
        T dot = 0;
        for (size_t k = 0; k < p.size(); ++k) {
          for (int64_t i = 0; i < s.size; ++i) dp[k] += d_out[i] * base[int64_t(k) * s.width + value + i];
          dot += p[k] * dp[k];
        }
        for (size_t k = 0; k < p.size(); ++k) {
          const T ds = p[k] * (dp[k] - dot) * scale;
          for (int64_t i = 0; i < s.size; ++i) {
            d_base[int64_t(k) * s.width + value + i] += p[k] * d_out[i];
            d_base[int64_t(k) * s.width + key + i] += ds * base[query + i];
            d_base[query + i] += ds * base[int64_t(k) * s.width + key + i];
          }
        }
      }
}

void check(const OpView& v, int qkv) {
  bool right = v.has_input(qkv) && is_float(v.input(qkv)) && v.input(qkv).shape.size() == 3 && has_heads(v);
  if (right) right = v.input(qkv).shape[2] % group_width(v) == 0;
  require(right, v, "qkv (B, T, K·(P+2)·D) and attributes head_size = D, queries_per_group = P");
}

// Half of the scores are masked and not computed.
double flops(const OpView& v, int qkv, double products) {
  const Sizes s(v, v.input(qkv));
  return products * double(s.batch * s.heads) * double(s.time) * double(s.time + 1) * double(s.size);
}
double bytes(const OpView& v) {
  double sum = 0;
  for (int i = 0; i < v.inputs(); ++i) sum += double(v.input(i).bytes());
  for (int i = 0; i < v.outputs(); ++i) sum += double(v.output(i).bytes());
  return sum;
}

const AtLoad registered([] {
  register_kind(
      {.name = "attention",
       .summary = "qkv (B, T, K·(P+2)·D) -> o (B, T, H·D), lse (B, H, T), H = K·P; causal",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         check(v, 0);
         const Sizes s(v, v.input(0));
         return {{{s.batch, s.time, s.heads * s.size}, v.input(0).dtype},
                 {{s.batch, s.heads, s.time}, wide(v.input(0).dtype)}};
       },
       .gradient =
           [](Differentiation& d) {
             d.set(0, d.build().emit("attention_gradient", {d.output_gradient(0), d.input(0), d.output(0), d.output(1)},
                                     d.forward().attributes()));
           },
       .cost =
           [](const OpView& v) {
             return Cost{flops(v, 0, 2), bytes(v)};
           },
       .half = true,
       .sharding = {.dimensions = "bth -> bth, bht", .whole = "t"},
       .kernels = {{"cpu", cpu_kernel([](const Binding& b) { forward(b); },
                                      [](const OpView& v, int threads) {
                                        const Sizes s(v, v.input(0));
                                        return (threads * forward_floats(s) + copied_floats(v, s, 1, 1)) * 4;
                                      })},
                   {"reference",
                    reference_kernel([](const Binding& b, auto zero) { reference_forward<decltype(zero)>(b); })}}});
  register_kind(
      {.name = "attention_gradient",
       .summary = "do, qkv, o, lse -> dqkv",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         require(v.inputs() == 4 && v.has_input(0) && v.has_input(2) && v.has_input(3) &&
                     v.input(0).shape == v.input(2).shape,
                 v, "do, qkv, o and lse");
         check(v, 1);
         return {like(v.input(1))};
       },
       // The five products of the backward pass; the recomputed scores are work of this method, not of the model.
       .cost =
           [](const OpView& v) {
             return Cost{flops(v, 1, 4), bytes(v)};
           },
       .half = true,
       .sharding = {.dimensions = "bth, bth, bth, bht -> bth", .whole = "t"},
       .kernels = {{"cpu", cpu_kernel([](const Binding& b) { backward(b); },
                                      [](const OpView& v, int threads) {
                                        const Sizes s(v, v.input(1));
                                        return (threads * backward_floats() + copied_floats(v, s, 2, 2)) * 4;
                                      })},
                   {"reference",
                    reference_kernel([](const Binding& b, auto zero) { reference_backward<decltype(zero)>(b); })}}});
});

}  // namespace
}  // namespace strata
