// Stale gradients as a plugin: a form of exchange that sums what ranks kept of an earlier step and keeps this step's.
// So the exchange waits for nothing of the step and hides behind all of it; the update is of gradients that are `steps`
// old.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "strata/plugin.h"

namespace {

using strata::Attributes;
using strata::Binding;
using strata::OpView;
using strata::TensorId;
using strata::TensorSpec;

void copy(const Binding& b, int from, int to) {
  const int64_t bytes = b.output(to).bytes();
  b.threads().split(bytes, 1 << 18, [&](int64_t begin, int64_t end) {
    std::memcpy(b.out<char>(to) + begin, b.in<char>(from) + begin, size_t(end - begin));
  });
}

void add_kind(std::string name, std::string summary, std::function<std::vector<TensorSpec>(const OpView&)> shape,
              std::vector<std::pair<int, int>> in_place, void (*run)(const Binding&)) {
  strata::OpKind kind{.name = std::move(name), .summary = std::move(summary), .shape = std::move(shape)};
  kind.in_place = std::move(in_place);
  kind.half = true;
  kind.cost = [](const OpView& v) { return strata::Cost{.flops = 0, .bytes = 2 * double(v.output(0).bytes())}; };
  const strata::Kernel kernel{[run](const Binding& b) -> strata::Launch { return [run, b] { run(b); }; }};
  kind.kernels = {{"cpu", kernel}, {"reference", kernel}};
  register_kind(std::move(kind));
}

void register_take() {
  add_kind(
      "stale_take", "kept (…) -> a copy of it",
      [](const OpView& v) -> std::vector<TensorSpec> {
        require(v.inputs() == 1 && v.has_input(0), v, "one tensor");
        return {{v.input(0).shape, v.input(0).dtype}};
      },
      {}, [](const Binding& b) { copy(b, 0, 0); });
}

void register_keep() {
  add_kind(
      "stale_keep",
      "gradient (…), kept of its shape and type, [overflow f64 (1)] -> kept: the gradient, unless it overflowed",
      [](const OpView& v) -> std::vector<TensorSpec> {
        require(v.inputs() == 3 && v.has_input(0) && v.has_input(1) && v.input(0).shape == v.input(1).shape &&
                    v.input(0).dtype == v.input(1).dtype,
                v, "a gradient, and one of its shape and type");
        return {{v.input(1).shape, v.input(1).dtype}};
      },
      {{0, 1}},
      [](const Binding& b) {
        if (b.has_input(2) && std::isnan(*b.in<double>(2))) {
          if (b.out<char>(0) != b.in<char>(1)) copy(b, 1, 0);
          return;
        }
        copy(b, 0, 0);
      });
}

class Stale final : public strata::Plugin {
 public:
  Stale() {
    static const bool once = (register_take(), register_keep(), true);
    (void)once;
  }

  void options(strata::Options& o) override {
    o.add("steps", steps_, "how old the gradients are that an update is of").positive().unit("steps");
  }

  strata::Capabilities capabilities() const override {
    return {.provides = {"form of gradients", "feedback *.stale.*"},
            .conflicts = {{"reproducible sums",
                           "one rank exchanges nothing, so nothing is late there, and on several ranks updates are by "
                           "gradients of an earlier step; leave one of the two out"}},
            .effect = strata::Effect::lossy(0.2)};
  }

  void exchange(strata::ExchangeStage& stage) override {
    if (stage.mesh().size(strata::kDataAxis) == 1) stage.note("it does nothing on one rank.");
    if (steps_ > kMost)
      throw strata::Error("steps = " + std::to_string(steps_) + "; each keeps a gradient of every parameter: at most " +
                          std::to_string(kMost) + ".");
    delayed_.clear();
    for (const strata::Gradient& gradient : stage.gradients())
      stage.form(gradient,
                 {.name = "stale", .exchange = [this](auto& bucket) { return delay(bucket); }, .needs_finite = true});
  }

 private:
  static constexpr int64_t kMost = 16;

  // A gradient that is summed over one axis after the other is late once.
  std::vector<TensorId> delay(strata::GradientBucket& bucket) {
    strata::Builder& build = bucket.build();
    std::vector<TensorId> oldest;
    std::vector<std::vector<TensorId>> kept(bucket.size());  // newest first
    for (size_t i = 0; i < bucket.size(); ++i) {
      const strata::Tensor gradient = build[bucket.gradient(i)];
      if (!delayed_.insert(bucket.parameter(i)).second) {
        oldest.push_back(bucket.gradient(i));
        continue;
      }
      for (int64_t age = 1; age <= steps_; ++age)
        kept[i].push_back(bucket.state(i, "stale." + std::to_string(age), gradient.shape, {.dtype = gradient.dtype}));
      build.role = strata::Role::gradient;
      oldest.push_back(build.emit("stale_take", {kept[i].back()}));
      build.program()[oldest.back()].layout = gradient.layout;
    }
    const std::vector<TensorId> sums = bucket.sum(oldest);
    for (size_t i = 0; i < bucket.size(); ++i)
      for (size_t age = kept[i].size(); age-- > 0;)
        build.emit_all("stale_keep",
                       {age > 0 ? kept[i][age - 1] : bucket.gradient(i), kept[i][age], bucket.overflow(i)}, {},
                       {kept[i][age]});
    return sums;
  }

  int64_t steps_ = 1;
  std::set<std::string> delayed_;  // parameters, of the program that is planned
};

}  // namespace

STRATA_PLUGIN(Stale, "stale", "1.0.0", "updates by the summed gradients of an earlier step, exchanged behind this one")
