// The residency planner beside the best there is: on small random programs every set of decisions is tried, written
// into the program, planned and predicted by the planner's own means, and the fastest that fits a budget is what the
// planner's choice under that budget is held against.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "engine/planning/homes.h"
#include "engine/planning/materialize.h"
#include "engine/planning/predict.h"
#include "engine/planning/residency.h"
#include "engine/planning/spread_moves.h"
#include "strata/builder.h"
#include "tests/random_cases.h"

namespace strata::optimum_test {
namespace {

// Some products and cheap ops in a row, of different widths, and a backward pass that reads what they made, the last
// first. What they made may be made again, or rest on a disk, by chance.
struct SmallProgram {
  explicit SmallProgram(uint64_t seed) : random(seed) {
    Builder build(program);
    constexpr int64_t kRows = 256, kWidths[] = {32, 64, 128, 256};
    const auto width = [&] { return kWidths[random() % 4]; };
    const auto weight = [&](int64_t to, int64_t from) {
      return build.parameter("w" + std::to_string(program.tensors.size()), {to, from}, {Initializer::Kind::zeros, 0});
    };
    const int count = int(test::draw(random, 3, 6));
    std::vector<TensorId> made;
    TensorId x = build.data("x", {kRows, width()}, DType::f32);
    build.step_part = StepPart::forward;
    for (int i = 0; i < count; ++i) {
      build.block_index = i / 2;
      x = random() % 2 ? build.emit("gelu", {x}) : build.emit("linear", {x, weight(width(), program[x].shape[1]), {}});
      made.push_back(x);
    }
    build.step_part = StepPart::backward;
    for (int i = count; i-- > 0;) {
      build.block_index = i / 2;
      const int64_t from = program[x].shape[1], to = program[made[size_t(i)]].shape[1];
      if (from != to) x = build.emit("linear", {x, weight(to, from), {}});
      x = build.emit("add", {x, made[size_t(i)]});
    }
    program[x].step_output = true;
    program.storage_directories = {"/nvme"};
    for (int i = 0; i < count; ++i) {
      if (random() % 4)
        program.forms[made[size_t(i)].value].push_back(
            {.name = "recompute", .restore = {program.ops[size_t(i)]}, .when = RestingForm::When::asked});
      if (random() % 2) program[made[size_t(i)]].nearest = program[made[size_t(i)]].farthest = Tier::nvme;
    }
    // From disks that everything hides behind to such that nothing does.
    const double disk = std::pow(10.0, std::uniform_real_distribution<>(7, 10)(random));
    rates = {.flops = 2e10, .memory = 4e9, .read = disk, .write = disk, .launch = 1e-7, .storage_latency = 1e-6};
  }
  test::Random random;
  Program program;
  Rates rates;
};

struct Reached {
  int64_t bytes = 0;
  double seconds = 0;
};

// Every set of decisions over the gaps of what the forward pass made: kept, made again in either way, moved away.
class Exhaustive {
 public:
  explicit Exhaustive(const SmallProgram& small) : rates_(small.rates), program_(small.program), uses_(program_) {
    program_.one_memory = true;
    bytes_without_ = plan_memory(program_, "cpu", 1).device().total_bytes();
    for (int32_t t = 0; t < int32_t(program_.tensors.size()); ++t) {
      const auto& uses = uses_.of[size_t(t)];
      if (program_.tensors[size_t(t)].persistent || uses.empty()) continue;
      for (size_t u = 1; u < uses.size(); ++u)
        if (uses[u] - uses[u - 1] > 1) add({t, uses[u]});
      if (program_.ops[size_t(uses.back())].step_part == StepPart::forward) add({t, kNever});
    }
  }
  double sets() const {
    double product = 1;
    for (const auto& [gap, options] : gaps_) product *= double(options.size() + 1);
    return product;
  }
  // What no other set is both smaller and faster than, the smallest first.
  std::vector<Reached> front() {
    visit(0);
    std::sort(all_.begin(), all_.end(), [](const Reached& a, const Reached& b) {
      return std::pair(a.bytes, a.seconds) < std::pair(b.bytes, b.seconds);
    });
    std::vector<Reached> front;
    for (const Reached& one : all_)
      if (front.empty() || one.seconds < front.back().seconds) front.push_back(one);
    return front;
  }

