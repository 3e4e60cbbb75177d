// Which experts a token goes to: the router's product, the choice of the k largest with their weights, and the losses
// that keep the load even. All of it in f32 also where activations have 16 bits (Fedus et al., arXiv 2101.03961, 2.4).
// Sums are cut by sizes alone, so that routing has the same bits for any number of threads, and when it is made again.
#include <atomic>
#include <cmath>

#include "engine/ops/gemm.h"
#include "engine/ops/loss_of_tokens.h"
#include "engine/ops/registration.h"

namespace strata::router {
namespace {

constexpr int64_t kBlock = 128;  // tokens that one task takes
int64_t blocks_of(int64_t rows) { return (rows + kBlock - 1) / kBlock; }

bool are_logits(const OpView& v, int i) {
  return v.has_input(i) && (v.input(i).dtype == DType::f32 || v.input(i).dtype == DType::f64);
}
bool are_choices(const OpView& v, int i, int of) {
  return v.has_input(i) && v.input(i).dtype == DType::i32 && v.rows(i) == v.rows(of) && v.columns(i) <= v.columns(of);
}

// The router's product and its gradients: x and w may have 16 bits, logits and the gradient of w have 32. Numbers of 16
// bits are widened block by block.
bool is_wide(const OpView& v, int i) { return v.has_input(i) && v.input(i).dtype == wide(v.input(i).dtype); }
bool is_router(const OpView& v, int i) {
  return v.has_input(i) && is_float(v.input(i)) && v.input(i).shape.size() == 2;
}

// `count` rows of `columns` numbers as f32: themselves, or a copy of them.
const float* widened(DType type, const void* from, int64_t stride, int64_t rows, int64_t columns, float* copy) {
  if (type == DType::f32) return static_cast<const float*>(from);
  for (int64_t r = 0; r < rows; ++r) to_f32(type, at(from, type, r * stride), copy + r * columns, columns);
  return copy;
}

// Calls task(i, scratch) for i in [0, count), each on one thread with scratch memory of its own: so many floats, behind
// the first `shared` of the workspace.
template <class Task>
void each_task(const Binding& b, int64_t count, int64_t shared, int64_t scratch, Task&& task) {
  std::atomic<int64_t> next{0};
  b.threads().parallel([&](int thread) {
    float* const own = b.workspace<float>() ? b.workspace<float>() + shared + thread * scratch : nullptr;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(i, own);
  });
}

void logits(const Binding& b) {
  const int64_t tokens = b.rows(0), columns = b.columns(0), experts = b.input(1).shape[0], all = experts * columns;
  const DType type = b.input(0).dtype;
  const float* w = widened(type, b.in<void>(1), columns, experts, columns, b.workspace<float>());
  each_task(b, blocks_of(tokens), all, kBlock * columns, [&](int64_t block, float* scratch) {
    const int64_t t = block * kBlock, count = std::min(kBlock, tokens - t);
    const float* x = widened(type, at(b.in<void>(0), type, t * columns), columns, count, columns, scratch);
    gemm(Transpose::no, Transpose::yes, count, experts, columns, x, columns, w, columns, 0.0f,
         b.out<float>(0) + t * experts, experts);
  });
}

void input_gradient(const Binding& b) {
  const int64_t tokens = b.rows(0), experts = b.columns(0), columns = b.columns(1), all = experts * columns;
  const DType type = b.input(1).dtype;
  const float* w = widened(type, b.in<void>(1), columns, experts, columns, b.workspace<float>());
  each_task(b, blocks_of(tokens), all, kBlock * columns, [&](int64_t block, float* scratch) {
    const int64_t t = block * kBlock, count = std::min(kBlock, tokens - t);
    void* const out = at(b.out<void>(0), type, t * columns);
    float* const dx = type == DType::f32 ? static_cast<float*>(out) : scratch;
    if (b.accumulates(0) && dx == scratch) to_f32(type, out, dx, count * columns);
    gemm(Transpose::no, Transpose::no, count, columns, experts, b.in<float>(0) + t * experts, experts, w, columns,
         b.accumulates(0) ? 1.0f : 0.0f, dx, columns);
    if (dx == scratch) from_f32(type, dx, out, count * columns);
  });
}

// Pieces of the columns; tokens are summed block by block.
void router_weight_gradient(const Binding& b) {
  const int64_t tokens = b.rows(0), experts = b.columns(0), columns = b.columns(1);
  const DType type = b.input(1).dtype;
  each_task(b, blocks_of(columns), 0, kBlock * kBlock, [&](int64_t piece, float* scratch) {
    const int64_t c = piece * kBlock, n = std::min(kBlock, columns - c);
    for (int64_t t = 0; t < tokens; t += kBlock) {
      const int64_t count = std::min(kBlock, tokens - t);
      const float* x = widened(type, at(b.in<void>(1), type, t * columns + c), columns, count, n, scratch);
      gemm(Transpose::yes, Transpose::no, experts, n, count, b.in<float>(0) + t * experts, experts, x,
           type == DType::f32 ? columns : n, b.accumulates(0) || t > 0 ? 1.0f : 0.0f, b.out<float>(0) + c, columns);
    }
  });
}

// Σ a(i, l) b(l, j) by plain loops; strides as given.
template <class T>
void plain(const Binding& binding, int64_t m, int64_t n, int64_t k, int64_t ai, int64_t al, int64_t bl, int64_t bj) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      T& to = binding.out<T>(0)[i * n + j];
      T sum = binding.accumulates(0) ? to : T(0);
      for (int64_t l = 0; l < k; ++l) sum += binding.in<T>(0)[i * ai + l * al] * binding.in<T>(1)[l * bl + j * bj];
      to = sum;
    }
}

