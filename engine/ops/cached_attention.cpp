// Attention of the next tokens of sequences on all tokens so far: keys and values of those before are in a cache, to
// which the op adds the tokens' own. What generation puts in place of `attention` (planning/continued.h).
//
// A row of the cache is a position: of each group its key, then its value, D numbers each.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "engine/ops/attention_tiles.h"
#include "engine/ops/registration.h"

namespace strata::cached {
namespace {

using attention::Work;

// Of one sequence; where its queries are is set when the op runs.
Work work_of_cache(const OpView& v) {
  Work w = attention::work_of_self(v, v.input(0));
  w.batch = 1;
  w.keys = v.input(2).shape[1];
  w.key_width = v.input(2).shape[2];
  w.key_first = 0;
  w.key_step = 2 * w.size;
  return w;
}
Work at_position(Work work, int64_t first) {
  work.query_at.first = first;
  return work;
}

// Keys and values of the tokens to their positions in the cache; those behind its end have no place.
void append(const Binding& b, const Work& w) {
  const DType type = b.input(0).dtype;
  const int64_t count = w.queries, bytes = 2 * w.size * size_of(type);
  b.threads().split(b.input(0).shape[0] * count, 4, [&](int64_t i, int64_t e) {
    for (; i < e; ++i) {
      const int64_t n = i / count, position = b.in<int32_t>(1)[n] + i % count;
      if (position < 0 || position >= w.keys) continue;
      for (int64_t group = 0; group < w.groups; ++group)
        std::memcpy(at(b.out<void>(1), type, (n * w.keys + position) * w.key_width + w.key(group)),
                    at(b.in<void>(0), type, i * w.width + w.own_key(group)), size_t(bytes));
    }
  });
}

// Workspace in floats: the logarithms of sums, what tiles need, and of 16-bit tensors queries, keys and results of one
// sequence.
struct Room {
  int64_t lse, tiles, queries, keys, out;
  Room(const OpView& v, const Work& w, int threads)
      : lse(w.heads * w.queries), tiles(attention::forward_floats(w, threads)), queries(0), keys(0), out(0) {
    if (!is_half(v.input(0).dtype)) return;
    queries = w.queries * w.width;
    keys = w.keys * w.key_width;
    out = w.queries * w.out_width();
  }
  int64_t floats() const { return lse + tiles + queries + keys + out; }
};

void forward(const Binding& b) {
  const Work w = work_of_cache(b);
  append(b, w);
  const DType type = b.input(0).dtype;
  const Room room(b, w, b.threads().count());
  float *lse = b.workspace<float>(), *tiles = lse + room.lse, *queries = tiles + room.tiles,
        *keys = queries + room.queries, *out = keys + room.keys;
  const auto copy = [&](const void* from, int64_t first, int64_t count, float* to) {
    b.threads().split(count, kGrain,
                      [&](int64_t i, int64_t e) { to_f32(type, at(from, type, first + i), to + i, e - i); });
  };
  const int64_t of_queries = w.queries * w.width, of_keys = w.keys * w.key_width, of_out = w.queries * w.out_width();
  for (int64_t n = 0; n < b.input(0).shape[0]; ++n) {
    const int64_t first = b.in<int32_t>(1)[n];
    const Work here = at_position(w, first);
    if (!is_half(type)) {
      attention::forward(here, b.threads(), b.in<float>(0) + n * of_queries, b.out<float>(1) + n * of_keys, nullptr,
                         nullptr, b.out<float>(0) + n * of_out, lse, tiles);
      continue;
    }
    copy(b.in<void>(0), n * of_queries, of_queries, queries);
    copy(b.out<void>(1), n * of_keys, std::min(first + w.queries, w.keys) * w.key_width, keys);
    attention::forward(here, b.threads(), queries, keys, nullptr, nullptr, out, lse, tiles);
    b.threads().split(of_out, kGrain, [&](int64_t i, int64_t e) {
      from_f32(type, out + i, at(b.out<void>(0), type, n * of_out + i), e - i);
    });
  }
}

template <class T>
void reference(const Binding& b) {
  const Work w = work_of_cache(b);
  append(b, w);
  std::vector<T> p(static_cast<size_t>(w.keys));
  for (int64_t n = 0; n < b.input(0).shape[0]; ++n) {
    const Work here = at_position(w, b.in<int32_t>(1)[n]);
    const T* cache = b.out<T>(1) + n * w.keys * w.key_width;
    for (int64_t head = 0; head < w.heads; ++head)
      for (int64_t t = 0; t < w.queries; ++t) {
        const T* query = b.in<T>(0) + (n * w.queries + t) * w.width + w.query(head);
        T* out = b.out<T>(0) + (n * w.queries + t) * w.out_width() + head * w.size;
        const int64_t end = std::min(here.query_at(t) + 1, w.keys), key = w.key(head / w.per_group);
        T top = T(-1e30), sum = 0;
        for (int64_t k = 0; k < end; ++k) {
          T product = 0;
          for (int64_t i = 0; i < w.size; ++i) product += query[i] * cache[k * w.key_width + key + i];
          p[size_t(k)] = attention::PlainScore<T>(w, product).value;
          if (here.sees(0, t, k)) top = std::max(top, p[size_t(k)]);
        }
        for (int64_t k = 0; k < end; ++k)
          sum += p[size_t(k)] = here.sees(0, t, k) ? std::exp(p[size_t(k)] - top) : T(0);
        for (int64_t i = 0; i < w.size; ++i) {
          T value = 0;
          for (int64_t k = 0; k < end; ++k) value += p[size_t(k)] * cache[k * w.key_width + key + w.size + i];
          out[i] = value / sum;
        }
      }
  }
}

std::vector<TensorSpec> shape(const OpView& v) {
  bool right = v.inputs() == 3 && v.has_input(0) && v.has_input(1) && v.has_input(2) && is_float(v.input(0)) &&
               v.input(0).shape.size() == 3 && has_heads(v) && v.columns(0) % group_width(v) == 0;
  right = right && v.input(1).dtype == DType::i32 && v.input(1).shape == Shape{v.input(0).shape[0]} &&
          v.input(2).dtype == v.input(0).dtype && v.input(2).shape.size() == 3 &&
          v.input(2).shape[0] == v.input(0).shape[0] &&
          v.input(2).shape[2] == v.columns(0) / group_width(v) * 2 * v.attributes().integer("head_size");
  right = right && v.attributes().integer("window", 0) >= 0 && v.attributes().real("soft_cap", 0.0) >= 0 &&
          v.attributes().real("scale", 1.0) > 0;
  require(right, v,
          "qkv (B, T, K·(P+2)·D), first i32 (B), cache (B, S, K·2·D) and attributes head_size = D, queries_per_group = "
          "P, and at most scale, window and soft_cap");
  const Work w = work_of_cache(v);
  return {{{v.input(0).shape[0], w.queries, w.out_width()}, v.input(0).dtype}, like(v.input(2))};
}

const AtLoad cached_attention_registered([] {
  register_kind(
      {.name = "cached_attention",
       .summary = "qkv (B, T, K·(P+2)·D), first i32 (B), cache (B, S, K·2·D) -> o (B, T, H·D), H = K·P, and "
                  "the cache with keys and values of positions first to first + T - 1; causal, as attention",
       .shape = shape,
       // As if the cache was full.
       .cost =
           [](const OpView& v) {
             const Work w = work_of_cache(v);
             const double keys = double(w.window > 0 ? std::min(w.window, w.keys) : w.keys);
             return Cost{4 * double(v.input(0).shape[0] * w.heads * w.queries) * keys * double(w.size),
                         double(v.input(0).bytes() + v.output(0).bytes() + v.input(2).bytes())};
           },
       .half = true,
       .kernels = {
           {"cpu", cpu_kernel(forward, [](const OpView& v,
                                          int threads) { return Room(v, work_of_cache(v), threads).floats() * 4; })},
           {"reference", reference_kernel([](const Binding& b, auto zero) { reference<decltype(zero)>(b); })}}});
});

}  // namespace
}  // namespace strata::cached
