// Data parallelism: gradients summed over the ranks that see different sequences, in buckets, each as soon as its last
// gradient is final, on the exchange stream beside the rest of the backward pass (Li et al., arXiv 2006.15704).
#include "strata/plugin.h"

namespace {

class DataParallel final : public strata::Plugin {
 public:
  void options(strata::Options& o) override {
    o.add("bucket", bucket_, "gradients that are exchanged together").positive().unit("bytes");
  }

  strata::Capabilities capabilities() const override {
    return {.provides = {"summed_gradients"},
            .conflicts = {{"sharded_gradients",
                           "each gradient would be summed over the ranks twice; leave one of the two out"}},
            .early = true,
            .effect = strata::Effect::reorders()};
  }

  void exchange(strata::ExchangeStage& stage) override {
    for (const strata::Gradient& gradient : stage.gradients()) stage.want(gradient, {.bucket = bucket_.count});
  }

 private:
  strata::Bytes bucket_{25 << 20};
};

}  // namespace

STRATA_PLUGIN(DataParallel, "data_parallel", "1.0.0", "sums gradients over the ranks of the mesh axis data")
