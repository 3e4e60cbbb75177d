// Switch, GShard and noisy top-k gating against values recorded from a program of the papers' formulas, and their
// gradients against central differences in double.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>

#include "engine/ops/gating_recorded.h"
#include "engine/planning/memory_plan.h"
#include "engine/program/autodiff.h"
#include "engine/runtime/executor.h"
#include "strata/builder.h"
#include "tests/backends.h"

namespace strata::noisy_gating_test {
namespace {

constexpr int64_t kGateTokens = 12, kGateWidth = 5, kGateExperts = 4;

// A program whose data, seed and step are set by name, and whose numbers are read by id.
class GateRunner {
 public:
  GateRunner(Program& program, DType type, const std::string& backend) : program_(program), type_(type) {
    for (Tensor& tensor : program_.tensors)
      if (tensor.role == Role::activation) tensor.step_output = true;
    verify(program_, "test");
    plan_ = std::make_unique<MemoryPlan>(plan_memory(program_, backend, 2));
    storage_ = std::make_unique<Storage>(program_, *plan_, std::vector<const MemoryPlan*>(), NvmeStore::Faults(),
                                         test::device_of(backend));
    executor_ = std::make_unique<Executor>(program_, *plan_, *storage_, backend, threads_);
    storage_->set_scalar("seed", 9);
    storage_->set_scalar("step", 3);
  }
  void set(TensorId id, const std::function<double(int64_t row, int64_t column)>& value) {
    const int64_t columns = program_[id].shape.back();
    for (int64_t i = 0; i < elements(program_[id].shape); ++i) put(id, i, value(i / columns, i % columns));
  }
  void put(TensorId id, int64_t i, double value) {
    if (type_ == DType::f64)
      static_cast<double*>(executor_->pointer(id))[i] = value;
    else
      static_cast<float*>(executor_->pointer(id))[i] = float(value);
  }
  void run() { executor_->run(); }
  double number(TensorId id, int64_t i = 0) const {
    const void* const data = executor_->pointer(id);
    if (program_[id].dtype == DType::i32) return static_cast<const int32_t*>(data)[i];
    if (program_[id].dtype == DType::f64) return static_cast<const double*>(data)[i];
    return double(static_cast<const float*>(data)[i]);
  }
  // (tokens, experts): weights where a choice has a slot.
  std::vector<double> gates(TensorId weights, TensorId choices, TensorId slots) const {
    std::vector<double> gates(kGateTokens * kGateExperts);
    const int64_t k = program_[weights].shape.back();
    for (int64_t i = 0; i < kGateTokens * k; ++i)
      if (number(slots, i) >= 0) gates[size_t(i / k * kGateExperts + int64_t(number(choices, i)))] = number(weights, i);
    return gates;
  }

 private:
  Program& program_;
  DType type_;
  Threads threads_{2};
  std::unique_ptr<MemoryPlan> plan_;
  std::unique_ptr<Storage> storage_;
  std::unique_ptr<Executor> executor_;
};

struct GateProgram {
  Program program;
  TensorId x, w, w_noise, weights, choices, slots;
  std::vector<TensorId> losses;
};

const Attributes kStream{{"stream", int64_t{77}}};

void route_and_place(Builder& b, GateProgram& g, TensorId logits, int64_t k, bool normalize) {
  const auto routed = b.emit_all("route", {logits}, {{"k", k}, {"normalize", int64_t(normalize)}});
  g.weights = routed[0], g.choices = routed[1];
}
void place(Builder& b, GateProgram& g, int64_t capacity) {
  g.slots = b.emit_all("expert_slots", {g.choices}, {{"experts", kGateExperts}, {"capacity", capacity}})[0];
}

GateProgram gate_program(const std::string& router, DType type) {
  GateProgram g;
  Builder b(g.program);
  b.microbatch = 0;
  g.x = b.data("x", {1, kGateTokens, kGateWidth}, type);
  g.w = b.data("w", {kGateExperts, kGateWidth}, type);
  g.w_noise = b.data("w_noise", {kGateExperts, kGateWidth}, type);
  const TensorId seed = b.scalar("seed"), step = b.scalar("step");
  const auto loss = [&](TensorId logits, double balance) {
    g.losses = {b.emit("router_loss", {logits, g.choices},
                       {{"balance", balance}, {"z", 0.0}, {"counted", int64_t{1}}, {"scale", 1.0}})};
  };
  if (router == "switch") {
    Attributes jitter = kStream;
    jitter.set("epsilon", 0.2);
    const TensorId logits = b.emit("router_logits", {b.emit("jitter", {g.x, seed, step}, jitter), g.w});
    route_and_place(b, g, logits, 1, false);
    loss(logits, 1);
    place(b, g, 3);
  } else if (router == "gshard") {
    const TensorId logits = b.emit("router_logits", {g.x, g.w});
    route_and_place(b, g, logits, 2, true);
    loss(logits, 1.0 / (kGateExperts * kGateExperts));
    g.choices = b.emit("second_by_chance", {g.weights, g.choices, seed, step}, kStream);
    place(b, g, 4);
  } else {
    const TensorId clean = b.emit("router_logits", {g.x, g.w}), spread = b.emit("router_logits", {g.x, g.w_noise});
    const TensorId noisy = b.emit("noisy_logits", {clean, spread, seed, step}, kStream);
    route_and_place(b, g, noisy, 2, true);
    g.losses = {b.emit("importance_loss", {g.weights, g.choices}, {{"experts", kGateExperts}, {"scale", 1.0}}),
                b.emit("load_loss", {clean, spread, noisy, g.choices}, {{"scale", 1.0}})};
    place(b, g, 0);
  }
  return g;
}

void fill_recorded(GateRunner& runner, const GateProgram& g) {
  runner.set(g.x, [](int64_t t, int64_t c) { return std::sin(1.0 + 7.0 * double(t) + 3.0 * double(c)); });
  runner.set(g.w, [](int64_t e, int64_t c) { return std::cos(2.0 + 5.0 * double(e) + 11.0 * double(c)); });
  runner.set(g.w_noise, [](int64_t e, int64_t c) { return std::sin(3.0 + 2.0 * double(e) + double(c)); });
}

// In double, and in f32 on every backend.
std::vector<std::pair<DType, std::string>> gate_backends() {
  std::vector<std::pair<DType, std::string>> list{{DType::f64, "reference"}};
  for (const std::string& backend : test::kBackends) list.emplace_back(DType::f32, backend);
  return list;
}

void expect_recorded(const std::string& router, const double* gates, const double* losses) {
  for (const auto& [type, backend] : gate_backends()) {
    SCOPED_TRACE(router + " in " + std::string(name_of(type)) + " on " + backend);
    GateProgram g = gate_program(router, type);
    GateRunner runner(g.program, type, backend);
    fill_recorded(runner, g);
    runner.run();
    // Normal numbers are rounded to f32 in either precision.
    const double tolerance = type == DType::f32 ? 1e-5 : router == "shazeer" ? 1e-6 : 1e-12;
    const std::vector<double> got = runner.gates(g.weights, g.choices, g.slots);
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], gates[i], tolerance) << i;
    for (size_t i = 0; i < g.losses.size(); ++i)
      EXPECT_NEAR(runner.number(g.losses[i]), losses[i], tolerance * (1 + std::abs(losses[i]))) << "loss " << i;
  }
}

