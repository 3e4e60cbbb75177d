// Gradients that cross the wire in bf16: a form of exchange as a plugin outside of Strata's tree. Each gradient is
// rounded to bf16, summed over the ranks, and widened again: half the bytes, and a relative error of 2⁻⁹ for each
// rounding. Enable it beside data_parallel or zero, which say what is wanted of the sums.
#include <strata/plugin.h>

namespace {

using strata::TensorId;

class Bf16Exchange final : public strata::Plugin {
 public:
  void exchange(strata::ExchangeStage& stage) override {
    for (const strata::Gradient& gradient : stage.gradients())
      if (stage.program()[gradient.tensor].dtype == strata::DType::f32)
        stage.form(gradient, {.name = "bf16", .exchange = in_bf16});
  }

 private:
  static std::vector<TensorId> in_bf16(strata::GradientBucket& bucket) {
    std::vector<TensorId> narrow, wide;
    for (size_t i = 0; i < bucket.size(); ++i)
      narrow.push_back(bucket.emit("cast", {bucket.gradient(i)}, {{"dtype", "bf16"}}));
    for (TensorId sum : bucket.sum(narrow)) wide.push_back(bucket.emit("cast", {sum}, {{"dtype", "f32"}}));
    return wide;
  }
};

}  // namespace

STRATA_PLUGIN(Bf16Exchange, "bf16_exchange", "1.0.0", "gradients cross between ranks in bf16")
