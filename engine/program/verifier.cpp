// Checks a program after every pass and names the pass that broke it (program.h, verify).
#include <string>

#include "strata/op_kind.h"
#include "strata/program.h"

namespace strata {
namespace {

[[noreturn]] void refuse(const Program& program, size_t index, std::string_view after, const std::string& what) {
  throw Error("the program is not well formed after \"" + std::string(after) + "\": op " + std::to_string(index) +
              " (" + program.ops[index].kind->name + ") " + what + "\n  " + print(program, program.ops[index]));
}

}  // namespace

void verify(const Program& program, std::string_view after) {
  const auto known = [&](TensorId id) { return id.value >= 0 && id.value < int32_t(program.tensors.size()); };
  std::vector<char> written(program.tensors.size());
  for (size_t i = 0; i < program.tensors.size(); ++i) {
    const Tensor& tensor = program.tensors[i];
    written[i] = tensor.persistent || tensor.role == Role::data;
    for (int64_t size : tensor.shape)
      if (size <= 0)
        throw Error("the program is not well formed after \"" + std::string(after) + "\": tensor " + tensor.name +
                    " has shape " + text(tensor.shape) + ".");
  }
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const Op& op = program.ops[i];
    if (!op.kind)
      throw Error("the program is not well formed after \"" + std::string(after) + "\": op " + std::to_string(i) +
                  " has no kind.");
    for (TensorId id : op.outputs)
      if (!known(id))
        throw Error("the program is not well formed after \"" + std::string(after) + "\": op " + std::to_string(i) +
                    " (" + op.kind->name + ") writes a tensor that does not exist.");
    for (TensorId id : op.inputs) {
      if (!id) continue;
      if (!known(id))
        throw Error("the program is not well formed after \"" + std::string(after) + "\": op " + std::to_string(i) +
                    " (" + op.kind->name + ") reads a tensor that does not exist.");
      if (!written[program.whole(id).value])
        refuse(program, i, after, "reads " + program[id].name + " before anything has written it.");
    }
    if (op.accumulate & ~op.kind->accumulates)
      refuse(program, i, after, "is told to accumulate an output that its kind cannot.");
    if (op.addends() > int(op.inputs.size())) refuse(program, i, after, "lacks an addend.");
    const OpView view(program, op);
    std::vector<TensorSpec> specs;
    try {
      specs = op.kind->shape(view);
    } catch (const Error& error) {
      refuse(program, i, after, std::string("breaks its shape rule: ") + error.what());
    }
    if (specs.size() != op.outputs.size())
      refuse(program, i, after,
             "has " + std::to_string(op.outputs.size()) + " outputs, its kind gives " + std::to_string(specs.size()) +
                 ".");
    for (int o = 0; o < view.outputs(); ++o) {
      const Tensor& output = view.output(o);
      if (output.shape != specs[o].shape || output.dtype != specs[o].dtype)
        refuse(program, i, after,
               "writes " + output.name + ", which is " + std::string(name_of(output.dtype)) + text(output.shape) +
                   ", but its kind gives " + std::string(name_of(specs[o].dtype)) + text(specs[o].shape) + ".");
      if (view.accumulates(o)) {
        const Tensor& addend = program[view.addend(o)];
        if (addend.shape != output.shape || addend.dtype != output.dtype)
          refuse(program, i, after,
                 "adds " + addend.name + " " + text(addend.shape) + " to an output of another shape or type.");
      }
      written[op.outputs[o].value] = true;
    }
  }
  for (TensorId loss : program.losses)
    if (!known(loss) || !written[loss.value])
      throw Error("the program is not well formed after \"" + std::string(after) + "\": nothing writes the loss.");
}

}  // namespace strata
