// Data parallelism: gradients summed over the ranks that see different sequences, in buckets, each as soon as its last
// gradient is final, on the exchange stream beside the rest of the backward pass (Li et al., arXiv 2006.15704).
#include <map>

#include "strata/plugin.h"

namespace {

using strata::Gradient;
using strata::TensorId;

class DataParallel final : public strata::Plugin {
 public:
  void options(strata::Options& o) override {
    o.add("bucket", bucket_, "gradients that are exchanged together").positive().unit("bytes");
  }

  strata::Capabilities capabilities() const override {
    return {.provides = {"summed_gradients"}, .requires_ = {}, .conflicts = {"sharded_gradients"}, .early = true};
  }

  void gradients(strata::GradientStage& stage) override {
    strata::Builder& build = stage.build();
    for (const std::vector<size_t>& bucket : buckets_of(build.program(), stage.gradients(), bucket_.count)) {
      std::map<std::string, std::vector<Gradient*>> by_group;
      for (size_t g : bucket)
        if (const std::string group = take_data_axes(stage.mesh(), stage.gradients()[g].partial); !group.empty())
          by_group[group].push_back(&stage.gradients()[g]);
      for (const auto& [group, gradients] : by_group) sum(stage, group, gradients);
    }
  }

 private:
  static void sum(strata::GradientStage& stage, const std::string& group, const std::vector<Gradient*>& gradients) {
    strata::Builder& build = stage.build();
    std::vector<TensorId> tensors;
    for (Gradient* gradient : gradients) {
      stage.materialize(*gradient);
      tensors.push_back(gradient->tensor);
    }
    build.role = strata::Role::gradient;
    const auto sums = build.emit_all("all_reduce", tensors, {{"axis", group}, {"reduction", "sum"}});
    for (size_t i = 0; i < gradients.size(); ++i) {
      build.program()[sums[i]].layout = build[tensors[i]].layout;
      gradients[i]->tensor = sums[i];
    }
  }

  strata::Bytes bucket_{25 << 20};
};

}  // namespace

STRATA_PLUGIN(DataParallel, "data_parallel", "1.0.0", "sums gradients over the ranks of the mesh axis data")
