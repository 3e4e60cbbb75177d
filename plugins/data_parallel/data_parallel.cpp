// Data parallelism: gradients summed over the ranks that see different sequences, in buckets, each as soon as its last
// gradient is final, on the exchange stream beside the rest of the backward pass (Li et al., arXiv 2006.15704).
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
    if (stage.mesh().size("data") == 1) return;
    strata::Builder& build = stage.build();
    for (const std::vector<size_t>& bucket : buckets_of(build.program(), stage.gradients(), bucket_.count)) {
      std::vector<TensorId> tensors;
      for (size_t g : bucket) {
        stage.materialize(stage.gradients()[g]);
        tensors.push_back(stage.gradients()[g].tensor);
      }
      build.role = strata::Role::gradient;
      build.stream = strata::Stream::exchange;
      const auto sums = build.emit_all("all_reduce", tensors, {{"axis", "data"}, {"reduction", "sum"}});
      build.stream = strata::Stream::compute;
      for (size_t i = 0; i < bucket.size(); ++i) {
        Gradient& gradient = stage.gradients()[bucket[i]];
        gradient.tensor = sums[i];
        std::erase(gradient.partial, "data");
      }
    }
  }

 private:
  strata::Bytes bucket_{25 << 20};
};

}  // namespace

STRATA_PLUGIN(DataParallel, "data_parallel", "1.0.0", "sums gradients over the ranks of the mesh axis data")
