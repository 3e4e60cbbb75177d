// Writes ops into a program: infers output shapes by the kinds' rules, names results, marks stage and block.
#pragma once
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "strata/op_kind.h"

namespace strata {

class Builder {
 public:
  explicit Builder(Program& program) : program_(&program) {}
  Program& program() { return *program_; }
  const Tensor& operator[](TensorId id) const { return (*program_)[id]; }

  // Persistent tensors. A parameter asked for twice under one name is the same one (tied weights); its shape, and the
  // names of its dimensions where both say them, must agree. A parameter without names is whole on every rank but for
  // what strategies split by rows (ZeRO).
  TensorId parameter(std::string_view name, const Shape& shape, Initializer initializer, Dimensions dimensions = {});
  TensorId state(std::string_view name, const Shape& shape, DType dtype, Initializer initializer = {});
  // A host-written f64 {1} tensor that the program reads; plugins set it at run time by name.
  TensorId scalar(std::string_view name);
  // Filled by the data loader before each step.
  TensorId data(std::string_view name, const Shape& shape, DType dtype, Dimensions dimensions = {});
  // Says what the dimensions of an activation are, where strategies are to know: those of the residual stream.
  TensorId name_dimensions(TensorId activation, Dimensions dimensions);

  // Emits one op and returns its only (or first) output.
  TensorId emit(std::string_view kind, std::vector<TensorId> inputs, Attributes attributes = {},
                const Name& result = {});
  // Emits one op with its outputs; `outputs` may name tensors that exist (in-place updates), invalid ids are made new.
  std::vector<TensorId> emit_all(std::string_view kind, std::vector<TensorId> inputs, Attributes attributes = {},
                                 std::vector<TensorId> outputs = {}, const Name& result = {});

  // Adds an addend to output i of the op that made it last (the op emitted last must accumulate there).
  void accumulate_onto(int output, TensorId addend);

  // x + y, where y is a tensor made just before: added by the op that made y where its kind can and nothing has read y,
  // by an op of its own otherwise.
  TensorId add_onto(TensorId x, TensorId y);

  // Names of tensors made while a scope is alive start with "name."
  class Scope {
   public:
    Scope(Builder& builder, std::string_view name, int block = -2);
    ~Scope();
    Scope(const Scope&) = delete;

   private:
    Builder& builder_;
    size_t length_;
    int block_;
  };
  Scope scope(std::string_view name) { return Scope(*this, name); }
  Scope block(std::string_view name, int index) { return Scope(*this, name, index); }

  std::string scoped(std::string_view name) const { return prefix_ + std::string(name); }

  // Marks put on the ops emitted from now on.
  StepPart step_part = StepPart::forward;
  Stream stream = Stream::compute;
  int block_index = -1;
  int microbatch = -1;
  Role role = Role::activation;  // of new results

 private:
  Program* program_;
  std::string prefix_;
};

}  // namespace strata
