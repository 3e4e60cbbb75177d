// Where data parallelism's exchanges stand in the program. That sums are right: tests/ranks_test.cpp.
#include "tests/harness.h"

namespace strata::data_parallel_test {
namespace {

// Compute has the time between two exchanges to hide the first one behind.
TEST(DataParallel, WhatNeedsAnExchangeComesAfterTheNextHasBegun) {
  run_local(2, [&](World& world) {
    test::Runner runner(
        "[model]\nplugin = \"gpt\"\nlayers = 2\nhidden = 32\nheads = 4\nvocabulary = 61\ncontext = 16\n"
        "[data]\ntrain = [\"none\"]\nsequence_length = 16\nglobal_batch = 8\nmicro_batch = 1\n"
        "[mesh]\ndata = 2\n[plugins.adamw]\n[plugins.data_parallel]\nbucket = 20000\n",
        {}, Goal::train, {}, &world);
    const std::vector<Op>& ops = runner.built.program.ops;
    std::vector<size_t> exchanges;
    for (size_t i = 0; i < ops.size(); ++i)
      if (ops[i].stream == Stream::exchange) exchanges.push_back(i);
    ASSERT_GT(exchanges.size(), 3u);
    for (size_t e = 0; e + 1 < exchanges.size(); ++e)
      for (size_t i = exchanges[e] + 1; i < exchanges[e + 1]; ++i)
        for (TensorId id : ops[i].inputs)
          for (TensorId sum : ops[exchanges[e]].outputs)
            EXPECT_FALSE(id && id == sum) << "op " << i << " reads what op " << exchanges[e] << " exchanges";
  });
}

}  // namespace
}  // namespace strata::data_parallel_test