// Floats: `shared` ones if numbers are widened, and for each thread as many as a task takes.
Kernel product_kernel(void (*run)(const Binding&), bool shared, int64_t (*scratch)(const OpView&)) {
  return cpu_kernel(run, [=](const OpView& v, int threads) -> int64_t {
    if (!is_half(v.input(1).dtype)) return 0;
    return ((shared ? elements(v.input(1).shape) : 0) + threads * scratch(v)) * 4;
  });
}
int64_t block_of_tokens(const OpView& v) { return kBlock * v.columns(1); }
int64_t square_block(const OpView&) { return kBlock * kBlock; }

Cost product_cost(const OpView& v) {
  const double columns = double(v.columns(1));
  const double numbers = double(elements(v.op().kind->name == "router_logits" ? v.output(0).shape : v.input(0).shape));
  return {2 * numbers * columns, double(v.input(0).bytes() + v.input(1).bytes() + v.output(0).bytes())};
}

void register_logits() {
  register_kind({.name = "router_logits",
                 .summary = "x (…, C), w (E, C) -> logits f32 (…, E) = x wᵀ",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() == 2 && v.has_input(0) && is_float(v.input(0)) && is_router(v, 1) &&
                               v.columns(0) == v.columns(1) && v.input(0).dtype == v.input(1).dtype,
                           v, "x (…, C) and w (E, C)");
                   Shape shape = v.input(0).shape;
                   shape.back() = v.input(1).shape[0];
                   return {{shape, wide(v.input(0).dtype)}};
                 },
                 .gradient =
                     [](Differentiation& d) {
                       const TensorId dy = d.output_gradient(0);
                       if (d.needs(1)) d.set(1, d.build().emit("router_weight_gradient", {dy, d.input(0)}));
                       if (d.needs(0)) d.set(0, d.build().emit("router_input_gradient", {dy, d.input(1)}));
                     },
                 .cost = product_cost,
                 .half = true,
                 .sharding = {.dimensions = "...c, ec -> ...e", .linear = 1},
                 .kernels = {{"cpu", product_kernel(logits, true, block_of_tokens)},
                             {"reference", reference_kernel([](const Binding& b, auto zero) {
                                const int64_t columns = b.columns(0);
                                plain<decltype(zero)>(b, b.rows(0), b.input(1).shape[0], columns, columns, 1, 1,
                                                      columns);
                              })}}});
  register_kind({.name = "router_input_gradient",
                 .summary = "dlogits f32 (…, E), w (E, C) -> dx (…, C) = dlogits w",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() == 2 && is_wide(v, 0) && is_router(v, 1) && v.columns(0) == v.input(1).shape[0],
                           v, "dlogits f32 (…, E) and w (E, C)");
                   Shape shape = v.input(0).shape;
                   shape.back() = v.columns(1);
                   return {{shape, v.input(1).dtype}};
                 },
                 .cost = product_cost,
                 .accumulates = 1,
                 .half = true,
                 .sharding = {.dimensions = "...e, ec -> ...c", .linear = 1},
                 .kernels = {{"cpu", product_kernel(input_gradient, true, block_of_tokens)},
                             {"reference", reference_kernel([](const Binding& b, auto zero) {
                                const int64_t experts = b.columns(0), columns = b.columns(1);
                                plain<decltype(zero)>(b, b.rows(0), columns, experts, experts, 1, columns, 1);
                              })}}});
  register_kind({.name = "router_weight_gradient",
                 .summary = "dlogits f32 (…, E), x (…, C) -> dw f32 (E, C) = dlogitsᵀ x",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() == 2 && is_wide(v, 0) && v.has_input(1) && is_float(v.input(1)) &&
                               v.rows(0) == v.rows(1),
                           v, "dlogits f32 (…, E) and x (…, C) with as many rows");
                   return {{{v.columns(0), v.columns(1)}, v.input(0).dtype}};
                 },
                 .cost = product_cost,
                 .accumulates = 1,
                 .half = true,
                 .sharding = {.dimensions = "...e, ...c -> ec"},
                 .kernels = {{"cpu", product_kernel(router_weight_gradient, false, square_block)},
                             {"reference", reference_kernel([](const Binding& b, auto zero) {
                                const int64_t experts = b.columns(0), columns = b.columns(1);
                                plain<decltype(zero)>(b, experts, columns, b.rows(0), 1, experts, columns, 1);
                              })}}});
}

