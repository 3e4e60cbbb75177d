// LoRA (Hu et al., arXiv 2106.09685): beside a frozen weight W of a linear layer two small matrices A and B are
// trained, so that it computes x Wᵀ + alpha/r · x Aᵀ Bᵀ. B begins as zeros, so the model begins as it was.
#include "plugins/lora/lora.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <set>

#include "strata/pattern.h"
#include "strata/random.h"

namespace {

using strata::Builder;
using strata::Dimension;
using strata::Dimensions;
using strata::Error;
using strata::Initializer;
using strata::Op;
using strata::Program;
using strata::TensorId;
using strata::lora::Adapter;
using strata::lora::Rows;

// "PATTERN", or "PATTERN: 0 2" for some of the matrices that a weight is.
struct Target {
  std::string text, pattern;
  std::vector<int64_t> matrices{};
  bool found = false;

  explicit Target(const std::string& target) : text(target) {
    const size_t colon = target.rfind(':');
    pattern = target.substr(0, colon);
    if (colon == target.npos) return;
    std::string numbers = target.substr(colon + 1);
    for (size_t at = 0; at < numbers.size();) {
      if (numbers[at] == ' ') {
        ++at;
        continue;
      }
      const size_t end = std::min(numbers.find(' ', at), numbers.size());
      const std::string number = numbers.substr(at, end - at);
      if (number.size() > 4 || !std::all_of(number.begin(), number.end(), [](char c) { return c >= '0' && c <= '9'; }))
        refuse();
      matrices.push_back(std::stoll(number));
      at = end;
    }
    std::sort(matrices.begin(), matrices.end());
    if (matrices.empty() || std::adjacent_find(matrices.begin(), matrices.end()) != matrices.end()) refuse();
  }

 private:
  [[noreturn]] void refuse() const {
    throw Error(
        "targets: \"" + text +
        "\" is not of the form \"PATTERN\" or \"PATTERN: NUMBERS\", such as \"block.*.qkv.weight: 0 2\" for the "
        "first and the third of the matrices that a weight is.");
  }
};

class Lora final : public strata::Plugin {
 public:
  Lora() { strata::lora::register_matrix_kinds(); }

  void options(strata::Options& o) override {
    o.add("rank", settings_.rank, "rows of an adapter's first matrix").range(1, 65536);
    o.add("alpha", settings_.alpha, "what adapters add is multiplied by alpha / rank").positive();
    o.add("dropout", settings_.dropout, "probability of dropping an element of what adapters read")
        .range(0, 0.99)
        .may_change();
    o.add(
        "targets", targets_,
        "patterns of the weights of linear layers in blocks that have adapters; \"PATTERN: 0 2\": of a weight that is "
        "several matrices (queries, keys, values) those with these numbers");
    o.add("adapter", adapter_, "folder with an adapter in PEFT's format from which a new run begins; empty: afresh")
        .per_rank()
        .may_change();
  }

  strata::Capabilities capabilities() const override {
    return {.provides = {"adds to the model", "lowers optimizer_state", "lowers gradients"},
            .early = true,
            .effect = strata::Effect::program()};
  }

  void forward(strata::ProgramStage& stage) override {
    Program& program = stage.program;
    for (TensorId id : program.with_role(strata::Role::parameter))
      program[id].lasting.change([](strata::Lasting& lasting) { lasting.frozen = true; });
    std::vector<Target> targets;
    for (const std::string& text : targets_) targets.emplace_back(text);
    adapters_.clear();
    const std::vector<Op> ops = std::move(program.ops);
    program.ops.clear();
    Builder build(program);
    for (const Op& op : ops) {
      const auto rows = adapted(program, op, targets);
      if (rows)
        adapt(build, stage, op, *rows);
      else
        program.ops.push_back(op);
    }
    for (const Target& target : targets)
      if (!target.found)
        throw Error("targets: \"" + target.text + "\" matches no weight of a linear layer in a block" +
                    strata::names_like(program));
    if (adapters_.empty()) throw Error("targets: no pattern is given, so nothing would have an adapter.");
  }

