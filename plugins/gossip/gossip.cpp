// Gossip as a plugin (D-PSGD, Lian et al., arXiv 1705.09056): ranks of an axis train apart, each on the mean of its own
// parameters and those of its neighbours in a ring. What neighbours send is what they had when the step began, so the
// exchange hides behind the step.
#include <algorithm>

#include "strata/plugin.h"

namespace {

using strata::Binding;
using strata::DType;
using strata::OpView;
using strata::Role;
using strata::TensorId;
using strata::TensorSpec;

void register_mix() {
  strata::OpKind kind{.name = "gossip_mix", .summary = "own f32 (…), one or two of its shape -> own: their mean"};
  kind.in_place = {{0, 0}};
  kind.shape = [](const OpView& v) -> std::vector<TensorSpec> {
    bool right = v.inputs() == 2 || v.inputs() == 3;
    for (int i = 0; right && i < v.inputs(); ++i)
      right = v.has_input(i) && v.input(i).dtype == DType::f32 && v.input(i).shape == v.input(0).shape;
    require(right, v, "two or three f32 tensors of one shape");
    return {{v.input(0).shape, DType::f32}};
  };
  kind.cost = [](const OpView& v) {
    const double bytes = double(v.input(0).bytes());
    return strata::Cost{.flops = bytes / 4 * v.inputs(), .bytes = bytes * (v.inputs() + 1)};
  };
  const strata::Kernel kernel{[](const Binding& b) -> strata::Launch {
    return [b] {
      const bool two = b.inputs() == 3;
      const float *own = b.in<float>(0), *before = b.in<float>(1), *behind = two ? b.in<float>(2) : nullptr;
      float* mean = b.out<float>(0);
      b.threads().split(strata::elements(b.input(0).shape), 4096, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          mean[i] = two ? (own[i] + before[i] + behind[i]) / 3 : (own[i] + before[i]) / 2;
      });
    };
  }};
  kind.kernels = {{"cpu", kernel}, {"reference", kernel}};
  register_kind(std::move(kind));
}

class Gossip final : public strata::Plugin {
 public:
  Gossip() {
    static const bool once = (register_mix(), true);
    (void)once;
  }

  void options(strata::Options& o) override {
    o.add("every", every_, "steps from one exchange to the next").positive().unit("steps");
    o.add("axis", axis_, "whose ranks are the ring: all that see different sequences, or groups of them")
        .choices({"data", "replicate"});
    o.add("bucket", bucket_, "parameters that are exchanged together").positive().unit("bytes");
  }

  // Early: neighbours are mixed in before the optimizer updates.
  strata::Capabilities capabilities() const override {
    return {.provides = {"summed_gradients", "ranks apart"},
            .conflicts = {{"reproducible sums",
                           "ranks that train apart learn other things than one rank; leave one of the two out"},
                          {"ranks apart", "each has ranks train apart in its own way; leave one of the two out"}},
            .early = true,
            .effect = strata::Effect::lossy(0.2)};
  }

  void phases(strata::PhaseStage& stage) override {
    if (every_ > 1) stage.declare(kPhase, {.first = every_, .every = every_});
  }

  void exchange(strata::ExchangeStage& stage) override {
    if (stage.mesh().size(axis_) == 1)
      stage.note("it does nothing here: axis \"" + axis_ + "\" of the mesh has one rank.");
    for (const strata::Gradient& gradient : stage.gradients()) stage.leave(gradient, axis_);
  }

  void update(strata::UpdateStage& stage) override {
    const int ranks = stage.mesh().size(axis_);
    if (ranks == 1 || (every_ > 1 && !stage.phases().in(kPhase))) return;
    strata::Builder& build = stage.build();
    std::vector<TensorId> bucket;
    int64_t room = bucket_.count;
    for (const strata::Gradient& gradient : stage.gradients()) {
      bucket.push_back(gradient.parameter);
      room -= build[gradient.parameter].bytes();
      if (room <= 0) mix(build, bucket, ranks), bucket.clear(), room = bucket_.count;
    }
    if (!bucket.empty()) mix(build, bucket, ranks);
  }

 private:
  static constexpr const char* kPhase = "gossip: exchange";

  void mix(strata::Builder& build, const std::vector<TensorId>& own, int ranks) const {
    build.role = Role::workspace;
    std::vector<std::vector<TensorId>> neighbours;
    for (const int64_t offset : {1, -1})
      if (offset == 1 || ranks > 2)
        neighbours.push_back(
            build.emit_all("shift", own, {{"axis", axis_}, {"offset", offset}, {"size", int64_t(ranks)}}));
    for (size_t i = 0; i < own.size(); ++i) {
      std::vector<TensorId> inputs{own[i]};
      for (const std::vector<TensorId>& of : neighbours) {
        inputs.push_back(of[i]);
        build.program()[of[i]].layout = build[own[i]].layout;
      }
      build.emit_all("gossip_mix", inputs, {}, {own[i]});
    }
  }

  int64_t every_ = 1;
  std::string axis_{strata::kDataAxis};
  strata::Bytes bucket_{25 << 20};
};

}  // namespace

STRATA_PLUGIN(Gossip, "gossip", "1.0.0", "D-PSGD: ranks train apart and average parameters with neighbours in a ring")
