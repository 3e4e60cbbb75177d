// Sparse gradients as a plugin: a form of exchange in which each rank sends the largest elements of what it has
// accumulated, with their indices, and keeps the rest for later steps. The arithmetic is in top_k_kernel.h.
#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "plugins/top_k/top_k_kernel.h"
#include "strata/layout.h"
#include "strata/plugin.h"

namespace {

using strata::Attributes;
using strata::Binding;
using strata::DType;
using strata::OpView;
using strata::Shape;
using strata::TensorId;
using strata::TensorSpec;

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};

DType type_of(const OpView& v) {
  for (DType dtype : kTypes)
    if (v.attributes().string("dtype") == name_of(dtype)) return dtype;
  throw strata::Error("gradients of type " + v.attributes().string("dtype") + " cannot be sparse.",
                      strata::ExitCode::failed);
}
std::string size_name(size_t dimension) { return "size" + std::to_string(dimension); }

// Inputs: gradient, accumulated, overflow, with momentum the velocity. `momentum`: whether there is one.
void register_take(bool momentum) {
  strata::OpKind kind{.name = momentum ? "top_k_take_with_momentum" : "top_k_take",
                      .summary = std::string("gradient (…), accumulated f32 (…), [overflow f64 (1)]") +
                                 (momentum ? ", velocity f32 (…)" : "") +
                                 " -> u8 (1, bytes): indices and values of the k largest elements; accumulated without "
                                 "them; attributes k, bytes" +
                                 (momentum ? ", momentum" : "")};
  kind.half = true;
  kind.in_place = {{1, 1}};
  if (momentum) kind.in_place.emplace_back(2, 3);
  kind.shape = [momentum](const OpView& v) {
    require(v.inputs() == (momentum ? 4 : 3) && v.has_input(0) && v.has_input(1) &&
                v.input(0).shape == v.input(1).shape && v.input(1).dtype == DType::f32 &&
                (!momentum || (v.has_input(3) && v.input(3).shape == v.input(1).shape)),
            v, "a gradient and states of its shape");
    std::vector<TensorSpec> specs{{{1, v.attributes().integer("bytes")}, DType::u8}, {v.input(1).shape, DType::f32}};
    if (momentum) specs.push_back({v.input(1).shape, DType::f32});
    return specs;
  };
  // Read and written once; most of it, where little is sent, is not read again to select.
  kind.cost = [momentum](const OpView& v) {
    const auto count = double(strata::elements(v.input(1).shape));
    return strata::Cost{.flops = 8 * count, .bytes = double(v.input(0).bytes()) + (momentum ? 6 * 4 : 4 * 4) * count};
  };
  const strata::Kernel kernel{[momentum](const Binding& b) -> strata::Launch {
                                return [b, momentum, k = b.attributes().integer("k"),
                                        factor = momentum ? float(b.attributes().real("momentum")) : 0.0f] {
                                  const strata::Tensor& gradient = b.input(0);
                                  if (b.has_input(2) && std::isnan(*b.in<double>(2)))
                                    return strata::top_k::take_nothing(k, gradient.dtype, b.out<std::byte>(0));
                                  strata::top_k::take(b.threads(), gradient.dtype, b.in<void>(0),
                                                      strata::elements(gradient.shape), k, factor,
                                                      momentum ? b.out<float>(2) : nullptr, b.out<float>(1),
                                                      b.workspace(), b.out<std::byte>(0));
                                };
                              },
                              [](const OpView& v, int threads) {
                                return strata::top_k::workspace_bytes(strata::elements(v.input(0).shape), threads);
                              }};
  kind.kernels = {{"cpu", kernel}, {"reference", kernel}};
  register_kind(std::move(kind));
}

