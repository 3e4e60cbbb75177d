// See shared_gradients.h.
#include "engine/planning/shared_gradients.h"

#include <algorithm>

namespace strata {
namespace {

TensorId add(Builder& build, TensorId a, TensorId b) {
  const TensorId sum = build.emit("add", {a, b}, {}, build[a].name);
  build.program()[sum].layout = build[a].layout;
  return sum;
}

// Between this rank and others along an axis, tensors like one gradient.
class Exchange {
 public:
  Exchange(GradientStage& stage, const std::string& axis, TensorId gradient)
      : build_(stage.build()), axis_(axis), own_(stage.mesh()[axis].coordinate), like_(stage.build()[gradient]) {}

  void send(TensorId tensor, int to) { build_.emit("send", {tensor}, over(to)); }
  TensorId receive(int from) {
    Attributes attributes = over(from);
    std::string shape;
    for (int64_t size : like_.shape) shape += (shape.empty() ? "" : "x") + std::to_string(size);
    attributes.set("shape", shape);
    attributes.set("dtype", std::string(name_of(like_.dtype)));
    const TensorId received = build_.emit("receive", {}, attributes, like_.name);
    build_.program()[received].layout = like_.layout;
    return received;
  }

 private:
  Attributes over(int other) const { return {{"axis", axis_}, {"offset", int64_t{other} - own_}}; }

  Builder& build_;
  std::string axis_;
  int own_;
  Tensor like_;
};

}  // namespace

SharedByName by_name(const Program& single, const std::vector<SharedParameter>& shared) {
  SharedByName names;
  for (const SharedParameter& one : shared) {
    Gradient of;
    of.parameter = one.parameter;
    if (one.holders.size() > 1) names[parameter_name(single, of)] = one;
  }
  return names;
}

void join_gradients(GradientStage& stage, size_t first_apart, const SharedByName& shared) {
  std::vector<Gradient>& all = stage.gradients();
  Builder& build = stage.build();
  build.role = Role::gradient;
  const auto name_of = [&](const Gradient& gradient) { return parameter_name(build.program(), gradient); };
  const auto end = all.begin() + int64_t(first_apart);
  for (auto more = end; more != all.end(); ++more) {
    const auto one = std::find_if(all.begin(), end, [&](const Gradient& g) { return name_of(g) == name_of(*more); });
    STRATA_CHECK(one != end);
    one->tensor = add(build, one->tensor, more->tensor);
  }
  all.erase(end, all.end());
  for (Gradient& gradient : all) {
    const auto found = shared.find(name_of(gradient));
    if (found == shared.end()) continue;
    const auto& [parameter, axis, holders] = found->second;
    Exchange exchange(stage, axis, gradient.tensor);
    gradient.counts = stage.mesh()[axis].coordinate == holders.front();
    if (gradient.counts) {
      for (size_t h = 1; h < holders.size(); ++h)
        gradient.tensor = add(build, gradient.tensor, exchange.receive(holders[h]));
      for (size_t h = 1; h < holders.size(); ++h) exchange.send(gradient.tensor, holders[h]);
    } else {
      exchange.send(gradient.tensor, holders.front());
      gradient.tensor = exchange.receive(holders.front());
    }
  }
}

}  // namespace strata
