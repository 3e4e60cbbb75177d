// PowerSGD as a plugin: a form of exchange in which a matrix of gradients crosses as two thin factors, and what they
// leave out is remembered and added to the next one. The arithmetic is in powersgd_kernel.h.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "plugins/powersgd/powersgd_kernel.h"
#include "strata/convert.h"
#include "strata/layout.h"
#include "strata/pattern.h"
#include "strata/plugin.h"

namespace {

using strata::Attributes;
using strata::Binding;
using strata::DType;
using strata::Layout;
using strata::OpView;
using strata::Role;
using strata::Shape;
using strata::Split;
using strata::TensorId;
using strata::TensorSpec;
using strata::powersgd::Sizes;

bool is_matrix(const OpView& v, int i, DType dtype = DType::f32) {
  return v.has_input(i) && v.input(i).shape.size() == 2 && v.input(i).dtype == dtype;
}
// Of ops whose last input says that the step overflowed (GradientBucket::overflow).
bool skips(const Binding& b) { return b.has_input(b.inputs() - 1) && std::isnan(*b.in<double>(b.inputs() - 1)); }

strata::OpKind kind(std::string name, std::string summary, std::function<std::vector<TensorSpec>(const OpView&)> shape,
                    std::vector<std::pair<int, int>> in_place, double passes, void (*run)(const Binding&)) {
  strata::OpKind kind{.name = std::move(name), .summary = std::move(summary), .shape = std::move(shape)};
  kind.in_place = std::move(in_place);
  kind.half = true;
  // `passes` over the matrix, the largest of its tensors, with a multiplication and an addition for each rank.
  kind.cost = [passes](const OpView& v) {
    double largest = 0, rank = 1;
    for (int i = 0; i < v.inputs(); ++i)
      if (v.has_input(i)) largest = std::max(largest, double(v.input(i).bytes()));
    for (int o = 0; o < v.outputs(); ++o)
      if (v.output(o).shape.size() == 2 && double(v.output(o).bytes()) < largest)
        rank = std::max(rank, double(v.output(o).shape[0]));
    return strata::Cost{.flops = largest / 2 * std::min(rank, 64.0), .bytes = passes * largest};
  };
  const strata::Kernel kernel{[run](const Binding& b) -> strata::Launch { return [run, b] { run(b); }; }};
  kind.kernels = {{"cpu", kernel}, {"reference", kernel}};
  return kind;
}

void register_project() {
  register_kind(kind(
      "powersgd_project",
      "gradient (rows, columns), error f32 of its shape, query f32 (rank, columns), [overflow f64 (1)] -> left f32 "
      "(rank, rows) = query (error + gradient)^T, error + gradient",
      [](const OpView& v) -> std::vector<TensorSpec> {
        require(v.inputs() == 4 && v.has_input(0) && is_matrix(v, 0, v.input(0).dtype) && is_matrix(v, 1) &&
                    is_matrix(v, 2) && v.input(0).shape == v.input(1).shape && v.columns(2) == v.columns(0),
                v, "a gradient, its error and a query of as many columns");
        return {{{v.input(2).shape[0], v.input(0).shape[0]}, DType::f32}, {v.input(1).shape, DType::f32}};
      },
      {{1, 1}}, 3,
      [](const Binding& b) {
        const Sizes sizes{b.input(0).shape[0], b.columns(0), b.input(2).shape[0]};
        if (skips(b)) return void(std::fill_n(b.out<float>(0), sizes.rank * sizes.rows, 0.0f));
        project(b.threads(), sizes, b.input(0).dtype, b.in<void>(0), b.in<float>(2), b.out<float>(1), b.out<float>(0));
      }));
}

void register_back() {
  register_kind(kind(
      "powersgd_back",
      "left f32 (rank, rows), matrix f32 (rows, columns) -> basis: left with orthonormal rows; right f32 (rank, "
      "columns) = basis matrix",
      [](const OpView& v) -> std::vector<TensorSpec> {
        require(v.inputs() == 2 && is_matrix(v, 0) && is_matrix(v, 1) && v.columns(0) == v.input(1).shape[0], v,
                "left (rank, rows) and a matrix (rows, columns)");
        return {{v.input(0).shape, DType::f32}, {{v.input(0).shape[0], v.columns(1)}, DType::f32}};
      },
      {{0, 0}}, 1,
      [](const Binding& b) {
        const Sizes sizes{b.columns(0), b.columns(1), b.input(0).shape[0]};
        if (b.out<float>(0) != b.in<float>(0)) std::copy_n(b.in<float>(0), sizes.rank * sizes.rows, b.out<float>(0));
        orthonormalize(sizes, b.out<float>(0));
        project_back(b.threads(), sizes, b.out<float>(0), b.in<float>(1), b.out<float>(1));
      }));
}

// The dimension that ZeRO shares; without the attribute `axis` the result is whole.
int64_t rows_of_result(const OpView& v) {
  const int64_t rows = v.input(0).shape[0];
  if (!v.attributes().has("axis")) return rows;
  return share_of_output(v, 0, 0, v.attributes().string("axis"), rows, int(v.attributes().integer("ranks")));
}

DType result_type(const OpView& v) {
  for (DType dtype : {DType::bf16, DType::f16})
    if (v.attributes().string("dtype") == name_of(dtype)) return dtype;
  return DType::f32;
}

void register_finish() {
  register_kind(kind(
      "powersgd_finish",
      "matrix f32 (rows, columns), query f32 (rank, columns), basis f32 (rank, rows), right f32 (rank, columns), "
      "[overflow f64 (1)] -> basis^T right (this rank's share of its rows over `axis` of `ranks`), matrix less its "
      "mean, right",
      [](const OpView& v) -> std::vector<TensorSpec> {
        require(v.inputs() == 5 && is_matrix(v, 0) && is_matrix(v, 1) && is_matrix(v, 2) && is_matrix(v, 3) &&
                    v.input(1).shape == v.input(3).shape && v.columns(1) == v.columns(0) &&
                    v.input(2).shape == Shape{v.input(1).shape[0], v.input(0).shape[0]},
                v, "a matrix, its query, basis and right factor");
        return {{{rows_of_result(v), v.columns(0)}, result_type(v)},
                {v.input(0).shape, DType::f32},
                {v.input(1).shape, DType::f32}};
      },
      {{1, 0}, {2, 1}}, 3,
      [](const Binding& b) {
        const Sizes sizes{b.input(0).shape[0], b.columns(0), b.input(1).shape[0]};
        const strata::Tensor& result = b.output(0);
        if (skips(b)) return void(std::fill_n(b.out<char>(0), result.bytes(), char(0)));
        const Split* share =
            b.attributes().has("axis") ? last_split(result, 0, b.attributes().string("axis")) : nullptr;
        finish(b.threads(), sizes, b.attributes().integer("ranks"), b.in<float>(2), b.in<float>(3), b.out<float>(1),
               b.out<float>(2), share ? share->first : 0, result.shape[0], result.dtype, b.out<void>(0));
      }));
}

// Splits of a dimension of the gradient as those of a factor's columns.
Layout along_columns(const Layout& gradient, int dimension) {
  Layout layout;
  for (Split split : gradient)
    if (split.dimension == dimension) split.dimension = 1, layout.push_back(split);
  return layout;
}

// A matrix of gradients on its way.
struct Matrix {
  TensorId gradient, matrix, query, left{}, basis{}, right{};
};

class PowerSgd final : public strata::Plugin {
 public:
  PowerSgd() {
    static const bool once = (register_project(), register_back(), register_finish(), true);
    (void)once;
  }