void register_add_up() {
  strata::OpKind kind{.name = "top_k_add_up",
                      .summary =
                          "u8 (ranks, bytes), a list of each rank -> their sum f32, bf16 or f16, or this rank's share "
                          "of its rows over `axis`; attributes k, size0, size1, … (of the first rank's result), dtype"};
  kind.half = true;
  kind.shape = [](const OpView& v) -> std::vector<TensorSpec> {
    require(v.inputs() == 1 && v.has_input(0) && v.input(0).dtype == DType::u8 && v.input(0).shape.size() == 2, v,
            "lists of indices and values");
    Shape shape;
    while (v.attributes().has(size_name(shape.size())))
      shape.push_back(v.attributes().integer(size_name(shape.size())));
    // A rank further on may have less of any dimension.
    for (size_t d = 0; v.outputs() > 0 && d < std::min(shape.size(), v.output(0).shape.size()); ++d)
      shape[d] = std::min(shape[d], v.output(0).shape[d]);
    return {{shape, type_of(v)}};
  };
  kind.cost = [](const OpView& v) {
    return strata::Cost{.flops = double(v.input(0).bytes()) / 4,
                        .bytes = double(v.input(0).bytes() + v.output(0).bytes())};
  };
  const strata::Kernel kernel{[](const Binding& b) -> strata::Launch {
    const strata::Tensor& result = b.output(0);
    const int64_t row = strata::elements(result.shape) / std::max<int64_t>(1, result.shape[0]);
    const strata::Split* share =
        b.attributes().has("axis") ? strata::last_split(result, 0, b.attributes().string("axis")) : nullptr;
    return [b, k = b.attributes().integer("k"), first = share ? share->first * row : 0] {
      strata::top_k::add_up(b.threads(), b.output(0).dtype, b.in<std::byte>(0), b.input(0).shape[0],
                            b.input(0).shape[1], k, first, strata::elements(b.output(0).shape), b.out<void>(0));
    };
  }};
  kind.kernels = {{"cpu", kernel}, {"reference", kernel}};
  register_kind(std::move(kind));
}

class TopK final : public strata::Plugin {
 public:
  TopK() {
    static const bool once = (register_take(false), register_take(true), register_add_up(), true);
    (void)once;
  }

  void options(strata::Options& o) override {
    o.add("sparsity", sparsity_, "part of a gradient's elements that is left for later steps").range(0, 0.99999);
    o.add("momentum", momentum_, "of what each rank accumulates, for optimizers without their own").range(0, 0.999);
    o.add("warmup", warmup_, "how long each lower level of sparsity lasts at first: 0.75, 0.9375, 0.984375, …")
        .range(0, 1e9)
        .unit("steps");
    o.add("minimum", minimum_, "gradients of fewer elements cross as they are").non_negative().unit("elements");
  }

  // Little of a gradient crosses in the first steps, which are what is compared.
  strata::Capabilities capabilities() const override {
    strata::Capabilities result{
        .provides = {"form of gradients"},
        .conflicts = {{"reproducible sums",
                       "which elements cross depends on which rank has which gradients; leave one of the two out"}},
        .effect = strata::Effect::lossy(0.2)};
    if (momentum_ == 0) result.provides.push_back("feedback *.top_k.accumulated*");
    return result;
  }

  void phases(strata::PhaseStage& stage) override {
    levels_.clear();
    double sent = 0.25;  // of the elements; a quarter of it at the next level
    for (; warmup_ > 0 && 1 - sent < sparsity_; sent /= 4) {
      const auto level = int64_t(levels_.size());
      levels_.push_back({"top_k: level " + std::to_string(level + 1), 1 - sent});
      stage.declare(levels_.back().phase, {.first = level * warmup_ + 1, .last = (level + 1) * warmup_});
    }
  }

