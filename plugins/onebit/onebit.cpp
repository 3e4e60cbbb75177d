// One-bit gradients as a plugin: a form of exchange in which gradients cross as a bit an element, and what that leaves
// out is added to those of the next step (1-bit SGD, Seide et al., Interspeech 2014). In two rounds as in 1-bit Adam
// (Tang et al., arXiv 2102.02888, section 5): each rank sends every other the bits of that one's share, adds up what it
// gets, and, where all ranks want all of the sum, sends the bits of its share of it. The bits are made in signs.h.
#include <algorithm>
#include <cmath>

#include "plugins/onebit/signs.h"
#include "strata/convert.h"
#include "strata/layout.h"
#include "strata/plugin.h"

namespace {

using strata::Attributes;
using strata::Binding;
using strata::DType;
using strata::OpView;
using strata::Range;
using strata::Shape;
using strata::TensorId;
using strata::TensorSpec;
using strata::onebit::list_bytes;

int64_t row_elements(const Shape& shape) { return strata::elements(shape) / std::max<int64_t>(1, shape[0]); }
std::string size_name(size_t dimension) { return "size" + std::to_string(dimension); }

void register_pack() {
  strata::OpKind kind{
      .name = "onebit_pack",
      .summary =
          "gradient (rows, …) or a share of its rows, error f32 (at least as many elements), [overflow "
          "f64 (1)] -> u8 (1, lists, bytes): bits of each rank's share, or of the one; error: what they "
          "leave out; attributes lists, bytes"};
  kind.half = true;
  kind.in_place = {{1, 1}};
  kind.shape = [](const OpView& v) -> std::vector<TensorSpec> {
    require(v.inputs() == 3 && v.has_input(0) && v.has_input(1) && v.input(1).dtype == DType::f32 &&
                strata::elements(v.input(1).shape) >= strata::elements(v.input(0).shape),
            v, "a gradient and an error of its size");
    return {{{1, v.attributes().integer("lists"), v.attributes().integer("bytes")}, DType::u8},
            {v.input(1).shape, DType::f32}};
  };
  kind.cost = [](const OpView& v) {
    const auto count = double(strata::elements(v.input(0).shape));
    return strata::Cost{.flops = 8 * count, .bytes = double(v.input(0).bytes() + v.output(0).bytes()) + 8 * count};
  };
  const strata::Kernel kernel{[](const Binding& b) -> strata::Launch {
    return [b] {
      const strata::Tensor& gradient = b.input(0);
      const int64_t row = row_elements(gradient.shape), lists = b.output(0).shape[1], bytes = b.output(0).shape[2];
      std::fill_n(b.out<std::byte>(0), lists * bytes, std::byte{0});
      if (b.has_input(2) && std::isnan(*b.in<double>(2))) return;
      for (int64_t list = 0; list < lists; ++list) {
        const Range rows =
            lists == 1 ? Range{0, gradient.shape[0]} : strata::share_of(gradient.shape[0], int(list), int(lists));
        strata::onebit::pack(b.threads(), gradient.dtype, strata::at(b.in<void>(0), gradient.dtype, rows.begin * row),
                             rows.count() * row, b.out<float>(1) + rows.begin * row,
                             b.out<std::byte>(0) + list * bytes);
      }
    };
  }};
  kind.kernels = {{"cpu", kernel}, {"reference", kernel}};
  register_kind(std::move(kind));
}

void register_unpack() {
  strata::OpKind kind{
      .name = "onebit_unpack",
      .summary =
          "u8 (ranks, 1, bytes), bits of each rank -> f32, bf16 or f16: added up, this rank's share "
          "(sum = 1), or a share of each; attributes sum, size0, size1, … (of the first rank's result), "
          "dtype"};
  kind.half = true;
  kind.shape = [](const OpView& v) -> std::vector<TensorSpec> {
    require(v.inputs() == 1 && v.has_input(0) && v.input(0).dtype == DType::u8 && v.input(0).shape.size() == 3, v,
            "bits");
    Shape shape;
    while (v.attributes().has(size_name(shape.size())))
      shape.push_back(v.attributes().integer(size_name(shape.size())));
    // A rank further on may have less of any dimension.
    for (size_t d = 0; v.outputs() > 0 && d < std::min(shape.size(), v.output(0).shape.size()); ++d)
      shape[d] = std::min(shape[d], v.output(0).shape[d]);
    DType dtype = DType::f32;
    for (DType half : {DType::bf16, DType::f16})
      if (v.attributes().string("dtype") == name_of(half)) dtype = half;
    return {{shape, dtype}};
  };
  kind.cost = [](const OpView& v) {
    return strata::Cost{.flops = 16 * double(v.input(0).bytes()),
                        .bytes = double(v.input(0).bytes() + v.output(0).bytes())};
  };
  const strata::Kernel kernel{[](const Binding& b) -> strata::Launch {
    return [b, sum = b.attributes().integer("sum") != 0] {
      const strata::Tensor& result = b.output(0);
      const int64_t row = row_elements(result.shape), ranks = b.input(0).shape[0], bytes = b.input(0).shape[2];
      if (sum)
        return strata::onebit::unpack(b.threads(), b.in<std::byte>(0), ranks, bytes, strata::elements(result.shape),
                                      result.dtype, b.out<void>(0));
      for (int r = 0; r < int(ranks); ++r) {
        const Range rows = strata::share_of(result.shape[0], r, int(ranks));
        strata::onebit::unpack(b.threads(), b.in<std::byte>(0) + r * bytes, 1, 0, rows.count() * row, result.dtype,
                               strata::at(b.out<void>(0), result.dtype, rows.begin * row));
      }
    };
  }};
  kind.kernels = {{"cpu", kernel}, {"reference", kernel}};
  register_kind(std::move(kind));
}

class OneBit final : public strata::Plugin {
 public:
  OneBit() {
    static const bool once = (register_pack(), register_unpack(), true);
    (void)once;
  }

