// Causal attention with grouped queries (tiles: attention_tiles.h).
//
// The last dimension of qkv holds, for each group: its query heads, then the key and the value that they share, D wide
// each, so that a split of that dimension by groups is a split of the model. Ops know the size of a head and the
// queries of a group, which a split does not change, and not how many heads there are.
#include <cmath>

#include "engine/ops/attention_tiles.h"
#include "engine/ops/registration.h"

namespace strata {
namespace {

using attention::Work;
using attention::work_of_self;

// Of a kernel; `documents`: the input that says where they begin, if there is one. Behind it is what dropout needs.
Work work_with(const Binding& b, int qkv, int documents) {
  Work s = work_of_self(b, b.input(qkv));
  if (b.has_input(documents)) s.documents = b.in<int32_t>(documents);
  s.dropped = attention::drawn_by(b, qkv == 1, documents + 1);
  return s;
}
// What has 16 bits is computed in f32, one sequence at a time on copies in the workspace.
Work one_sequence(Work s, int64_t n) {
  s.batch = 1;
  s.dropped.sequence += n;
  if (s.documents) s.documents += n * s.queries;
  return s;
}
int64_t copied_floats(const OpView& v, const Work& s, int64_t widths, int64_t outs) {
  return is_half(compute_type(v)) ? s.queries * (widths * s.width + outs * s.heads * s.size) : 0;
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
  const Work s = work_with(b, 0, 1);
  if (!is_half(b.input(0).dtype))
    return attention::forward(s, b.threads(), b.in<float>(0), b.in<float>(0), nullptr, nullptr, b.out<float>(0),
                              b.out<float>(1), b.workspace<float>());
  const int64_t of_qkv = s.queries * s.width, of_out = s.queries * s.heads * s.size;
  float *qkv = b.workspace<float>(), *out = qkv + of_qkv;
  for (int64_t n = 0; n < s.batch; ++n) {
    copy_in(b, 0, n, of_qkv, qkv);
    attention::forward(one_sequence(s, n), b.threads(), qkv, qkv, nullptr, nullptr, out,
                       b.out<float>(1) + n * s.heads * s.queries, out + of_out);
    copy_out(b, n, of_out, out);
  }
}

void backward(const Binding& b) {
  const Work s = work_with(b, 1, 4);
  if (!is_half(b.input(0).dtype))
    return attention::backward(s, b.threads(), b.in<float>(0), b.in<float>(1), b.in<float>(1), b.in<float>(2),
                               b.in<float>(3), b.out<float>(0), false, b.out<float>(0), b.workspace<float>());
  const int64_t of_qkv = s.queries * s.width, of_out = s.queries * s.heads * s.size;
  float *qkv = b.workspace<float>(), *d_qkv = qkv + of_qkv, *out = d_qkv + of_qkv, *d_out = out + of_out;
  for (int64_t n = 0; n < s.batch; ++n) {
    copy_in(b, 0, n, of_out, d_out);
    copy_in(b, 1, n, of_qkv, qkv);
    copy_in(b, 2, n, of_out, out);
    attention::backward(one_sequence(s, n), b.threads(), d_out, qkv, qkv, out, b.in<float>(3) + n * s.heads * s.queries,
                        d_qkv, false, d_qkv, d_out + of_out);
    copy_out(b, n, of_qkv, d_qkv);
  }
}

// Of one query row, plain: probabilities of the keys up to its own, what dropout keeps of each, and the slopes of their
// scores by q·k.
template <class T>
struct ReferenceRow {
  std::vector<T> p, kept, slope;
  T lse;
};
template <class T>
ReferenceRow<T> reference_row(const Work& s, const T* base, int64_t n, int64_t head, int64_t t) {
  ReferenceRow<T> row{std::vector<T>(size_t(t + 1)), std::vector<T>(size_t(t + 1)), std::vector<T>(size_t(t + 1)), 0};
  T top = T(-1e30), sum = 0;
  for (int64_t k = 0; k <= t; ++k) {
    if (!s.sees(n, t, k)) continue;
    T product = 0;
    for (int64_t i = 0; i < s.size; ++i)
      product += base[t * s.width + s.query(head) + i] * base[k * s.width + s.key(head / s.per_group) + i];
    const attention::PlainScore<T> score(s, product);
    row.kept[k] = T(s.dropped.kept(n, head, t, k));
    row.slope[k] = score.slope;
    top = std::max(top, row.p[k] = score.value);
  }
  for (int64_t k = 0; k <= t; ++k)
    if (s.sees(n, t, k)) sum += row.p[k] = std::exp(row.p[k] - top);
  for (T& value : row.p) value /= sum;
  row.lse = top + std::log(sum);
  return row;
}

template <class T>
void reference_forward(const Binding& b) {
  const Work s = work_with(b, 0, 1);
  for (int64_t n = 0; n < s.batch; ++n)
    for (int64_t head = 0; head < s.heads; ++head)
      for (int64_t t = 0; t < s.queries; ++t) {
        const T* base = b.in<T>(0) + n * s.queries * s.width;
        const auto [p, kept, slope, lse] = reference_row<T>(s, base, n, head, t);
        b.out<T>(1)[(n * s.heads + head) * s.queries + t] = lse;
        for (int64_t i = 0; i < s.size; ++i) {
          T sum = 0;
          for (int64_t k = 0; k <= t; ++k)
            sum += p[k] * kept[k] * base[k * s.width + s.key(head / s.per_group) + s.size + i];
          b.out<T>(0)[(n * s.queries + t) * s.heads * s.size + head * s.size + i] = sum;
        }
      }
}

template <class T>
void reference_backward(const Binding& b) {
  const Work s = work_with(b, 1, 4);
  std::fill_n(b.out<T>(0), elements(b.output(0).shape), T(0));
  for (int64_t n = 0; n < s.batch; ++n)
    for (int64_t head = 0; head < s.heads; ++head)
      for (int64_t t = 0; t < s.queries; ++t) {
        const T* base = b.in<T>(1) + n * s.queries * s.width;
        T* d_base = b.out<T>(0) + n * s.queries * s.width;
        const T* d_out = b.in<T>(0) + (n * s.queries + t) * s.heads * s.size + head * s.size;
        const int64_t query = t * s.width + s.query(head), key = s.key(head / s.per_group),
                      value = s.key(head / s.per_group) + s.size;
        const auto [p, kept, slope, lse] = reference_row<T>(s, base, n, head, t);
        std::vector<T> dp(p.size());
        T dot = 0;
        for (size_t k = 0; k < p.size(); ++k) {
          for (int64_t i = 0; i < s.size; ++i) dp[k] += d_out[i] * base[int64_t(k) * s.width + value + i];
          dot += p[k] * (dp[k] *= kept[k]);
        }
        for (size_t k = 0; k < p.size(); ++k) {
          const T ds = p[k] * (dp[k] - dot) * slope[k];
          for (int64_t i = 0; i < s.size; ++i) {
            d_base[int64_t(k) * s.width + value + i] += p[k] * kept[k] * d_out[i];
            d_base[int64_t(k) * s.width + key + i] += ds * base[query + i];
            d_base[query + i] += ds * base[int64_t(k) * s.width + key + i];
          }
        }
      }
}

void check(const OpView& v, int qkv, int documents) {
  bool right = v.has_input(qkv) && is_float(v.input(qkv)) && v.input(qkv).shape.size() == 3 && has_heads(v);
  if (right)
    right = v.input(qkv).shape[2] % group_width(v) == 0 && v.attributes().integer("window", 0) >= 0 &&
            v.attributes().real("soft_cap", 0.0) >= 0 && v.attributes().real("scale", 1.0) > 0;
  if (right && v.has_input(documents))
    right = v.input(documents).dtype == DType::i32 &&
            v.input(documents).shape == Shape{v.input(qkv).shape[0], v.input(qkv).shape[1]};
  require(
      right && attention::drops_right(v, documents + 1), v,
      "qkv (B, T, K·(P+2)·D), at most the places where documents begin i32 (B, T), and attributes head_size = D, "
      "queries_per_group = P, and at most scale, window, soft_cap, and dropout in [0, 1) with stream and the scalars "
      "seed and step");
}

// Masked scores, those of later keys and of keys before the window, are not computed.
double flops(const OpView& v, int qkv, double products) {
  const Work s = work_of_self(v, v.input(qkv));
  const auto triangle = [](int64_t rows) { return double(rows) * double(rows + 1); };
  const double scores = triangle(s.queries) - triangle(s.window > 0 ? std::max<int64_t>(0, s.queries - s.window) : 0);
  return products * double(s.batch * s.heads) * scores * double(s.size);
}
double bytes(const OpView& v) {
  double sum = 0;
  for (int i = 0; i < v.inputs(); ++i)
    if (v.has_input(i)) sum += double(v.input(i).bytes());
  for (int i = 0; i < v.outputs(); ++i) sum += double(v.output(i).bytes());
  return sum;
}

const AtLoad attention_registered([] {
  register_kind(
      {.name = "attention",
       .summary =
           "qkv (B, T, K·(P+2)·D), [where documents begin i32 (B, T)], [seed, step] -> o (B, T, H·D), lse (B, H, "
           "T), H = K·P; causal, within a document, of at most `window` positions, with `dropout` of "
           "probabilities",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         check(v, 0, 1);
         const Work s = work_of_self(v, v.input(0));
         return {{{s.batch, s.queries, s.heads * s.size}, v.input(0).dtype},
                 {{s.batch, s.heads, s.queries}, wide(v.input(0).dtype)}};
       },
       .gradient =
           [](Differentiation& d) {
             std::vector<TensorId> inputs{d.output_gradient(0), d.input(0), d.output(0), d.output(1)};
             for (int i = 1; i < d.forward().inputs(); ++i) inputs.push_back(d.input(i));
             d.set(0, d.build().emit("attention_gradient", inputs, d.forward().attributes()));
           },
       .cost =
           [](const OpView& v) {
             return Cost{flops(v, 0, 2), bytes(v)};
           },
       .half = true,
       .sharding = {.dimensions = "bth, bt, _, _ -> bth, bht", .whole = "t"},
       .kernels = {{"cpu", cpu_kernel([](const Binding& b) { forward(b); },
                                      [](const OpView& v, int threads) {
                                        const Work s = work_of_self(v, v.input(0));
                                        return (attention::forward_floats(s, threads) + copied_floats(v, s, 1, 1)) * 4;
                                      })},
                   {"reference",
                    reference_kernel([](const Binding& b, auto zero) { reference_forward<decltype(zero)>(b); })}}});
  register_kind(
      {.name = "attention_gradient",
       .summary = "do, qkv, o, lse, [where documents begin i32 (B, T)], [seed, step] -> dqkv",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         require(v.inputs() >= 4 && v.has_input(0) && v.has_input(2) && v.has_input(3) &&
                     v.input(0).shape == v.input(2).shape,
                 v, "do, qkv, o and lse");
         check(v, 1, 4);
         return {like(v.input(1))};
       },
       // The five products of the backward pass; the recomputed scores are work of this method, not of the model.
       .cost =
           [](const OpView& v) {
             return Cost{flops(v, 1, 4), bytes(v)};
           },
       .half = true,
       .sharding = {.dimensions = "bth, bth, bth, bht, bt, _, _ -> bth", .whole = "t"},
       .kernels = {{"cpu", cpu_kernel([](const Binding& b) { backward(b); },
                                      [](const OpView& v, int threads) {
                                        const Work s = work_of_self(v, v.input(1));
                                        return (attention::backward_floats(s, threads) + copied_floats(v, s, 2, 2)) * 4;
                                      })},
                   {"reference",
                    reference_kernel([](const Binding& b, auto zero) { reference_backward<decltype(zero)>(b); })}}});
});

}  // namespace
}  // namespace strata
