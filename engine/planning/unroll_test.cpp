// What copies for more microbatches are called and cost; which orders of passes do, tests/passes_test.cpp checks.
#include "engine/planning/unroll.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include "strata/builder.h"

namespace strata::unroll_test {
namespace {

// Activations with names of dimensions and a name that no string holds without memory of its own.
Program chain(int ops) {
  Program program;
  Builder build(program);
  const auto scope = build.block("block.with_a_long_name", 0);
  const Dimensions names{"batch", "time", "hidden"};
  TensorId x = build.data("tokens", {4, 16, 8}, DType::f32, names);
  for (int i = 0; i < ops; ++i)
    x = build.name_dimensions(build.emit("clamp", {x}, {{"limit", 1.0}}, "result." + std::to_string(i)), names);
  return program;
}

Program unrolled(Program single, int microbatches) {
  ScheduleStage schedule{.microbatches = microbatches, .order = default_order(microbatches, 1, false)};
  std::vector<TensorId> none;
  return unroll(single, PassTable(single, {}, schedule.chunks), {}, none, schedule);
}

TEST(Unroll, NamesCopiesByTheirMicrobatch) {
  const Program program = unrolled(chain(3), 12);
  for (int m : {0, 7, 11}) {
    const std::string name = "block.with_a_long_name.result.2@" + std::to_string(m);
    const TensorId id = program.find(name);
    ASSERT_TRUE(id) << name;
    EXPECT_EQ(program[id].name, name);
    EXPECT_TRUE(program.find("block.with_a_long_name.tokens@" + std::to_string(m)));
  }
  EXPECT_FALSE(program.find("block.with_a_long_name.result.2@12"));
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which have allocators of their own
int64_t bytes_in_use() {
  const struct mallinfo2 info = mallinfo2();
  return int64_t(info.uordblks) + int64_t(info.hblkhd);
}

TEST(Unroll, CopiesShareWhatIsLong) {
  constexpr int kOps = 50, kFew = 100, kMany = 300;
  const Program single = chain(kOps);
  const auto bytes = [&](int microbatches) {
    const int64_t before = bytes_in_use();
    const Program program = unrolled(single, microbatches);
    return bytes_in_use() - before;
  };
  const double an_op = double(bytes(kMany) - bytes(kFew)) / ((kMany - kFew) * kOps);
  EXPECT_LT(an_op, 216) << "bytes for an op and its tensor";
}
#endif

}  // namespace
}  // namespace strata::unroll_test