  void options(strata::Options& o) override {
    o.add("rank", rank_, "rows of the factors that a matrix crosses as").positive();
    o.add("matrix_ranks", ranks_,
          "ranks of some matrices, the first pattern of a parameter's name counts: \"block.*.attention.*: 8\"; 0: as "
          "it is");
    o.add("minimum_ratio", minimum_ratio_,
          "a matrix crosses as it is unless it has at least so many times the elements of its factors")
        .non_negative();
    o.add("start", start_, "steps before compression begins").non_negative().unit("steps");
  }

  // The band is that of few steps at rank 2 to 4; it falls with the rank (0.11, 0.06, 0.03 at 4, 8, 16 beside moe).
  strata::Capabilities capabilities() const override {
    return {.provides = {"form of gradients", "feedback *.powersgd.error*"},
            .conflicts = {{"reproducible sums",
                           "what factors of low rank leave out depends on which rank has which gradients, and is kept "
                           "for later steps; leave one of the two out"}},
            .effect = strata::Effect::lossy(0.15)};
  }

  void phases(strata::PhaseStage& stage) override {
    if (start_ > 0) stage.declare(kPhase, {.first = std::min(start_, strata::Steps::kEnd - 1) + 1});
  }

  void exchange(strata::ExchangeStage& stage) override {
    if (stage.mesh().size(strata::kDataAxis) == 1) stage.note("it does nothing on one rank.");
    read_ranks(stage);
    if (start_ > 0 && !stage.phases().in(kPhase)) return;
    int64_t largest = 0;  // rank that a matrix can have
    bool any = false;
    for (const strata::Gradient& gradient : stage.gradients()) {
      const Shape& shape = stage.program()[gradient.tensor].shape;
      if (shape.size() != 2) continue;
      largest = std::max(largest, std::min(shape[0], shape[1]));
      const int64_t rank = rank_of(parameter_name(stage.program(), gradient));
      if (rank == 0 ||
          double(shape[0]) * double(shape[1]) < minimum_ratio_ * double(rank) * double(shape[0] + shape[1]))
        continue;
      if (rank > std::min(shape[0], shape[1]))
        throw strata::Error("rank " + std::to_string(rank) + " is above the size of the gradient of " +
                            parameter_name(stage.program(), gradient) + ", " + strata::text(shape) +
                            "; lower it, or give a minimum_ratio of 1 or more.");
      any = true;
      stage.form(
          gradient,
          {.name = "powersgd", .exchange = [this](auto& bucket) { return compress(bucket); }, .needs_finite = true});
    }
    if (!any && stage.mesh().programs().size == 1)
      throw strata::Error("no matrix of gradients has minimum_ratio times the elements of its factors of rank " +
                          std::to_string(rank_) + ", which can be up to " + std::to_string(largest) +
                          " here; lower rank or minimum_ratio.");
  }