TEST(Gating, IsThatOfThePapers) {
  expect_recorded("switch", recorded_gating::kSwitchGates, recorded_gating::kSwitchLosses);
  expect_recorded("gshard", recorded_gating::kGshardGates, recorded_gating::kGshardLosses);
  expect_recorded("shazeer", recorded_gating::kShazeerGates, recorded_gating::kShazeerLosses);
}

// Of weights times random numbers and of the losses, with respect to x and both matrices; on the CPU in f32 as well.
TEST(Gating, GradientsAreThoseOfCentralDifferences) {
  for (const std::string router : {"switch", "gshard", "shazeer"}) {
    std::vector<std::vector<double>> exact;
    for (const auto& [type, backend] : gate_backends()) {
      SCOPED_TRACE(router + " in " + std::string(name_of(type)) + " on " + backend);
      GateProgram g = gate_program(router, type);
      const TensorId cotangent = Builder(g.program).data("cotangent", g.program[g.weights].shape, type);
      std::vector<Root> roots{{g.weights, cotangent}};
      for (TensorId loss : g.losses) roots.push_back({loss, {}});
      std::vector<TensorId> wanted{g.x, g.w};
      if (router == "shazeer") wanted.push_back(g.w_noise);
      const std::vector<TensorId> gradients = differentiate(g.program, roots, wanted).wanted;
      for (TensorId id : gradients) g.program[id].step_output = true;
      GateRunner runner(g.program, type, backend);
      fill_recorded(runner, g);
      runner.set(cotangent, [](int64_t t, int64_t j) { return std::cos(double(5 * t + 3 * j)); });
      runner.run();
      std::vector<std::vector<double>> got;
      for (TensorId id : gradients) {
        got.emplace_back();
        for (int64_t i = 0; i < elements(g.program[id].shape); ++i) got.back().push_back(runner.number(id, i));
      }
      if (type == DType::f32) {
        for (size_t n = 0; n < got.size(); ++n)
          for (size_t i = 0; i < got[n].size(); ++i)
            EXPECT_NEAR(got[n][i], exact[n][i], 2e-5 * (1 + std::abs(exact[n][i]))) << n << " element " << i;
        continue;
      }
      exact = got;
      const auto objective = [&] {
        runner.run();
        double sum = 0;
        for (int64_t i = 0; i < elements(g.program[g.weights].shape); ++i)
          sum += runner.number(g.weights, i) * runner.number(cotangent, i);
        for (TensorId loss : g.losses) sum += runner.number(loss);
        return sum;
      };
      for (size_t n = 0; n < wanted.size(); ++n)
        for (int64_t i = 0; i < elements(g.program[wanted[n]].shape); ++i) {
          constexpr double kStep = 1e-6;  // truncation is O(h²), cancellation 1e-16 / h
          const double value = runner.number(wanted[n], i);
          runner.put(wanted[n], i, value + kStep);
          const double up = objective();
          runner.put(wanted[n], i, value - kStep);
          const double slope = (up - objective()) / (2 * kStep);
          runner.put(wanted[n], i, value);
          EXPECT_NEAR(exact[n][size_t(i)], slope, 1e-7 * (1 + std::abs(slope))) << n << " element " << i;
        }
    }
  }
}

}  // namespace
}  // namespace strata::noisy_gating_test
