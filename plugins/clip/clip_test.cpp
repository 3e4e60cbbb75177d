// Clipping against the norm taken by hand, and its kernel where steps overflow.
#include <cmath>
#include <limits>

#include "strata/exact_sum.h"
#include "tests/small_runs.h"

namespace strata::clip_test {
namespace {

std::string toml(const std::string& plugins) {
  return "[model]\nplugin = \"gpt\"\nlayers = 2\nhidden = 60\nheads = 3\nvocabulary = 64\ncontext = 16\n[data]\n"
         "train = [\"none\"]\nsequence_length = 16\nglobal_batch = 4\nmicro_batch = 2\n[device]\nthreads = 2\n"
         "[plugins.adamw]\nbeta1 = 0.5\n" +
         plugins;
}

// Where the norm is above the limit, what AdamW gets is the gradient times limit / norm; its first moment after one
// step is half of that.
TEST(Clip, ScalesByTheNormOfEverything) {
  for (const double limit : {0.01, 0.3}) {
    test::KeepGradients keep;
    test::Runner runner(toml("[plugins.clip]\nmax_norm = " + std::to_string(limit) + "\n"), {{"keep", &keep}});
    test::small_run(runner, 1);
    double squares = 0;
    for (const auto& [name, id] : keep.tensors)
      for (const float g : runner.values(id)) squares += double(g) * double(g);
    const double norm = std::sqrt(squares), factor = limit / (norm + 1e-6);
    ASSERT_LT(factor, 1);
    for (const Op& op : runner.built.program.ops)
      if (op.kind->name == "clip_factor") {
        // Squares of a row are added up in single precision in between.
        EXPECT_NEAR(*static_cast<double*>(runner.executor->pointer(op.outputs[1])), norm, 1e-5 * norm);
      }
    for (const auto& [name, id] : keep.tensors) {
      const std::vector<float> gradients = runner.values(id), moments = runner.values(name + ".adamw.m");
      ASSERT_EQ(moments.size(), gradients.size());
      for (size_t i = 0; i < moments.size(); ++i)
        ASSERT_NEAR(moments[i], 0.5 * factor * gradients[i], 1e-5 * std::abs(factor * gradients[i]) + 1e-12) << name;
    }
  }
}

// Below the limit not a bit changes.
TEST(Clip, LeavesSmallNormsAlone) {
  test::Runner plain(toml("")), clipped(toml("[plugins.clip]\nmax_norm = 1e9\n"));
  test::expect_equal(test::small_run(clipped), test::small_run(plain), "clipped");
}

struct Factor {
  double factor, norm;
};
Factor factor_of(double squares, double scale) {
  double sum[kExactSum] = {}, given = scale, factor = -1, norm = -1;
  add_exactly(sum, squares);
  Program program;
  Builder build(program);
  const TensorId in = build.data("sum", {kExactSum}, DType::f64), pending = build.data("scale", {1}, DType::f64);
  const auto out = build.emit_all("clip_factor", {in, pending}, {{"max_norm", 2.0}});
  Threads threads(1);
  const OpView view(program, program.ops.front());
  const Binding binding(view, {sum, &given}, {&factor, &norm}, nullptr, threads);
  EXPECT_EQ(out.size(), 2u);
  find_kind("clip_factor").kernels.at("cpu").bind(binding)();
  return {factor, norm};
}

TEST(Clip, TakesWhatIsPendingIntoTheNorm) {
  const test::Runner loaded(toml("[plugins.clip]\n"));  // the plugin, which registers the kind
  EXPECT_EQ(factor_of(16, 1).norm, 4);
  EXPECT_EQ(factor_of(16, 1).factor, 2 / (4 + 1e-6));
  EXPECT_EQ(factor_of(16, 0.25).norm, 1);  // as fp16's loss scale: gradients are four times as large as they are
  EXPECT_EQ(factor_of(16, 0.25).factor, 1);
  EXPECT_EQ(factor_of(0, 1).factor, 1);
  const double none = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(factor_of(16, none).norm, 0);                                               // a step that overflowed
  EXPECT_TRUE(std::isnan(factor_of(std::numeric_limits<double>::infinity(), 1).norm));  // told, and stops the run
}

}  // namespace
}  // namespace strata::clip_test
