// Offload to host memory and NVMe (ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857): says which
// tensors may rest on which tiers. When they move, and where updates run, is the residency planner's decision.
#include <algorithm>

#include "strata/plugin.h"

namespace {

using strata::Error;
using strata::Role;
using strata::StepPart;
using strata::Tensor;
using strata::TensorId;
using strata::Tier;

class Offload final : public strata::Plugin {
 public:
  void options(strata::Options& o) override {
    const std::vector<std::string> tiers = {"device", "host", "nvme"};
    o.add("optimizer", optimizer_, "where optimizer states rest").choices(tiers);
    o.add("gradients", gradients_, "where gradients rest between backward pass, reduction and update").choices(tiers);
    o.add("parameters", parameters_, "where parameters rest between uses").choices(tiers);
    o.add("activations", activations_, "where activations rest between forward and backward pass").choices(tiers);
    o.add("directory", directory_, "folder on the NVMe disk; needed when something rests on nvme").per_rank();
    o.add("space", space_, "most the files there may take; 0: what is free").non_negative().unit("bytes");
    o.add("host_fraction", host_fraction_,
          "share of the bytes bound for nvme that stays in host memory; -1: what fits host.memory (all go to nvme when "
          "that is not set)")
        .range(-1, 1);
    o.add("device_fraction", device_fraction_,
          "share of the bytes of states and parameters that is not offloaded at all")
        .range(0, 1);
    o.add("minimum", minimum_, "smaller tensors stay where they are").non_negative().unit("bytes");
  }

  strata::Capabilities capabilities() const override {
    return {.provides = {"lowers optimizer_state", "lowers gradients", "lowers parameters", "lowers activations"},
            .effect = strata::Effect::exact()};
  }

  void placement(strata::ProgramStage& stage) override {
    strata::Program& program = stage.program;
    const bool nvme = optimizer_ == "nvme" || gradients_ == "nvme" || parameters_ == "nvme" || activations_ == "nvme";
    if (nvme && directory_.empty())
      throw Error("something is to rest on nvme, but plugins.offload.directory is not set; name a folder on the disk.");
    if (nvme) program.storage_directory = directory_;
    program.storage_limit = space_.count;
    spread(program, Role::optimizer_state, optimizer_);
    spread(program, Role::parameter, parameters_);
    std::vector<char> crosses(program.tensors.size(), false), is_gradient(program.tensors.size(), false);
    mark(program, crosses, is_gradient);
    for (size_t t = 0; t < program.tensors.size(); ++t) {
      Tensor& tensor = program.tensors[t];
      if (tensor.persistent || tensor.step_output || tensor.bytes() < minimum_.count) continue;
      if (is_gradient[t])
        rest(tensor, gradients_);
      else if (crosses[t] && tensor.role == Role::activation)
        rest(tensor, activations_);
    }
  }

 private:
  static Tier tier_of(const std::string& name) {
    return name == "device" ? Tier::device : name == "host" ? Tier::host : Tier::nvme;
  }

  void rest(Tensor& tensor, const std::string& where) const {
    tensor.farthest = tier_of(where);
    tensor.nearest = tensor.farthest == Tier::nvme && host_fraction_ < 0 ? Tier::host : tensor.farthest;
  }

  // Persistent tensors of a role, in the order declared: the device's share, the host's, and the rest.
  void spread(strata::Program& program, Role role, const std::string& where) const {
    if (where == "device") return;
    double all = 0, passed = 0;
    for (TensorId id : program.with_role(role)) all += double(program[id].bytes());
    const double host = where == "nvme" && host_fraction_ > 0 ? host_fraction_ : 0;
    for (TensorId id : program.with_role(role)) {
      Tensor& tensor = program[id];
      passed += double(tensor.bytes());
      if (tensor.bytes() < minimum_.count || passed <= device_fraction_ * all) continue;
      rest(tensor, passed <= (device_fraction_ + (1 - device_fraction_) * host) * all ? "host" : where);
    }
  }

  // Tensors that go from the forward to the backward pass, and those that become gradients of parameters.
  static void mark(const strata::Program& program, std::vector<char>& crosses, std::vector<char>& is_gradient) {
    std::vector<char> forward(program.tensors.size(), false);
    for (const strata::Op& op : program.ops) {
      for (TensorId id : op.inputs)
        if (id && op.step_part == StepPart::backward && forward[id.value]) crosses[id.value] = true;
      for (TensorId id : op.outputs) {
        if (op.step_part == StepPart::forward) forward[id.value] = true;
        if (program[id].role == Role::gradient) is_gradient[id.value] = true;
      }
    }
    for (const auto& [tensor, forms] : program.forms)  // also what only restoring others reads
      for (const strata::RestingForm& form : forms)
        for (const strata::Op& op : form.restore)
          for (TensorId id : op.inputs)
            if (id && forward[id.value]) crosses[id.value] = true;
  }

  std::string optimizer_ = "device", gradients_ = "device", parameters_ = "device", activations_ = "device", directory_;
  strata::Bytes space_, minimum_{64 << 10};
  double host_fraction_ = -1, device_fraction_ = 0;
};

}  // namespace

STRATA_PLUGIN(Offload, "offload", "1.0.0",
              "rests states, gradients, parameters and activations in host memory or on NVMe")