  void options(strata::Options& o) override {
    o.add("start", start_, "steps before compression begins").non_negative().unit("steps");
    o.add("minimum", minimum_, "gradients of fewer elements cross as they are").non_negative().unit("elements");
  }

  strata::Capabilities capabilities() const override {
    return {.provides = {"form of gradients", "feedback *.onebit.*error*"},
            .conflicts = {{"reproducible sums",
                           "what one-bit gradients leave out depends on which rank has which of them, and is kept for "
                           "later steps; leave one of the two out"}},
            .effect = strata::Effect::lossy(0.2)};
  }

  void phases(strata::PhaseStage& stage) override {
    if (start_ > 0) stage.declare(kPhase, {.first = std::min(start_, strata::Steps::kEnd - 1) + 1});
  }

  void exchange(strata::ExchangeStage& stage) override {
    if (stage.mesh().size(strata::kDataAxis) == 1) stage.note("it does nothing on one rank.");
    if (start_ > 0 && !stage.phases().in(kPhase)) return;
    bool any = false;
    int64_t largest = 0;
    for (const strata::Gradient& gradient : stage.gradients()) {
      const int64_t count = strata::elements(stage.program()[gradient.tensor].shape);
      largest = std::max(largest, count);
      if (count < minimum_) continue;
      any = true;
      stage.form(gradient,
                 {.name = "onebit", .exchange = [this](auto& bucket) { return cross(bucket); }, .needs_finite = true});
    }
    if (!any && stage.mesh().programs().size == 1)
      throw strata::Error("no gradient has minimum = " + std::to_string(minimum_) + " elements; the largest has " +
                          std::to_string(largest) + ".");
  }

 private:
  static constexpr const char* kPhase = "onebit: compressed";

  static int64_t share_rows(strata::GradientBucket& bucket, const strata::Tensor& gradient) {
    return strata::share_of(gradient.shape[0], 0, bucket.mesh().size(bucket.axis())).count();
  }