 private:
  static constexpr const char* kPhase = "powersgd: compressed";

  int64_t rank_of(const std::string& parameter) const {
    for (const auto& [pattern, rank] : rank_by_pattern_)
      if (strata::matches(pattern, parameter)) return rank;
    return rank_;
  }

  // "PATTERN: RANK", of which each must be the first for a matrix (of all programs, where there are several).
  void read_ranks(const strata::ExchangeStage& stage) {
    rank_by_pattern_.clear();
    for (const std::string& entry : ranks_) {
      const size_t colon = entry.rfind(':');
      const std::string pattern = trimmed(entry.substr(0, colon)),
                        digits = colon == std::string::npos ? "" : trimmed(entry.substr(colon + 1));
      int64_t rank = 0;
      const auto [end, problem] = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
      if (pattern.empty() || digits.empty() || problem != std::errc() || end != digits.data() + digits.size() ||
          rank < 0)
        throw strata::Error("matrix_ranks: \"" + entry +
                            "\"; expected \"PATTERN: RANK\", such as \"block.*.attention.*: 8\".");
      const bool is_used =
          std::any_of(stage.gradients().begin(), stage.gradients().end(), [&](const strata::Gradient& gradient) {
            const std::string name = parameter_name(stage.program(), gradient);
            return stage.program()[gradient.tensor].shape.size() == 2 && strata::matches(pattern, name) &&
                   std::none_of(rank_by_pattern_.begin(), rank_by_pattern_.end(),
                                [&](const auto& before) { return strata::matches(before.first, name); });
          });
      if (!is_used && stage.mesh().programs().size == 1)
        throw strata::Error("matrix_ranks: \"" + entry + "\" is the first pattern of no matrix of gradients" +
                            strata::names_like(stage.program()));
      rank_by_pattern_.emplace_back(pattern, rank);
    }
  }
  static std::string trimmed(const std::string& text) {
    const size_t first = text.find_first_not_of(" \t");
    return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(" \t") + 1 - first);
  }