  void merge(const std::string& parameter, const strata::Shape&, const strata::ParameterValues& all,
             float* values) const override {
    const auto found = std::find_if(adapters_.begin(), adapters_.end(),
                                    [&](const Adapter& adapter) { return adapter.weight == parameter; });
    if (found == adapters_.end()) return;
    const Adapter& of = *found;
    const int64_t adapters = int64_t(of.rows.chosen.size()),
                  adapted_rows = of.out / of.rows.period() * of.rows.adapted();
    const auto a = std::make_unique_for_overwrite<float[]>(size_t(of.rank * adapters * of.in)),
               b = std::make_unique_for_overwrite<float[]>(size_t(adapted_rows * of.rank));
    all.read(of.a, a.get());
    all.read(of.b, b.get());
    std::vector<double> row(size_t(of.in));
    for (int64_t o = 0; o < of.out; ++o) {
      const Rows::Place place = of.rows.place_of(o);
      if (place.row < 0) continue;
      std::fill(row.begin(), row.end(), 0.0);
      for (int64_t r = 0; r < of.rank; ++r) {
        const double factor = settings_.scale() * double(b[size_t(place.row * of.rank + r)]);
        const float* from = a.get() + (place.adapter * of.rank + r) * of.in;
        for (int64_t i = 0; i < of.in; ++i) row[size_t(i)] += factor * double(from[i]);
      }
      float* to = values + o * of.in;
      for (int64_t i = 0; i < of.in; ++i) to[i] = float(double(to[i]) + row[size_t(i)]);
    }
  }
  std::optional<strata::ExternalAddition> external_addition(
      const std::vector<strata::ExternalTensor>& model) const override {
    return strata::lora::peft_files(adapters_, model, settings_);
  }
  std::string addition_to_begin_with() const override { return adapter_; }
  void check_addition(std::string_view json, const std::string& where) const override {
    strata::lora::check_peft_config(json, where, settings_);
  }

 private:
  // Which rows of the op's weight have adapters, if it is a linear layer's and any has.
  static std::optional<Rows> adapted(const Program& program, const Op& op, std::vector<Target>& targets) {
    if (op.kind->name != "linear" || op.block < 0 || !program[op.inputs[1]].persistent) return {};
    const std::string name = strata::parameter_name(program, op.inputs[1]);
    const std::vector<int64_t>& fused = program[op.inputs[1]].lasting->fused;
    std::optional<Rows> rows;
    for (Target& target : targets) {
      if (!strata::matches(target.pattern, name)) continue;
      target.found = true;
      Rows wanted{.rows = fused.empty() ? std::vector<int64_t>{1} : fused, .chosen = target.matrices};
      if (wanted.chosen.empty()) {
        wanted.chosen.resize(wanted.rows.size());
        std::iota(wanted.chosen.begin(), wanted.chosen.end(), int64_t{0});
      }
      if (wanted.chosen.back() >= int64_t(wanted.rows.size()))
        throw Error("targets: \"" + target.text + "\" asks for matrix " + std::to_string(wanted.chosen.back()) +
                    " of " + name + ", which has " + std::to_string(wanted.rows.size()) + ", counted from 0.");
      if (wanted.rows.size() > Rows::kMost)
        throw Error("targets: " + name + " is " + std::to_string(wanted.rows.size()) + " matrices; adapters are of " +
                    std::to_string(Rows::kMost) + " at most.");
      if (rows && rows->chosen != wanted.chosen)
        throw Error("targets: \"" + target.text + "\" and another pattern ask for different matrices of " + name + ".");
      rows = std::move(wanted);
    }
    return rows;
  }

