// Updates in slices: random updates beside the same ones whole, bit for bit, with memory poisoned and steps that
// overlap.
#include "engine/planning/slice_updates.h"

#include <algorithm>
#include <cstring>

#include "engine/planning/predict.h"
#include "engine/planning/residency.h"
#include "strata/optimizer.h"
#include "tests/harness.h"
#include "tests/ordering.h"
#include "tests/random_cases.h"

namespace strata::slice_updates_test {
namespace {

// m ← m / 2 + g; p ← p − rate · m.
Launch bind(const Update& u) {
  return [u] {
    for (int64_t i = 0; i < u.count(); ++i) {
      u.state<float>(0)[i] = 0.5f * u.state<float>(0)[i] + u.gradient<float>()[i];
      u.parameter<float>()[i] -= float(u.scalars().rate()) * u.state<float>(0)[i];
    }
  };
}
void register_once() {
  static const OpKind& kind = register_update({.name = "sliced_test_update",
                                               .states = "m of the parameter's shape",
                                               .elementwise = true,
                                               .cpu = {bind},
                                               .reference = {bind}});
  (void)kind;
}

// Parameters of any number of columns, each updated by a gradient of its own, some with a bf16 copy that is what the
// forward pass reads.
struct SmallStep {
  SmallStep(uint64_t seed, const std::string& directory) : random(seed) {
    register_once();
    Builder build(program);
    constexpr int64_t kColumns[] = {1, 7, 60, 64, 1024};
    const Mesh mesh;
    std::vector<Gradient> gradients;
    std::vector<TensorId> copies;
    for (int p = 0; p < int(test::draw(random, 1, 4)); ++p) {
      const int64_t columns = kColumns[random() % 5];
      const Shape shape{std::max<int64_t>(1, test::draw(random, 1 << 10, 1 << 15) / columns), columns};
      const std::string name = "w" + std::to_string(p);
      const TensorId w = build.parameter(name, shape, {Initializer::Kind::normal, 0.3});
      build.step_part = StepPart::forward;
      build.block_index = p;
      const TensorId x = build.data("x" + std::to_string(p), shape, DType::f32);
      const TensorId y = build.emit("gelu", {build.emit("add", {x, w})});
      gradients.push_back({.parameter = w, .tensor = y, .scale = {}, .partial = {}});
    }
    build.step_part = StepPart::update;
    build.block_index = -1;
    UpdateStage stage(build, gradients, mesh);
    for (const Gradient& gradient : gradients) {
      const Shape shape = program[gradient.parameter].shape;
      stage.append("sliced_test_update", gradient, {stage.state(gradient, "m", shape)},
                   {{"learning_rate", 0.1}, {"weight_decay", 0.0}});
      if (random() % 2) {
        const TensorId copy = build.emit("cast", {gradient.parameter}, {{"dtype", "bf16"}});
        program[copy].step_output = true;
      }
    }
    program.storage_directories = {directory};
    for (Tensor& tensor : program.tensors)
      if (tensor.persistent && elements(tensor.shape) > 1 && random() % 4)
        tensor.nearest = tensor.farthest = Tier::nvme;
  }

  std::vector<std::vector<std::byte>> results(const MemoryPlan& plan, bool poisoned) {
    Threads threads(2);
    Storage storage(program, plan);
    Executor executor(program, plan, storage, "cpu", threads);
    storage.initialize(5, threads);
    constexpr int kSteps = 3;
    for (int step = 0; step < kSteps; ++step) {
      for (size_t t = 0; t < program.tensors.size(); ++t)
        if (const Tensor& tensor = program.tensors[t]; tensor.role == Role::data && !tensor.copy_of)
          for (int64_t i = 0; i < elements(tensor.shape); ++i)
            static_cast<float*>(executor.pointer({int32_t(t)}))[i] = 0.01f * float((i + 5 * step) % 97) - 0.3f;
      storage.set_scalar(kStepScalar, step + 1);
      storage.set_scalar(kLearningRateFactor, 1);
      poisoned ? executor.run_poisoned() : executor.run({}, step + 1 < kSteps);
    }
    std::vector<std::vector<std::byte>> all;
    for (size_t t = 0; t < program.tensors.size(); ++t) {
      if (const Tensor& tensor = program.tensors[t]; tensor.persistent && !tensor.part_of) {
        all.push_back(storage.copy(tensor));
      } else if (tensor.step_output && !tensor.part_of) {
        const auto* bytes = static_cast<const std::byte*>(executor.pointer({int32_t(t)}));
        all.emplace_back(bytes, bytes + tensor.bytes());
      }
    }
    return all;
  }