// log Σ exp of a row of logits, and by it any probability without keeping them.
template <class T>
T log_sum(const T* logits, int64_t n) {
  T most = logits[0], sum = 0;
  for (int64_t e = 1; e < n; ++e) most = std::max(most, logits[e]);
  for (int64_t e = 0; e < n; ++e) sum += std::exp(logits[e] - most);
  return most + std::log(sum);
}

// The k of the largest scores, the first of equals first. NaN is never larger, so that what comes of it is an expert
// all the same.
template <class Score>
void choose(int64_t experts, int64_t k, int32_t* chosen, Score score) {
  for (int64_t j = 0; j < k; ++j) {
    int32_t best = -1;
    for (int32_t e = 0; e < experts; ++e)
      if (std::find(chosen, chosen + j, e) == chosen + j && (best < 0 || score(e) > score(best))) best = e;
    chosen[j] = best;
  }
}

// Weights of the chosen: their probabilities among all experts, or among themselves.
template <class T>
void weigh(const T* logits, int64_t experts, const int32_t* chosen, int64_t k, bool normalize, T* weights) {
  for (int64_t j = 0; j < k; ++j) weights[j] = logits[chosen[j]];
  const T all = normalize ? log_sum(weights, k) : log_sum(logits, experts);
  for (int64_t j = 0; j < k; ++j) weights[j] = std::exp(weights[j] - all);
}

template <class T>
void route(const Binding& b, int64_t first, int64_t last) {
  const int64_t experts = b.columns(0), k = b.attributes().integer("k");
  const bool normalize = b.attributes().integer("normalize") != 0;
  for (int64_t t = first; t < last; ++t) {
    const T* logits = b.in<T>(0) + t * experts;
    int32_t* const chosen = b.out<int32_t>(1) + t * k;
    if (const T* bias = b.in<T>(1)) {
      const T all = log_sum(logits, experts);
      choose(experts, k, chosen, [&](int64_t e) { return std::exp(logits[e] - all) + bias[e]; });
    } else {
      choose(experts, k, chosen, [&](int64_t e) { return logits[e]; });
    }
    weigh(logits, experts, chosen, k, normalize, b.out<T>(0) + t * k);
  }
}

// Of a softmax over all experts or over the chosen: dl = p·(dp - Σ p·dp), where dp of those not chosen is zero.
template <class T>
void route_gradient(const Binding& b, int64_t first, int64_t last) {
  const int64_t k = b.columns(0), experts = b.columns(1);
  const bool normalize = b.attributes().integer("normalize") != 0;
  for (int64_t t = first; t < last; ++t) {
    const T *dw = b.in<T>(0) + t * k, *logits = b.in<T>(1) + t * experts;
    const int32_t* chosen = b.in<int32_t>(2) + t * k;
    T* dl = b.out<T>(0) + t * experts;
    T all;
    if (normalize) {
      T most = logits[chosen[0]], sum = 0;
      for (int64_t j = 1; j < k; ++j) most = std::max(most, logits[chosen[j]]);
      for (int64_t j = 0; j < k; ++j) sum += std::exp(logits[chosen[j]] - most);
      all = most + std::log(sum);
    } else {
      all = log_sum(logits, experts);
    }
    T mean = 0;
    for (int64_t j = 0; j < k; ++j) mean += std::exp(logits[chosen[j]] - all) * dw[j];
    for (int64_t e = 0; e < experts; ++e) dl[e] = normalize ? T(0) : -std::exp(logits[e] - all) * mean;
    for (int64_t j = 0; j < k; ++j) {
      const T p = std::exp(logits[chosen[j]] - all);
      dl[chosen[j]] = p * (dw[j] - mean);
    }
  }
}

