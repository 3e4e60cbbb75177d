// Data parallelism whose gradients cross the wire in bf16: a form of exchange as a plugin outside of Strata's tree.
// Each gradient is rounded to bf16, summed over the ranks, and widened again: half the bytes, and a relative error of
// 2⁻⁹ for each rounding. Enable it in place of data_parallel.
#include <strata/plugin.h>

namespace {

using strata::Gradient;
using strata::TensorId;

class Bf16Exchange final : public strata::Plugin {
 public:
  void options(strata::Options& o) override {
    o.add("bucket", bucket_, "gradients that are exchanged together").positive().unit("bytes");
  }

  // `early`: others see gradients only when they are summed. Two plugins that sum them refuse each other.
  strata::Capabilities capabilities() const override {
    return {.provides = {"summed_gradients"}, .conflicts = {"sharded_gradients"}, .early = true};
  }

  void gradients(strata::GradientStage& stage) override {
    if (stage.mesh().size("data") == 1) return;
    strata::Builder& build = stage.build();
    build.role = strata::Role::gradient;
    for (const std::vector<size_t>& bucket : buckets_of(build.program(), stage.gradients(), bucket_.count)) {
      std::vector<TensorId> narrow;
      for (size_t g : bucket) {
        stage.materialize(stage.gradients()[g]);
        narrow.push_back(build.emit("cast", {stage.gradients()[g].tensor}, {{"dtype", "bf16"}}));
      }
      build.stream = strata::Stream::exchange;
      const auto sums = build.emit_all("all_reduce", narrow, {{"axis", "data"}, {"reduction", "sum"}});
      build.stream = strata::Stream::compute;
      for (size_t i = 0; i < bucket.size(); ++i) {
        Gradient& gradient = stage.gradients()[bucket[i]];
        gradient.tensor = build.emit("cast", {sums[i]}, {{"dtype", "f32"}});
        std::erase(gradient.partial, "data");
      }
    }
  }

 private:
  strata::Bytes bucket_{25 << 20};
};

}  // namespace

STRATA_PLUGIN(Bf16Exchange, "bf16_exchange", "1.0.0", "sums gradients over ranks in bf16")