  void exchange(strata::ExchangeStage& stage) override {
    if (stage.mesh().size(strata::kDataAxis) == 1) stage.note("it does nothing on one rank.");
    double sparsity = sparsity_;
    for (const Level& level : levels_)
      if (stage.phases().in(level.phase)) sparsity = level.sparsity;
    corrected_.clear();
    bool any = false;
    int64_t largest = 0;
    for (const strata::Gradient& gradient : stage.gradients()) {
      const int64_t count = strata::elements(stage.program()[gradient.tensor].shape);
      largest = std::max(largest, count);
      if (count < minimum_) continue;
      if (count >= int64_t{strata::top_k::kNone})
        throw strata::Error("the gradient of " + parameter_name(stage.program(), gradient) + " has " +
                            std::to_string(count) + " elements, more than indices of 32 bits tell apart.");
      any = true;
      stage.form(gradient, {.name = "top_k",
                            .exchange = [this, sparsity](auto& bucket) { return cross(bucket, sparsity); },
                            .needs_finite = true});
    }
    if (!any && stage.mesh().programs().size == 1)
      throw strata::Error("no gradient has minimum = " + std::to_string(minimum_) + " elements; the largest has " +
                          std::to_string(largest) + ".");
  }

 private:
  struct Level {
    std::string phase;
    double sparsity;
  };

  // A gradient that is summed over one axis after the other gets its momentum once.
  TensorId take(strata::GradientBucket& bucket, size_t i, int64_t k) {
    strata::Builder& build = bucket.build();
    const strata::Tensor gradient = build[bucket.gradient(i)];
    Attributes attributes{{"k", k}, {"bytes", strata::top_k::list_bytes(k, gradient.dtype)}};
    const TensorId accumulated = bucket.state(i, "top_k.accumulated", gradient.shape);
    std::vector<TensorId> inputs{bucket.gradient(i), accumulated, bucket.overflow(i)}, outputs{TensorId{}, accumulated};
    const bool momentum = corrected_.insert(bucket.parameter(i)).second && momentum_ > 0;
    if (momentum) {
      attributes.set("momentum", momentum_);
      inputs.push_back(bucket.state(i, "top_k.velocity", gradient.shape));
      outputs.push_back(inputs.back());
    }
    build.role = strata::Role::gradient;
    const TensorId list =
        build.emit_all(momentum ? "top_k_take_with_momentum" : "top_k_take", inputs, std::move(attributes), outputs)[0];
    build.program()[list].layout = {{.dimension = 0, .axis = bucket.axis(), .full = bucket.mesh().size(bucket.axis())}};
    return list;
  }

  std::vector<TensorId> cross(strata::GradientBucket& bucket, double sparsity) {
    strata::Builder& build = bucket.build();
    const int64_t ranks = bucket.mesh().size(bucket.axis());
    std::vector<TensorId> lists, results;
    std::vector<int64_t> k;
    for (size_t i = 0; i < bucket.size(); ++i) {
      k.push_back(strata::top_k::kept(strata::elements(build[bucket.gradient(i)].shape), sparsity));
      lists.push_back(take(bucket, i, k[i]));
    }
    build.role = strata::Role::gradient;
    lists = build.emit_all("all_gather", lists, {{"axis", bucket.axis()}, {"size", ranks}});
    for (size_t i = 0; i < bucket.size(); ++i) {
      const strata::Tensor gradient = build[bucket.gradient(i)];
      Attributes attributes{{"k", k[i]}, {"dtype", std::string(name_of(gradient.dtype))}};
      for (size_t d = 0; d < gradient.shape.size(); ++d) attributes.set(size_name(d), gradient.shape[d]);
      strata::Layout layout = gradient.layout;
      if (bucket.shares()) {
        attributes.set("axis", bucket.axis());
        attributes.set(size_name(0), strata::share_of(gradient.shape[0], 0, int(ranks)).count());
        layout.push_back({.dimension = 0, .axis = bucket.axis(), .full = gradient.shape[0]});
      }
      results.push_back(build.emit("top_k_add_up", {lists[i]}, attributes));
      build.program()[results.back()].layout = layout;
    }
    return results;
  }

  double sparsity_ = 0.999, momentum_ = 0;
  int64_t warmup_ = 0, minimum_ = 1024;
  std::vector<Level> levels_;
  std::set<std::string> corrected_;  // parameters, of the program that is planned
};

}  // namespace

STRATA_PLUGIN(TopK, "top_k", "1.0.0", "the largest elements of gradients cross between ranks, the rest later")