// Kernels of a function of a range of tokens, of which input `rows` has a row each.
template <class Single, class Plain>
std::map<std::string, Kernel, std::less<>> by_tokens(int rows, Single single, Plain plain) {
  return {{"cpu", cpu_kernel([=](const Binding& b) {
             b.threads().split(b.rows(rows), 16, [&](int64_t t, int64_t end) { single(b, t, end); });
           })},
          {"reference", reference_kernel([=](const Binding& b, auto zero) { plain(b, b.rows(rows), zero); })}};
}

// What is added to probabilities for the choice alone (Wang et al., arXiv 2408.15664).
bool is_bias(const OpView& v) {
  return v.has_input(1) && v.input(1).shape == Shape{v.columns(0)} && v.input(1).dtype == v.input(0).dtype;
}

void register_route() {
  register_kind({.name = "route",
                 .summary = "logits f32 (…, E), [bias f32 (E)] -> weights f32 (…, k), choices i32 (…, k): the k "
                            "largest; attributes k, normalize "
                            "(1: a softmax over the chosen, 0: over all)",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require((v.inputs() == 1 || (v.inputs() == 2 && is_bias(v))) && are_logits(v, 0) &&
                               v.attributes().has("k") && v.attributes().has("normalize") &&
                               v.attributes().integer("k") >= 1 && v.attributes().integer("k") <= v.columns(0),
                           v, "logits f32 (…, E) and attributes k, of 1 to E, and normalize");
                   Shape shape = v.input(0).shape;
                   shape.back() = v.attributes().integer("k");
                   return {{shape, v.input(0).dtype}, {shape, DType::i32}};
                 },
                 .gradient =
                     [](Differentiation& d) {
                       d.set(0, d.build().emit("route_gradient", {d.output_gradient(0), d.input(0), d.output(1)},
                                               {{"normalize", d.forward().attributes().integer("normalize")}}));
                     },
                 .sharding = {.dimensions = "...e, e -> ...k, ...k", .whole = "ek"},
                 .kernels = by_tokens(0, route<float>, [](const Binding& b, int64_t rows, auto zero) {
                   route<decltype(zero)>(b, 0, rows);
                 })});
  register_kind({.name = "route_gradient",
                 .summary = "dweights f32 (…, k), logits f32 (…, E), choices i32 (…, k) -> dlogits f32 (…, E)",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() == 3 && are_logits(v, 0) && are_logits(v, 1) && are_choices(v, 2, 1) &&
                               v.input(0).shape == v.input(2).shape && v.input(0).dtype == v.input(1).dtype,
                           v, "dweights f32 (…, k), logits f32 (…, E) and choices i32 (…, k)");
                   return {like(v.input(1))};
                 },
                 .sharding = {.dimensions = "...k, ...e, ...k -> ...e", .whole = "ek"},
                 .kernels = by_tokens(0, route_gradient<float>, [](const Binding& b, int64_t rows, auto zero) {
                   route_gradient<decltype(zero)>(b, 0, rows);
                 })});
}

// scale·(balance·E·Σ_e f_e·P_e + z·mean (log Σ exp l)²): f_e is the number of choices of expert e (of each token the
// first `counted`) by the number of tokens, P_e the mean of its probability (arXiv 2101.03961, equations 4 to 6; router
// z-loss: arXiv 2202.08906, equation 5).
struct LossTerms {
  explicit LossTerms(const Binding& b)
      : balance(b.attributes().real("balance")), z(b.attributes().real("z")), scale(b.attributes().real("scale")) {}
  double balance, z, scale;
};

// Of each expert the number of choices by the number of tokens; of a token the first `counted` ones.
void count_choices(const Binding& b, double* share) {
  const int64_t experts = b.columns(0), tokens = b.rows(0), k = b.columns(1);
  std::fill_n(share, experts, 0.0);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t j = 0; j < b.attributes().integer("counted"); ++j) share[b.in<int32_t>(1)[t * k + j]] += 1;
  for (int64_t e = 0; e < experts; ++e) share[e] /= double(tokens);
}

// A block of tokens: sums of probabilities (E), then of squares of log Σ exp.
template <class T>
void sum_block(const T* logits, int64_t tokens, int64_t experts, double* sums) {
  std::fill_n(sums, experts + 1, 0.0);
  for (int64_t t = 0; t < tokens; ++t, logits += experts) {
    const T all = log_sum(logits, experts);
    for (int64_t e = 0; e < experts; ++e) sums[e] += double(std::exp(logits[e] - all));
    sums[experts] += double(all) * double(all);
  }
}

