// The output layer a chunk of rows at a time: logits exist for one chunk, never for all tokens. What is made of a row's
// logits is the caller's: losses of the whole vocabulary (language_model_head.cpp), or what ranks that each have a part
// of it exchange (vocabulary_loss.cpp).
#pragma once
#include <memory>
#include <optional>

#include "engine/ops/gemm.h"
#include "engine/ops/registration.h"

namespace strata {
namespace head {

// Rows of logits held at once: about 50 MB, where the products are still at full speed.
inline int64_t chunk_rows(int64_t rows, int64_t vocabulary) {
  constexpr int64_t kLogits = 12'900'000;
  return std::min(rows, std::max<int64_t>(64, std::min<int64_t>(1024, kLogits / vocabulary / 64 * 64)));
}
inline int64_t row_stride(int64_t vocabulary) { return (vocabulary + 15) / 16 * 16; }

// Of an op with inputs x (…, C) and w (V, C), and in training output 1 for x's gradient and 2, unless w is frozen, for
// w's.
struct Sizes {
  int64_t rows, hidden, vocabulary, chunk, stride;
  DType type;
  explicit Sizes(const OpView& v)
      : rows(v.rows(0)),
        hidden(v.columns(0)),
        vocabulary(v.input(1).shape[0]),
        chunk(chunk_rows(rows, vocabulary)),
        stride(row_stride(vocabulary)),
        type(v.input(0).dtype) {}
  // The workspace: logits, losses of a chunk's rows in f64, and where the model has 16 bits the logits' gradient in
  // those, and what products need.
  int64_t losses_at() const { return chunk * stride * 4; }
  int64_t halves_at() const { return losses_at() + (chunk * 8 + 63) / 64 * 64; }
  int64_t product_at() const { return halves_at() + (is_half(type) ? (chunk * stride * 2 + 63) / 64 * 64 : 0); }
};

// The products of a chunk of `m` rows.
struct Shapes {
  HalfShape logits, dx, dw_first, dw;
  Shapes(const OpView& v, const Sizes& s, int64_t m)
      : logits{Transpose::no, Transpose::yes, m,        s.vocabulary, s.hidden,
               s.hidden,      s.hidden,       s.stride, s.type,       DType::f32},
        dx{Transpose::no, Transpose::no, m,      s.hidden, s.vocabulary, s.stride,
           s.hidden,      s.hidden,      s.type, s.type,   false,        v.accumulates(1)},
        dw_first{Transpose::yes, Transpose::no, s.vocabulary, s.hidden,   m,     s.stride,
                 s.hidden,       s.hidden,      s.type,       DType::f32, false, v.accumulates(2)},
        dw{dw_first} {
    dw.accumulate = true;
  }
};

// Of an op with gradients: whether w's is among them.
inline bool has_weight_gradient(const OpView& v) { return v.outputs() > 2; }

struct Products {
  HalfGemm logits;
  std::optional<HalfGemm> dx, dw_first, dw;
  Products(const Binding& b, const Shapes& s, bool gradient) : logits(b.threads(), s.logits) {
    if (!gradient) return;
    dx.emplace(b.threads(), s.dx);
    if (!has_weight_gradient(b)) return;
    dw_first.emplace(b.threads(), s.dw_first);
    dw.emplace(b.threads(), s.dw);
  }
};

inline int64_t workspace(const OpView& v, bool gradient, int threads) {
  const Sizes s(v);
  if (!is_half(s.type)) return s.product_at();
  int64_t most = 0;
  for (int64_t m : {s.chunk, s.rows % s.chunk}) {
    if (m == 0) continue;
    const Shapes shapes(v, s, m);
    most = std::max(most, HalfGemm::workspace(shapes.logits, threads));
    if (gradient)
      for (const HalfShape* shape : {&shapes.dx, &shapes.dw_first, &shapes.dw})
        most = std::max(most, HalfGemm::workspace(*shape, threads));
  }
  return s.product_at() + most;
}

// For each row r of the logits: row(r, logits) returns its loss, which is summed, and where there are gradients turns
// the logits into theirs. dx and dw are outputs 1 and 2.
template <class Row>
double run_chunks(const Binding& b, bool gradient, const Products* full, const Products* last, Row&& row) {
  const Sizes s(b);
  auto* const base = b.workspace<std::byte>();
  auto* logits = reinterpret_cast<float*>(base);
  auto* losses = reinterpret_cast<double*>(base + s.losses_at());
  void *const halves = base + s.halves_at(), *const scratch = base + s.product_at();
  double total = 0;
  for (int64_t first = 0; first < s.rows; first += s.chunk) {
    const int64_t m = std::min(s.chunk, s.rows - first);
    const Products* products = m == s.chunk ? full : last;
    const void* x = at(b.in<void>(0), s.type, first * s.hidden);
    if (products)
      products->logits.run(x, b.in<void>(1), nullptr, logits, scratch);
    else
      gemm(b.threads(), Transpose::no, Transpose::yes, m, s.vocabulary, s.hidden, b.in<float>(0) + first * s.hidden,
           s.hidden, b.in<float>(1), s.hidden, 0, logits, s.stride);
    b.threads().split(m, 1, [&](int64_t i, int64_t e) {
      for (; i < e; ++i) {
        losses[i] = row(first + i, logits + i * s.stride);
        if (gradient && products)
          from_f32(s.type, logits + i * s.stride, at(halves, s.type, i * s.stride), s.vocabulary);
      }
    });
    for (int64_t i = 0; i < m; ++i) total += losses[i];
    if (!gradient) continue;
    if (products) {
      products->dx->run(halves, b.in<void>(1), nullptr, at(b.out<void>(1), s.type, first * s.hidden), scratch);
      if (has_weight_gradient(b))
        (first > 0 ? products->dw : products->dw_first)->run(halves, x, nullptr, b.out<void>(2), scratch);
      continue;
    }
    gemm(b.threads(), Transpose::no, Transpose::no, m, s.hidden, s.vocabulary, logits, s.stride, b.in<float>(1),
         s.hidden, b.accumulates(1) ? 1.0f : 0.0f, b.out<float>(1) + first * s.hidden, s.hidden);
    if (has_weight_gradient(b))
      gemm(b.threads(), Transpose::yes, Transpose::no, s.vocabulary, s.hidden, m, logits, s.stride,
           b.in<float>(0) + first * s.hidden, s.hidden, first > 0 || b.accumulates(2) ? 1.0f : 0.0f, b.out<float>(2),
           s.hidden);
  }
  return total;
}

// A kernel of either precision: body(binding, products of a full chunk, products of the last one); null for f32.
template <class Body>
Kernel chunked_kernel(bool gradient, Body body) {
  return {[=](const Binding& b) -> Launch {
            require(compute_type(b) != DType::f64, b, "f32, bf16 or f16 tensors on the cpu backend");
            const Sizes s(b);
            if (!is_half(s.type)) return [=] { body(b, nullptr, nullptr); };
            const auto full = std::make_shared<Products>(b, Shapes(b, s, s.chunk), gradient);
            const int64_t rest = s.rows % s.chunk;
            const auto last = rest ? std::make_shared<Products>(b, Shapes(b, s, rest), gradient) : full;
            return [=] { body(b, full.get(), last.get()); };
          },
          [=](const OpView& v, int threads) { return workspace(v, gradient, threads); }};
}

// Soft caps (Gemma 2, arXiv 2408.00118): logits x become cap·tanh(x / cap); attribute soft_cap, absent or 0: they stay.
inline float cap_of(const OpView& v) { return float(v.attributes().real("soft_cap", 0.0)); }
void cap_row(float* logits, float cap, int64_t n);
// Turns capped logits into scale·(softmax - onehot) times the cap's slope. `lse` is the logarithm of the sum of all
// exponentials; `target` is -1 where it is not among these.
void capped_gradient(float* logits, int64_t n, int64_t target, float scale, float cap, double lse);

inline bool fits(const OpView& v) {
  return v.inputs() >= 3 && v.has_input(0) && v.has_input(1) && v.has_input(2) && is_float(v.input(0)) &&
         v.input(1).dtype == v.input(0).dtype && v.input(1).shape.size() == 2 && v.columns(0) == v.columns(1) &&
         v.input(2).dtype == DType::i32 && elements(v.input(2).shape) == v.rows(0);
}
// The gradient rule of a loss that `kind` makes together with its gradients: of x and w, or where w is frozen of x
// alone.
inline void gradients(Differentiation& d, const std::string& kind) {
  std::vector<TensorId> inputs = d.forward().op().inputs;
  if (d.output_gradient(0)) inputs.push_back(d.output_gradient(0));
  std::vector<TensorId> outputs{d.output(0), {}};
  if (d.needs(1)) outputs.push_back({});
  const auto out = d.build().emit_all(kind + (d.needs(1) ? "_with_gradient" : "_with_input_gradient"), inputs,
                                      d.forward().attributes(), outputs);
  d.replaces_forward();
  for (int i = 0; i + 1 < int(out.size()); ++i) d.set(i, out[size_t(i) + 1]);
}
// Registers what the rule emits: `kind` with loss, dx and dw, and the same without dw.
inline void register_with_gradients(OpKind kind, const std::string& name,
                                    std::function<std::vector<TensorSpec>(const OpView&)> loss) {
  const std::string summary = kind.summary, dimensions = kind.sharding.dimensions;
  for (const bool of_weight : {true, false}) {
    kind.name = name + (of_weight ? "_with_gradient" : "_with_input_gradient");
    kind.summary = summary + " -> loss (1), dx (B, T, C)" + (of_weight ? ", dw (V, C)" : "");
    kind.sharding.dimensions = dimensions + " -> _, ...c" + (of_weight ? ", vc" : "");
    kind.accumulates = of_weight ? 6 : 2;
    kind.shape = [loss, of_weight](const OpView& v) {
      std::vector<TensorSpec> specs = loss(v);
      specs.push_back(like(v.input(0)));
      if (of_weight) specs.push_back({v.input(1).shape, wide(v.input(1).dtype)});
      return specs;
    };
    register_kind(kind);
  }
}
// Of as many products of the size of the logits'.
inline Cost cost(const OpView& v, double products) {
  const double size = double(size_of(v.input(0).dtype));
  return {2 * products * double(v.rows(0)) * double(v.columns(0)) * double(v.input(1).shape[0]),
          products * size * (double(elements(v.input(0).shape)) + double(elements(v.input(1).shape)))};
}

}  // namespace head
}  // namespace strata