  // Names of an adapter's dimensions, so that strategies divide it as they do the weight.
  static Dimensions names_of_a(const strata::Tensor& weight) {
    return weight.dimensions.empty() ? Dimensions{} : Dimensions{Dimension("lora_rank"), weight.dimensions[1]};
  }
  static Dimensions names_of_b(const strata::Tensor& weight, const Rows& rows) {
    if (weight.dimensions.empty()) return {};
    Dimension out = weight.dimensions[0];
    if (out.unit % rows.period() == 0)
      out.unit = out.unit / rows.period() * rows.adapted();
    else
      out = Dimension("lora_rows");  // what repeats could be torn apart
    return {out, Dimension("lora_rank")};
  }

  // The op's result becomes what is added to.
  void adapt(Builder& build, const strata::ProgramStage& stage, Op op, const Rows& rows) {
    Program& program = build.program();
    const TensorId x = op.inputs[0], result = op.outputs[0];
    const strata::Tensor weight = program[op.inputs[1]];
    const std::string name = strata::parameter_name(program, op.inputs[1]);
    const std::string stem = name.ends_with(".weight") ? name.substr(0, name.size() - 7) : name;
    Adapter adapter{.weight = name,
                    .a = stem + ".lora_a",
                    .b = stem + ".lora_b",
                    .out = weight.shape[0],
                    .in = weight.shape[1],
                    .rank = settings_.rank,
                    .rows = rows};
    strata::Tensor before = program[result];
    before.name = before.name + ".frozen";
    before.dimensions = {};
    op.outputs[0] = program.add(std::move(before));
    const TensorId addend = op.outputs[0];
    build.block_index = op.block;
    build.step_part = op.step_part;
    program.ops.push_back(std::move(op));

    const int64_t adapters = int64_t(rows.chosen.size());
    const TensorId a =
        build.parameter(adapter.a, {settings_.rank * adapters, adapter.in},
                        {Initializer::Kind::normal, 1 / std::sqrt(3.0 * double(adapter.in))}, names_of_a(weight));
    const TensorId b = build.parameter(adapter.b, {adapter.out / rows.period() * rows.adapted(), settings_.rank}, {},
                                       names_of_b(weight, rows));
    std::vector<int64_t> rows_of_b;
    for (int64_t matrix : rows.chosen) rows_of_b.push_back(rows.rows[size_t(matrix)]);
    const bool several = adapters > 1;
    program[a].lasting.change([&](strata::Lasting& lasting) {
      lasting.added = true, lasting.frozen = false;
      if (several) lasting.fused = std::vector<int64_t>(size_t(adapters), settings_.rank);
    });
    program[b].lasting.change([&](strata::Lasting& lasting) {
      lasting.added = true, lasting.frozen = false;
      if (several) lasting.fused = rows_of_b;
    });
    TensorId read = x;
    if (settings_.dropout > 0 && stage.goal == strata::Goal::train)
      read = build.emit("dropout", {x, build.scalar(strata::kSeedScalar), build.scalar(strata::kStepScalar)},
                        {{"probability", settings_.dropout}, {"stream", int64_t(strata::stream_of(adapter.a))}},
                        stem + ".lora_dropout");
    const TensorId inner = build.emit("linear", {read, a, {}}, {}, stem + ".lora_inner");
    // What has names is summed over ranks that divide columns, since the second product is not linear in it alone.
    Dimensions names;
    for (size_t d = 0; d < program[inner].shape.size(); ++d) names.emplace_back("lora_" + std::to_string(d));
    build.name_dimensions(inner, std::move(names));
    strata::Attributes attributes = rows.attributes();
    attributes.set("scale", settings_.scale());
    const TensorId outer = build.emit("lora_matrix", {b}, attributes, stem + ".lora_outer");
    build.emit_all("linear", {inner, outer, {}}, {}, {result});
    build.accumulate_onto(0, addend);
    adapters_.push_back(std::move(adapter));
  }

  strata::lora::Settings settings_;
  std::vector<std::string> targets_{"block.*"};
  std::string adapter_;
  std::vector<Adapter> adapters_;  // of the program that came last
};

}  // namespace

STRATA_PLUGIN(Lora, "lora", "1.0.0", "low-rank adapters beside frozen weights, in PEFT's format too")