 private:
  void add(Gap gap) {
    std::vector<Decision> options;
    if (program_.forms.contains(gap.tensor))
      for (Decision::Again again : {Decision::Again::never, Decision::Again::always})
        options.push_back({0, Tier::device, again});
    if (program_.tensors[size_t(gap.tensor)].farthest == Tier::nvme && gap.use != kNever)
      options.push_back({-1, Tier::nvme});
    if (!options.empty()) gaps_.emplace_back(gap, std::move(options));
  }
  void visit(size_t gap) {
    if (gap == gaps_.size()) return evaluate();
    visit(gap + 1);
    for (const Decision& option : gaps_[gap].second) {
      decisions_.set(gaps_[gap].first, option);
      visit(gap + 1);
    }
    decisions_.set(gaps_[gap].first, {});
  }
  void evaluate() {
    constexpr size_t kMost = 200;  // ops: what restores from what is restored, again and again, is nobody's best
    auto made = materialize(program_, decisions_, uses_, false, kMost);
    if (!made) return;
    keep(made->program);
    const bool moves = std::any_of(made->program.ops.begin(), made->program.ops.end(),
                                   [](const Op& op) { return op.stream == Stream::read; });
    if (!moves) return;
    spread_moves(made->program, measure_memory(made->program, "cpu", 1), rates_, {bytes_without_, 0, 0});
    keep(made->program);
  }
  void keep(const Program& program) {
    MemoryPlan plan = plan_memory(program, "cpu", 1);
    place_closely(program, plan);
    all_.push_back({plan.device().total_bytes(), predict(program, plan, rates_).seconds});
  }

  const Rates& rates_;
  Program program_;
  const Uses uses_;
  int64_t bytes_without_ = 0;
  std::vector<std::pair<Gap, std::vector<Decision>>> gaps_;
  Decisions decisions_{uses_};
  std::vector<Reached> all_;
};

// What holds (of 2357 budgets of 600 programs): 99.8% of the plans are within 3% of the best there is, the worst takes
// 1.4 times as long; of budgets that something fits one in 300 is refused.
TEST(Optimum, OfSmallProgramsIsNearlyAlwaysReached) {
  constexpr double kMostSets = 5000, kNear = 1.03;
  std::vector<double> ratios;
  size_t refused = 0;
  for (uint64_t seed = test::first_seed(), end = seed + uint64_t(test::cases(40)); seed < end; ++seed) {
    SCOPED_TRACE("STRATA_SEED=" + std::to_string(seed));
    const SmallProgram small(seed);
    Exhaustive exhaustive(small);
    if (exhaustive.sets() > kMostSets) continue;
    for (const Reached& best : exhaustive.front()) {
      Program program = small.program;
      try {
        const MemoryPlan plan =
            plan_residency(program, {.threads = 1, .device_budget = best.bytes, .rates = small.rates});
        EXPECT_LE(plan.device().total_bytes(), best.bytes);
        ratios.push_back(predict(program, plan, small.rates).seconds / best.seconds);
      } catch (const BudgetError& error) {
        ++refused;
        EXPECT_GT(error.smallest(), best.bytes);
      }
    }
  }
  ASSERT_GT(ratios.size(), 0u);
  std::sort(ratios.begin(), ratios.end());
  const auto at = [&](double share) { return ratios[size_t(share * double(ratios.size() - 1))]; };
  const auto near = double(std::upper_bound(ratios.begin(), ratios.end(), kNear) - ratios.begin());
  std::printf(
      "%zu budgets, %zu refused; seconds beside the best: median %.3f, 90%% %.3f, 99%% %.3f, most %.3f; %.1f%% within "
      "3%%\n",
      ratios.size() + refused, refused, at(0.5), at(0.9), at(0.99), at(1), 100 * near / double(ratios.size()));
  if (ratios.size() < 100) return;  // a few chosen seeds say nothing about shares
  EXPECT_LE(at(0.5), 1.001);
  EXPECT_GE(near, 0.97 * double(ratios.size()));
  EXPECT_LE(double(refused), 0.02 * double(ratios.size()));
}

}  // namespace
}  // namespace strata::optimum_test