  static std::vector<TensorId> sum(strata::GradientBucket& bucket, const std::vector<TensorId>& tensors) {
    return bucket.build().emit_all("all_reduce", tensors, {{"axis", bucket.axis()}, {"reduction", std::string("sum")}});
  }

  Matrix project(strata::GradientBucket& bucket, size_t i) const {
    strata::Builder& build = bucket.build();
    Matrix m{.gradient = bucket.gradient(i), .matrix = {}, .query = {}};
    const Shape shape = build[m.gradient].shape;
    m.matrix = bucket.state(i, "powersgd.error", shape);
    m.query = bucket.state(i, "powersgd.query", {rank_of(bucket.parameter(i)), shape[1]},
                           {.follows = {strata::FormState::kNone, 1},
                            .alike = true,
                            .initializer = {strata::Initializer::Kind::normal, 1.0}});
    m.left = build.emit_all("powersgd_project", {m.gradient, m.matrix, m.query, bucket.overflow(i)}, {},
                            {TensorId{}, m.matrix})[0];
    build.program()[m.left].layout = along_columns(build[m.gradient].layout, 0);
    return m;
  }

  static void project_back(strata::Builder& build, Matrix& m, TensorId left) {
    const std::vector<TensorId> made = build.emit_all("powersgd_back", {left, m.matrix});
    m.basis = made[0], m.right = made[1];
    build.program()[m.basis].layout = along_columns(build[m.gradient].layout, 0);
    build.program()[m.right].layout = along_columns(build[m.gradient].layout, 1);
  }

  static TensorId finish(strata::GradientBucket& bucket, const Matrix& m, TensorId right, TensorId overflow) {
    strata::Builder& build = bucket.build();
    Attributes attributes{{"ranks", int64_t(bucket.mesh().size(bucket.axis()))},
                          {"dtype", std::string(name_of(build[m.gradient].dtype))}};
    if (bucket.shares()) attributes.set("axis", bucket.axis());
    return build.emit_all("powersgd_finish", {m.matrix, m.query, m.basis, right, overflow}, attributes,
                          {TensorId{}, m.matrix, m.query})[0];
  }

  // All left factors of a bucket cross together, then all right ones.
  std::vector<TensorId> compress(strata::GradientBucket& bucket) const {
    strata::Builder& build = bucket.build();
    std::vector<Matrix> matrices;
    std::vector<TensorId> lefts, rights, results;
    for (size_t i = 0; i < bucket.size(); ++i) {
      matrices.push_back(project(bucket, i));
      lefts.push_back(matrices.back().left);
    }
    build.role = Role::gradient;
    lefts = sum(bucket, lefts);
    for (size_t i = 0; i < bucket.size(); ++i) {
      project_back(build, matrices[i], lefts[i]);
      rights.push_back(matrices[i].right);
    }
    rights = sum(bucket, rights);
    for (size_t i = 0; i < bucket.size(); ++i)
      results.push_back(finish(bucket, matrices[i], rights[i], bucket.overflow(i)));
    return results;
  }

  int64_t rank_ = 4, start_ = 0;
  std::vector<std::string> ranks_;
  std::vector<std::pair<std::string, int64_t>> rank_by_pattern_;
  double minimum_ratio_ = 2;
};

}  // namespace

STRATA_PLUGIN(PowerSgd, "powersgd", "1.0.0", "PowerSGD: gradients cross between ranks as factors of low rank")
