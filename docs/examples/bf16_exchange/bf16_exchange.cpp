// Data parallelism whose gradients cross the wire in bf16: a form of exchange as a plugin outside of Strata's tree.
// Each gradient is rounded to bf16, summed over the ranks, and widened again: half the bytes, and a relative error of
// 2⁻⁹ for each rounding. Enable it in place of data_parallel.
#include <strata/plugin.h>

#include <map>

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
    for (const std::vector<size_t>& bucket : buckets_of(stage.build().program(), stage.gradients(), bucket_.count)) {
      std::map<std::string, std::vector<Gradient*>> by_group;  // "data", unless the mesh splits some parameters over it
      for (size_t g : bucket)
        if (const std::string group = take_data_axes(stage.mesh(), stage.gradients()[g].partial); !group.empty())
          by_group[group].push_back(&stage.gradients()[g]);
      for (const auto& [group, gradients] : by_group) sum(stage, group, gradients);
    }
  }

 private:
  static void sum(strata::GradientStage& stage, const std::string& group, const std::vector<Gradient*>& gradients) {
    strata::Builder& build = stage.build();
    build.role = strata::Role::gradient;
    std::vector<TensorId> narrow;
    for (Gradient* gradient : gradients) {
      stage.materialize(*gradient);
      narrow.push_back(build.emit("cast", {gradient->tensor}, {{"dtype", "bf16"}}));
    }
    const auto sums = build.emit_all("all_reduce", narrow, {{"axis", group}, {"reduction", "sum"}});
    for (size_t i = 0; i < gradients.size(); ++i) {
      const strata::Layout layout = build[gradients[i]->tensor].layout;
      gradients[i]->tensor = build.emit("cast", {sums[i]}, {{"dtype", "f32"}});
      build.program()[gradients[i]->tensor].layout = layout;
    }
  }

  strata::Bytes bucket_{25 << 20};
};

}  // namespace

STRATA_PLUGIN(Bf16Exchange, "bf16_exchange", "1.0.0", "sums gradients over ranks in bf16")
