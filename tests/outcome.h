// Ten steps of a program on random tokens, on one rank or on several that are threads: losses and whole parameters, and
// what two runs whose sums are taken in another order may differ by.
#pragma once
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/backends.h"
#include "tests/harness.h"
#include "tests/ordering.h"
#include "tests/random_cases.h"

namespace strata::test {

struct Outcome {
  std::vector<double> losses;
  std::map<std::string, std::vector<float>> tensors;  // whole, put together from all ranks' parts
};

// `tokens`: of a step, drawn below `vocabulary`; the same for every number of ranks. One rank runs without a world.
inline Outcome outcome_of(const std::string& toml, int ranks, int tokens, int vocabulary,
                          const std::string& backend = "cpu") {
  constexpr int kSteps = 10;
  Outcome result;
  std::mutex mutex;
  run_local(
      ranks,
      [&](World& world) {
        const std::unique_ptr<Device> device = backend == "cuda" ? rank_device(world.rank()) : nullptr;
        Runner runner(toml, {}, Goal::train, {}, ranks == 1 ? nullptr : &world, backend, device.get());
        expect_ordered(runner.built.program, runner.plan);
        Random random(7);
        std::vector<int32_t> inputs(size_t(tokens), 0), targets(inputs);
        for (int step = 0; step < kSteps; ++step) {
          for (auto* list : {&inputs, &targets})
            for (int32_t& token : *list) token = int32_t(draw(random, 0, vocabulary - 1));
          runner.in_loop = step + 1 < kSteps;
          const double loss = runner.run_step(inputs.data(), targets.data());
          if (world.rank() == 0) result.losses.push_back(loss);
        }
        for (const Tensor& tensor : runner.storage->persistent_tensors()) {
          if (tensor.role != Role::parameter || tensor.dtype != DType::f32) continue;
          const std::lock_guard lock(mutex);
          put_together(tensor, runner.values(tensor.name), result.tensors[tensor.name]);
        }
      },
      60);
  return result;
}

// Sums are taken in another order: 1e-5 of the largest magnitude after ten steps, as fp32 gives. `most`: of a
// parameter; a tenth of one step of 1e-3.
inline void expect_close(const Outcome& actual, const Outcome& expected, double most = 1e-4) {
  ASSERT_EQ(actual.losses.size(), expected.losses.size());
  for (size_t i = 0; i < expected.losses.size(); ++i)
    EXPECT_NEAR(actual.losses[i], expected.losses[i], 1e-5 * expected.losses[i]) << "step " << i;
  ASSERT_EQ(actual.tensors.size(), expected.tensors.size());
  for (const auto& [name, values] : expected.tensors) {
    ASSERT_TRUE(actual.tensors.contains(name)) << name;
    const std::vector<float>& mine = actual.tensors.at(name);
    ASSERT_EQ(mine.size(), values.size()) << name;
    if (name.find("qkv.bias") != std::string::npos) continue;  // of keys: rounding, made into steps
    double difference = 0;
    for (size_t i = 0; i < values.size(); ++i) difference = std::max(difference, double(std::abs(mine[i] - values[i])));
    EXPECT_LE(difference, most) << name;
  }
}

}  // namespace strata::test
