// One walk from the last op to the first; see drop_unused.h.
#include "engine/program/drop_unused.h"

#include <algorithm>
#include <utility>

#include "strata/op_kind.h"

namespace strata {
namespace {

class Users {
 public:
  explicit Users(const Program& program) : program_(program), used_(program.tensors.size(), false) {}

  void use(TensorId id) {
    for (TensorId at : {id, program_.whole(id)})
      if (at) used_[size_t(at.value)] = true;
  }
  bool used(TensorId id) const { return used_[size_t(id.value)]; }

  bool stays(const Op& op) const {
    // What is sent and received stays: the other rank counts on it.
    if (op.outputs.empty() || op.stream == Stream::send || op.stream == Stream::receive) return true;
    if (op.kind->exchange && op.inputs.empty()) return true;
    return std::any_of(op.outputs.begin(), op.outputs.end(), [&](TensorId id) {
      const TensorId whole = program_.whole(id);
      return used(id) || used(whole) || program_[id].step_output || program_[whole].persistent;
    });
  }

  void use_all(const Op& op) {
    for (const auto* list : {&op.inputs, &op.outputs})
      for (TensorId id : *list) use(id);
    // A resting form may read what the op's results were made of, and more.
    for (TensorId id : op.outputs)
      if (const auto forms = program_.forms.find(id.value); forms != program_.forms.end())
        for (const RestingForm& form : forms->second)
          for (const auto* list : {&form.rest, &form.restore})
            for (const Op& inner : *list)
              for (TensorId input : inner.inputs) use(input);
  }

 private:
  const Program& program_;
  std::vector<char> used_;
};

}  // namespace

void drop_unused(Program& program, const std::vector<TensorId>& wanted, size_t declared) {
  Users users(program);
  for (const auto* list : {&std::as_const(program.losses), &wanted})
    for (TensorId id : *list) users.use(id);
  std::vector<char> stays(program.ops.size(), false);
  for (size_t i = program.ops.size(); i-- > 0;)
    if (users.stays(program.ops[i])) stays[i] = true, users.use_all(program.ops[i]);
  size_t i = 0;
  std::erase_if(program.ops, [&](const Op&) { return !stays[i++]; });
  for (int32_t t = 0; t < int32_t(program.tensors.size()); ++t) {
    const Tensor& tensor = program.tensors[size_t(t)];
    const bool takes_memory = tensor.persistent || tensor.role == Role::data;
    const bool may_go = t < int32_t(declared) || tensor.role == Role::parameter;
    if (may_go && takes_memory && tensor.role != Role::scalar && !users.used({t})) program.drop({t});
  }
}

}  // namespace strata