  test::Random random;
  Program program;
};

int64_t slices_in(const Program& program) {
  return std::count_if(program.ops.begin(), program.ops.end(),
                       [&](const Op& op) { return is_elementwise_update(*op.kind) && program[op.outputs[0]].part_of; });
}

TEST(SliceUpdates, RandomUpdatesKeepTheirBits) {
  test::TemporaryFolder folder;
  int64_t slices = 0;
  for (uint64_t seed = test::first_seed(), end = seed + uint64_t(test::cases(60)); seed < end; ++seed) {
    SCOPED_TRACE("STRATA_SEED=" + std::to_string(seed));
    SmallStep whole(seed, folder.path()), sliced(seed, folder.path());
    const ResidencySettings settings{.threads = 2, .host_stream = seed % 3 == 0, .rates = {}};
    const MemoryPlan plan = plan_residency(whole.program, settings);
    ASSERT_EQ(slices_in(whole.program), 0);
    ResidencySettings small = settings;
    small.slice = 4096 * test::draw(sliced.random, 1, 4);
    const MemoryPlan plan_of_slices = plan_residency(sliced.program, small);
    slices += slices_in(sliced.program);
    verify(sliced.program, "slices");
    test::expect_ordered(sliced.program, plan_of_slices);
    Program cut = whole.program;
    slice_updates(cut, small.slice);
    EXPECT_LE(measure_memory(cut, "cpu", 2).device().live_peak_bytes, plan.device().live_peak_bytes);
    const auto expected = whole.results(plan, false);
    for (bool poisoned : {false, true}) EXPECT_EQ(sliced.results(plan_of_slices, poisoned), expected) << poisoned;
  }
  EXPECT_GT(slices, 100);
}

// The updates of tensors, which rest on the disk with their states.
Program updates_of(const std::vector<Shape>& shapes) {
  register_once();
  Program program;
  Builder build(program);
  const Mesh mesh;
  std::vector<Gradient> gradients;
  for (const Shape& shape : shapes) {
    const std::string number = std::to_string(gradients.size());
    const TensorId w = build.parameter("w" + number, shape, {}), x = build.data("x" + number, shape, DType::f32);
    build.step_part = StepPart::forward;
    build.block_index = 0;
    gradients.push_back({.parameter = w, .tensor = build.emit("gelu", {x}), .scale = {}, .partial = {}});
  }
  build.step_part = StepPart::update;
  build.block_index = -1;
  UpdateStage stage(build, gradients, mesh);
  for (size_t i = 0; i < shapes.size(); ++i)
    stage.append("sliced_test_update", gradients[i], {stage.state(gradients[i], "m", shapes[i])},
                 {{"learning_rate", 0.1}, {"weight_decay", 0.0}});
  program.storage_directories = {"/nvme"};
  for (Tensor& tensor : program.tensors)
    if (tensor.persistent && elements(tensor.shape) > 1) tensor.nearest = tensor.farthest = Tier::nvme;
  return program;
}

// However large a tensor is, and whatever number of rows 64 does not divide.
TEST(SliceUpdates, ATensorHasAtMost64Slices) {
  for (int64_t rows : {63, 64, 65, 127, 128, 129, 1000, 50304}) {
    Program program = updates_of({{rows, 1024}});
    plan_residency(program, {.threads = 2, .slice = 4096, .rates = {}});  // bytes of a row
    EXPECT_LE(slices_in(program), 64) << rows;
    EXPECT_GT(slices_in(program), 31) << rows;
  }
}

// Where no tensor is much of all, four of each do; of one that is, each slice is at most a 64th of all.
TEST(SliceUpdates, OfManyTensorsEachHasFourSlices) {
  const auto slices = [](int64_t rows) {
    std::vector<Shape> shapes(40, Shape{64, 1024});
    shapes.push_back({rows, 1024});
    Program program = updates_of(shapes);
    plan_residency(program, {.threads = 2, .slice = 4096, .rates = {}});
    return slices_in(program);
  };
  EXPECT_EQ(slices(64), 41 * 4);
  EXPECT_EQ(slices(40 * 64), 40 * 4 + 32);
}

// One tensor whose way through the disk is all that there is: in slices its ways there and back overlap.
TEST(SliceUpdates, AStepDoesNotEndWithAWholeTensorsWay) {
  const auto seconds = [](int64_t slice) {
    Program program = updates_of({{4096, 1024}});
    const Rates rates{.memory = 1e11, .read = 1e9, .write = 1e9};
    const MemoryPlan plan = plan_residency(program, {.threads = 2, .slice = slice, .rates = rates});
    Prediction prediction = predict(program, plan, rates);
    return prediction.seconds / std::max(prediction.busy[size_t(Stream::read)], prediction.busy[size_t(Stream::write)]);
  };
  EXPECT_GT(seconds(int64_t{1} << 40), 1.4);
  EXPECT_LT(seconds(int64_t{1} << 20), 1.2);
}

#if defined(STRATA_EMULATED_CUDA)
// A master on NVMe is updated on the host and cast there when its working copy has been read for the last time, an op
// later: between the two it stays, and the disk has one way to go for each byte, slice by slice.
TEST(SliceUpdates, WhatIsUpdatedAndCastInAMomentIsReadOnce) {
  register_once();
  register_kernel("sliced_test_update", "cuda", {});  // where it runs is decided later
  Program program;
  Builder build(program);
  const Mesh mesh;
  const Shape shape{4096, 1024};
  const TensorId w = build.parameter("w", shape, {});
  const TensorId copy = build.state("w.bf16", shape, DType::bf16);
  const TensorId x = build.data("x", shape, DType::f32), y = build.data("y", shape, DType::bf16);
  build.step_part = StepPart::backward;
  build.block_index = 0;
  std::vector<Gradient> gradients{{.parameter = w, .tensor = build.emit("gelu", {x}), .scale = {}, .partial = {}}};
  build.step_part = StepPart::update;
  build.block_index = -1;
  UpdateStage stage(build, gradients, mesh);
  const TensorId m = stage.state(gradients[0], "m", shape);
  stage.append("sliced_test_update", gradients[0], {m}, {{"learning_rate", 0.1}, {"weight_decay", 0.0}});
  build.step_part = StepPart::backward;
  build.block_index = 0;
  program[build.emit("add", {y, copy})].step_output = true;
  build.step_part = StepPart::update;
  build.block_index = -1;
  build.emit_all("cast", {w}, {{"dtype", "bf16"}}, {copy});
  program.storage_directories = {"/nvme"};
  for (TensorId id : {w, m}) program[id].nearest = program[id].farthest = Tier::nvme;
  program[copy].nearest = program[copy].farthest = Tier::host;
  const Rates rates{.memory = 1e11, .read = 1e9, .write = 1e9};
  const MemoryPlan plan =
      plan_residency(program, {.backend = "cuda", .threads = 2, .host_stream = true, .slice = 1 << 20, .rates = rates});
  EXPECT_GT(slices_in(program), 8);
  int64_t read = 0, written = 0;
  for (const Op& op : program.ops) {
    if (op.stream == Stream::read) read += program[op.outputs[0]].bytes();
    if (op.stream == Stream::write) written += program[op.inputs[0]].bytes();
  }
  EXPECT_EQ(read, program[w].bytes() + program[m].bytes());
  EXPECT_EQ(written, read);
  test::expect_ordered(program, plan);
}
#endif

}  // namespace
}  // namespace strata::slice_updates_test
