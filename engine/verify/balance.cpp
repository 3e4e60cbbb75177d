// Sums of gradients beside what forms keep; see balance.h.
#include "engine/verify/balance.h"

#include <cmath>
#include <limits>
#include <vector>

#include "strata/communicator.h"
#include "strata/optimizer.h"
#include "strata/pattern.h"
#include "strata/plugin.h"

namespace strata::verifying {
namespace {

// Gradients that are nothing but rounding (biases of keys) are held to this part of the norm of all.
constexpr double kLeastNorm = 1e-4;
// Where parts of a step are missing that are as good as independent of the others, the way is up to 0.42 longer. A part
// that is lost in each of eight steps makes it longer by more than one.
constexpr double kMostDetour = 0.75;

class Sums final : public Plugin {
 public:
  Sums() {
    register_update({.name = kSumsPlugin,
                     .states = "the sum of all gradients",
                     .flops = 1,
                     .cpu = {by_type(bind<float>, bind<double>)},
                     .reference = {by_type(bind<float>, bind<double>)}});
  }
  Capabilities capabilities() const override { return {.provides = {"optimizer"}, .effect = Effect::program()}; }
  void update(UpdateStage& stage) override {
    for (const Gradient& stored : stage.gradients()) {
      const Gradient gradient = stage.in_f32(stored);
      const Shape shape = stage.build()[gradient.parameter].shape;
      stage.append(kSumsPlugin, gradient, {stage.state(gradient, kSumsPlugin, shape)},
                   {{"learning_rate", 0.0}, {"weight_decay", 0.0}});
    }
  }

 private:
  template <class T>
  static Launch bind(const Update& u) {
    return [u] {
      const double scale = u.scalars().gradient_scale();
      for (int64_t i = 0; i < u.count(); ++i) u.state<T>(0)[i] += T(double(u.gradient<T>()[i]) * scale);
    };
  }
};

// Adds a state to the sum of a gradient of `rows` rows: what each rank keeps of all of it, or of its share of the rows.
void add_state(std::vector<double>& sum, const Whole& state, int64_t rows, int ranks) {
  const int64_t of_rank = state.shape[0] / ranks, elements_of_row = int64_t(sum.size()) / rows;
  for (int rank = 0; rank < ranks; ++rank) {
    const Range at = of_rank == rows ? Range{0, rows} : share_of(rows, rank, ranks);
    for (int64_t i = 0; i < at.count() * elements_of_row; ++i)
      sum[size_t(at.begin * elements_of_row + i)] += number_of(state, size_t(rank * of_rank * elements_of_row + i));
  }
}

double norm_of(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

}  // namespace

void register_sums() {
  static const StaticPlugin registered(STRATA_PLUGIN_ENTRY_(Sums, kSumsPlugin, "1.0.0", "adds gradients up"));
}

Difference balance(const Outcome& actual, const Outcome& expected, const std::string& pattern, int ranks,
                   double bound) {
  const std::string ending = std::string(".") + kSumsPlugin;
  struct Gradients {
    std::string parameter;
    std::vector<double> is, was;
  };
  std::vector<Gradients> all;
  double norm = 0;
  for (const Whole& sum : expected.tensors) {
    if (!sum.name.ends_with(ending)) continue;
    const std::string parameter = sum.name.substr(0, sum.name.size() - ending.size());
    const Whole* mine = actual.find(sum.name);
    if (!mine || mine->shape != sum.shape)
      return {"the gradients of " + parameter + ", which are missing", std::numeric_limits<double>::infinity()};
    Gradients one{.parameter = parameter, .is = {}, .was = {}};
    for (size_t i = 0; i < size_t(elements(sum.shape)); ++i) {
      one.is.push_back(number_of(*mine, i));
      one.was.push_back(number_of(sum, i));
    }
    for (const Whole& state : actual.tensors)
      if (state.name.starts_with(parameter + ".") && matches(pattern, state.name))
        add_state(one.is, state, sum.shape[0], ranks);
    norm = std::hypot(norm, norm_of(one.was));
    all.push_back(std::move(one));
  }
  Difference worst;
  for (Gradients& one : all) {
    for (size_t i = 0; i < one.is.size(); ++i) one.is[i] -= one.was[i];
    const double apart = norm_of(one.is) / std::max(norm_of(one.was), kLeastNorm * norm);
    if (!(apart <= worst.relative))  // NaN, too
      worst = {"what is kept of gradients of " + one.parameter, apart, bound};
  }
  return worst;
}

Difference detour(const Outcome& actual, const Outcome& fewer, const Outcome& more) {
  const std::string ending = std::string(".") + kSumsPlugin;
  struct Ways {
    std::string parameter;
    double around, straight;
  };
  std::vector<Ways> all;
  double norm = 0;
  for (const Whole& last : more.tensors) {
    if (!last.name.ends_with(ending)) continue;
    const std::string parameter = last.name.substr(0, last.name.size() - ending.size());
    const Whole *mine = actual.find(last.name), *first = fewer.find(last.name);
    if (!mine || !first || mine->shape != last.shape)
      return {"the gradients of " + parameter + ", which are missing", std::numeric_limits<double>::infinity()};
    double before = 0, behind = 0, straight = 0;
    for (size_t i = 0; i < size_t(elements(last.shape)); ++i) {
      const double x = number_of(*mine, i), from = number_of(*first, i), to = number_of(last, i);
      before += (x - from) * (x - from), behind += (to - x) * (to - x), straight += (to - from) * (to - from);
    }
    all.push_back({parameter, std::sqrt(before) + std::sqrt(behind), std::sqrt(straight)});
    norm = std::hypot(norm, all.back().straight);
  }
  Difference worst;
  for (const Ways& ways : all) {
    const double apart = (ways.around - ways.straight) / std::max(ways.straight, kLeastNorm * norm);
    if (!(apart <= worst.relative))  // NaN, too
      worst = {"the sum of gradients of " + ways.parameter, apart, kMostDetour};
  }
  return worst;
}

}  // namespace strata::verifying