template <class T>
void router_loss(const Binding& b) {
  const int64_t experts = b.columns(0), tokens = b.rows(0), blocks = blocks_of(tokens);
  const LossTerms terms(b);
  auto* const sums = b.workspace<double>();  // (blocks + 1, E + 1); the last row for choices
  b.threads().each(blocks, [&](int64_t block) {
    sum_block(b.in<T>(0) + block * kBlock * experts, std::min(kBlock, tokens - block * kBlock), experts,
              sums + block * (experts + 1));
  });
  double* const share = sums + blocks * (experts + 1);
  count_choices(b, share);
  for (int64_t block = 1; block < blocks; ++block)
    for (int64_t e = 0; e <= experts; ++e) sums[e] += sums[block * (experts + 1) + e];
  double even = 0;
  for (int64_t e = 0; e < experts; ++e) even += share[e] * sums[e];
  const double n = double(tokens);
  *b.out<T>(0) = T(terms.scale * (terms.balance * double(experts) * even / n + terms.z * sums[experts] / n));
}

template <class T>
void router_loss_gradient(const Binding& b) {
  const int64_t experts = b.columns(0), tokens = b.rows(0);
  const LossTerms terms(b);
  const double factor = terms.scale / double(tokens) * (b.has_input(2) ? *b.in<double>(2) : 1.0);
  auto* const share = b.workspace<double>();
  count_choices(b, share);
  b.threads().split(tokens, 16, [&](int64_t t, int64_t end) {
    for (; t < end; ++t) {
      const T* logits = b.in<T>(0) + t * experts;
      T* dl = b.out<T>(0) + t * experts;
      const double all = double(log_sum(logits, experts));
      double mean = 0;
      for (int64_t e = 0; e < experts; ++e) mean += std::exp(double(logits[e]) - all) * share[e];
      for (int64_t e = 0; e < experts; ++e) {
        const double p = std::exp(double(logits[e]) - all);
        dl[e] = T(factor * p * (terms.balance * double(experts) * (share[e] - mean) + terms.z * 2 * all));
      }
    }
  });
}

int64_t loss_workspace(const OpView& v, int) { return (blocks_of(v.rows(0)) + 1) * (v.columns(0) + 1) * 8; }
bool is_loss_of(const OpView& v) {
  const Attributes& a = v.attributes();
  return are_logits(v, 0) && are_choices(v, 1, 0) && a.has("balance") && a.has("z") && a.has("scale") &&
         a.has("counted") && a.integer("counted") >= 1 && a.integer("counted") <= v.columns(1);
}

// The same loops in either precision; f64 is what tests compare with.
template <class Single, class Plain>
std::map<std::string, Kernel, std::less<>> with_workspace(Single single, Plain plain) {
  Kernel reference = reference_kernel(plain);
  reference.workspace = loss_workspace;
  return {{"cpu", cpu_kernel(single, loss_workspace)}, {"reference", std::move(reference)}};
}

void register_loss() {
  register_kind(
      {.name = "router_loss",
       .summary = "logits f32 (…, E), choices i32 (…, k) -> f32 (1): balance of load and size of logits; attributes "
                  "balance, z, counted, scale",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         require(v.inputs() == 2 && is_loss_of(v), v,
                 "logits f32 (…, E), choices i32 (…, k) and attributes balance, z, counted and scale");
         return {{{1}, v.input(0).dtype}};
       },
       .gradient =
           [](Differentiation& d) {
             std::vector<TensorId> inputs{d.input(0), d.input(1)};
             if (d.output_gradient(0)) inputs.push_back(d.output_gradient(0));
             d.set(0, d.build().emit("router_loss_gradient", inputs, d.forward().attributes()));
           },
       .sharding = loss_of_tokens("bte, btk -> _"),
       .kernels =
           with_workspace(router_loss<float>, [](const Binding& b, auto zero) { router_loss<decltype(zero)>(b); })});
  register_kind(
      {.name = "router_loss_gradient",
       .summary = "logits f32 (…, E), choices i32 (…, k), [dloss f64 (1)] -> dlogits f32 (…, E)",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         require((v.inputs() == 2 || (v.inputs() == 3 && v.has_input(2) && is_scalar(v.input(2)))) && is_loss_of(v), v,
                 "logits f32 (…, E), choices i32 (…, k) and at most the loss's gradient f64 (1)");
         return {like(v.input(0))};
       },
       .kernels = with_workspace(router_loss_gradient<float>,
                                 [](const Binding& b, auto zero) { router_loss_gradient<decltype(zero)>(b); })});
}

const AtLoad router_registered([] {
  register_logits();
  register_route();
  register_loss();
});

}  // namespace
}  // namespace strata::router