  // One list of bits of `from` for each rank's share of its rows, or one of all. Lists are as long as the longest, that
  // of the first rank, on all ranks: `bytes`.
  static TensorId pack(strata::GradientBucket& bucket, size_t i, TensorId from, TensorId error, int64_t lists,
                       int64_t bytes) {
    strata::Builder& build = bucket.build();
    build.role = strata::Role::gradient;
    const TensorId packed = build.emit_all("onebit_pack", {from, error, bucket.overflow(i)},
                                           {{"lists", lists}, {"bytes", bytes}}, {TensorId{}, error})[0];
    build.program()[packed].layout = {
        {.dimension = 0, .axis = bucket.axis(), .full = bucket.mesh().size(bucket.axis())}};
    return packed;
  }
  static TensorId unpack(strata::GradientBucket& bucket, TensorId packed, bool sum, const strata::Tensor& gradient,
                         DType dtype) {
    strata::Builder& build = bucket.build();
    strata::Layout layout = gradient.layout;
    Attributes attributes{{"sum", int64_t(sum)}, {"dtype", std::string(name_of(dtype))}};
    for (size_t d = 0; d < gradient.shape.size(); ++d)
      attributes.set(size_name(d), d == 0 && sum ? share_rows(bucket, gradient) : gradient.shape[d]);
    if (sum) layout.push_back({.dimension = 0, .axis = bucket.axis(), .full = gradient.shape[0]});
    const TensorId result = build.emit("onebit_unpack", {packed}, attributes);
    build.program()[result].layout = layout;
    return result;
  }
  // What the bits of this rank's share of a sum leave out: the first rank's share is the largest, others use its
  // beginning.
  static TensorId error_of_share(strata::GradientBucket& bucket, size_t i, const strata::Tensor& gradient) {
    strata::FormState state;
    Shape shape = gradient.shape;
    for (size_t d = 0; d < shape.size(); ++d) state.follows.push_back(d == 0 ? strata::FormState::kNone : int(d));
    shape[0] = share_rows(bucket, gradient);
    // Shares of another number of ranks are of other rows, and may yet be of the same size together.
    return bucket.state(i, "onebit.share_error." + std::to_string(bucket.mesh().size(bucket.axis())), shape, state);
  }

  static std::vector<TensorId> cross(strata::GradientBucket& bucket) {
    strata::Builder& build = bucket.build();
    const int64_t ranks = bucket.mesh().size(bucket.axis());
    const auto exchanged = [&](std::string_view kind, const std::vector<TensorId>& tensors, Attributes attributes) {
      attributes.set("axis", bucket.axis());
      return build.emit_all(kind, tensors, std::move(attributes));
    };
    std::vector<TensorId> packed, sums, results;
    std::vector<int64_t> bytes;
    for (size_t i = 0; i < bucket.size(); ++i) {
      const strata::Tensor gradient = build[bucket.gradient(i)];
      bytes.push_back(list_bytes(share_rows(bucket, gradient) * row_elements(gradient.shape)));
      const TensorId error = bucket.state(i, "onebit.error", gradient.shape);
      packed.push_back(pack(bucket, i, bucket.gradient(i), error, ranks, bytes[i]));
    }
    packed = exchanged("all_to_all", packed, {{"size", ranks}, {"gather", int64_t{0}}, {"split", int64_t{1}}});
    for (size_t i = 0; i < bucket.size(); ++i) {
      const strata::Tensor gradient = build[bucket.gradient(i)];
      sums.push_back(unpack(bucket, packed[i], true, gradient, bucket.shares() ? gradient.dtype : DType::f32));
    }
    if (bucket.shares()) return sums;
    packed.clear();
    for (size_t i = 0; i < bucket.size(); ++i)
      packed.push_back(pack(bucket, i, sums[i], error_of_share(bucket, i, build[bucket.gradient(i)]), 1, bytes[i]));
    build.role = strata::Role::gradient;
    packed = exchanged("all_gather", packed, {{"size", ranks}});
    for (size_t i = 0; i < bucket.size(); ++i) {
      const strata::Tensor gradient = build[bucket.gradient(i)];
      results.push_back(unpack(bucket, packed[i], false, gradient, gradient.dtype));
    }
    return results;
  }

  int64_t start_ = 0, minimum_ = 1024;
};

}  // namespace

STRATA_PLUGIN(OneBit, "onebit", "1.0.0", "gradients cross between ranks as one bit an element, with error feedback")
