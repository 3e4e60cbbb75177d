// Hogwild as a plugin (Niu et al., arXiv 1106.5730): the ranks of a host have one memory of parameters, and each
// updates it by the gradients of its own sequences without waiting for the others. Asks for that memory, and leaves
// gradients to each rank; the updates are the optimizer's as they are.
#include "strata/plugin.h"

namespace {

using strata::Program;
using strata::Role;
using strata::TensorId;

const std::string kAxis{strata::kDataAxis};
constexpr const char* kOther =
    "what the ranks that divide a model have alike would be in several memories, updated in another order in each; "
    "leave "
    "one of the two out";

class Hogwild final : public strata::Plugin {
 public:
  strata::Capabilities capabilities() const override {
    return {.provides = {"summed_gradients", "ranks apart", "left to chance"},
            .requires_ = {"optimizer"},
            .conflicts = {{"reproducible sums",
                           "whose update comes first is left to chance, and no two runs are the same; leave one of the "
                           "two out"},
                          {"ranks apart", "each has ranks train apart in its own way; leave one of the two out"},
                          {"sharded_gradients",
                           "all ranks update all of the parameters that they have one memory of, and the other gives "
                           "each a share; leave one of the two out"},
                          {"form of gradients",
                           "gradients of ranks that have one memory of parameters do not cross, in whatever form; "
                           "leave one of the two out"},
                          {"splits over pipeline",
                           "stages wait for each other in every step, which the other is to avoid; leave one of the "
                           "two out"},
                          {"splits over tensor", kOther},
                          {"splits over sequence", kOther}},
            .effect = strata::Effect::lossy(0.3)};
  }

  void exchange(strata::ExchangeStage& stage) override {
    if (stage.mesh().size(kAxis) == 1)
      stage.note("it does nothing here: axis \"" + kAxis + "\" of the mesh has one rank.");
    else
      stage.note(
          "ranks update one memory of parameters without waiting for each other, so no two runs are the same to the "
          "bit, nor is one that is resumed.");
    for (const strata::Gradient& gradient : stage.gradients()) stage.leave(gradient, kAxis);
  }

  // Masters of working copies, where there are any.
  void update(strata::UpdateStage& stage) override {
    if (stage.mesh().size(kAxis) == 1) return;
    Program& program = stage.build().program();
    for (const strata::Gradient& gradient : stage.gradients()) share(program, program.whole(gradient.parameter));
  }

  void placement(strata::ProgramStage& stage) override {
    if (stage.mesh.size(kAxis) == 1) return;
    for (TensorId id : stage.program.with_role(Role::parameter)) share(stage.program, id);
  }

 private:
  static void share(Program& program, TensorId id) {
    program[id].lasting.change([](strata::Lasting& lasting) {
      lasting.alike = true;
      lasting.one_memory_over = kAxis;
    });
  }
};

}  // namespace

STRATA_PLUGIN(Hogwild, "hogwild", "1.0.0", "ranks of a host update one memory of parameters without waiting")
