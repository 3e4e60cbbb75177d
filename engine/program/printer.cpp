// The program as text, for `strata plan --program` and for messages (program.h, print).
#include <cstdio>

#include "strata/op_kind.h"
#include "strata/program.h"

namespace strata {
namespace {

std::string attribute_text(const Attribute& value) {
  if (const auto* integer = std::get_if<int64_t>(&value)) return std::to_string(*integer);
  if (const auto* string = std::get_if<std::string>(&value)) return "\"" + *string + "\"";
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%.6g", std::get<double>(value));
  return buffer;
}

// " [dimension 0 of 61 over tensor]", or nothing.
std::string split_text(const Tensor& tensor) {
  std::string result;
  for (const Split& split : tensor.layout)
    result += (result.empty() ? " [" : ", ") + std::string("dimension ") + std::to_string(split.dimension) + " of " +
              std::to_string(split.full) + " over " + split.axis + (split.pair > 0 ? " in pairs" : "");
  return result.empty() ? result : result + "]";
}

std::string typed(const Program& program, TensorId id) {
  const Tensor& tensor = program[id];
  return "%" + tensor.name + ":" + std::string(name_of(tensor.dtype)) + text(tensor.shape) + split_text(tensor);
}

}  // namespace

std::string print(const Program& program, const Op& op) {
  const OpView view(program, op);
  std::string line;
  for (int i = 0; i < view.outputs(); ++i) line += (i ? ", " : "") + typed(program, op.outputs[i]);
  line += " = " + op.kind->name + "(";
  for (int i = 0; i < view.inputs(); ++i) {
    if (i) line += ", ";
    line += op.inputs[i] ? "%" + program[op.inputs[i]].name : "-";
  }
  for (int i = 0; i < view.outputs(); ++i)
    if (view.accumulates(i)) line += "; output " + std::to_string(i) + " += %" + program[view.addend(i)].name;
  line += ")";
  if (!op.attributes.all().empty()) {
    line += " {";
    bool first = true;
    for (const auto& [name, value] : op.attributes.all()) {
      line += (first ? "" : ", ") + name + " = " + attribute_text(value);
      first = false;
    }
    line += "}";
  }
  line += "  # " + std::string(name_of(op.step_part));
  if (op.stream != Stream::compute) line += ", stream " + std::string(name_of(op.stream));
  if (op.tier != Tier::device) line += ", on the " + std::string(name_of(op.tier));
  if (op.purpose != Purpose::work) line += ", " + std::string(name_of(op.purpose));
  if (op.microbatch >= 0) line += ", microbatch " + std::to_string(op.microbatch);
  if (op.chunk > 0) line += ", chunk " + std::to_string(op.chunk);
  if (op.block >= 0) line += ", block " + std::to_string(op.block);
  return line;
}

std::string print(const Program& program) {
  std::string result;
  for (const Tensor& tensor : program.tensors)
    if (tensor.persistent || tensor.role == Role::data)
      result += "%" + tensor.name + ":" + std::string(name_of(tensor.dtype)) + text(tensor.shape, tensor.dimensions) +
                split_text(tensor) + "  # " + std::string(name_of(tensor.role)) +
                (tensor.persistent ? ", persistent" : "") + "\n";
  for (size_t i = 0; i < program.ops.size(); ++i)
    result += std::to_string(i) + ": " + print(program, program.ops[i]) + "\n";
  return result;
}

}  // namespace strata
