// How gradients are summed over ranks. Of each sum a *result* is wanted (all of it on every rank, or each rank's share)
// and a *form* makes it: what goes over the wire. Plugins set one or the other in stage `exchange`, and neither knows
// the other; the engine emits the exchanges, in buckets, as soon as the gradients of a bucket are final.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "strata/builder.h"
#include "strata/mesh.h"
#include "strata/phases.h"

namespace strata {

// Sizes of the batch, known from [data] before the model is built.
struct BatchShape {
  int64_t micro_batch = 1;      // sequences in one microbatch (B)
  int64_t microbatches = 1;     // microbatches in one optimizer step of this rank
  int64_t sequence_length = 1;  // tokens in one sequence (T)
  bool reproducible = false;    // sums do not depend on the layout
  int64_t ranks = 1;            // that see other sequences of the same step
  bool weighted = false;        // targets may be below 0, which do not count: kLossWeight makes up for it
  // Sequences hold several documents: data "document_starts" i32 (B, T) says of each token at which place of its
  // sequence its document begins. Attention keeps to a document, and its positions count from there.
  bool packed = false;
  int64_t sequences() const { return micro_batch * microbatches * ranks; }  // of one step, all ranks
};

// A parameter's gradient, complete over all microbatches. `scale` is a pending factor (f64 {1}) that update kernels
// multiply in as they read, so that scaling costs no pass over memory; invalid means 1.
// A scale that is NaN says that the step overflowed: update kernels then change nothing (loss scaling skips a step).
struct Gradient {
  TensorId parameter;
  TensorId tensor;
  TensorId scale;
  // Axes of the mesh's grid over which it is still to be summed. Its layout is its parameter's; who sums over an axis,
  // or leaves each rank its share of the sum, takes that axis out and changes no other.
  std::vector<std::string> partial;
  // Whether it counts in what is made of all gradients; a rank with another program may hold the parameter, too, and
  // count it (SharedParameter).
  bool counts = true;
};
// Takes axes that split the batch out of `partial` and returns the name of a group that sums over them: "data" for all
// of them, or one; "" when there is nothing to sum (any more).
std::string take_data_axes(const Mesh& mesh, std::vector<std::string>& partial);

// The name under which the model declared the gradient's parameter, also where the gradient or the parameter is one
// rank's part (ZeRO) or the parameter is a master of mixed precision. Ask while planning, and hand it to an op as an
// attribute: the tensors that an op gets in the end may be copies with names of their own.
std::string parameter_name(const Program& program, const Gradient& gradient);

// Gradients in the order in which they become final, cut into groups of at least `bytes` (but for the last).
std::vector<std::vector<size_t>> buckets_of(const Program& program, const std::vector<Gradient>& gradients,
                                            int64_t bytes);

// What is wanted of the sum of a gradient over the ranks of an axis.
struct GradientResult {
  // Empty: the whole sum, on every rank. An axis of the mesh's grid that does not split the parameter, or
  // kShardExpertAxis where neither of both does: each of its ranks gets its share of the rows (a split of dimension 0,
  // the last of the layout), and that part of the parameter is what it updates.
  std::string shared_over{};
  // Of each microbatch as soon as it is made, so that only results accumulate; otherwise once a step.
  bool each_microbatch = false;
  int64_t bucket = 25 << 20;  // bytes that are exchanged together, at least
};

// What a form remembers of a gradient from step to step.
struct FormState {
  DType dtype = DType::f32;
  // For each dimension of the state the one of the gradient that it is split as, or kNone. Empty: it has the gradient's
  // shape.
  std::vector<int> follows{};
  static constexpr int kNone = -1;
  // The ranks that the gradient is summed over have the same; otherwise each has its own.
  bool alike = false;
  Initializer initializer{};
};

// Gradients that are exchanged together over one axis, as a form sees them.
class GradientBucket {
 public:
  GradientBucket(Builder& builder, const Mesh& mesh, std::string axis, bool shares)
      : build_(builder), mesh_(mesh), axis_(std::move(axis)), shares_(shares) {}
  Builder& build() { return build_; }
  const Mesh& mesh() const { return mesh_; }
  const std::string& axis() const { return axis_; }  // whose ranks' gradients are summed
  // Whether each rank of the axis is to have its share of the rows of each sum, or all of it.
  bool shares() const { return shares_; }

  size_t size() const { return gradients_.size(); }
  TensorId gradient(size_t i) const { return gradients_.at(i); }              // what this rank adds to the sum
  const std::string& parameter(size_t i) const { return parameters_.at(i); }  // parameter_name of it
  // Only of forms that need finite values, and only where there is loss scaling: an f64 {1} tensor that is NaN in a
  // step that overflowed on any rank and 1 in any other. Gradients are NaN then, and what the form remembers from step
  // to step must stay as it is.
  TensorId overflow(size_t i) const { return overflow_.at(i); }

  // A persistent tensor for gradient(i), named after its parameter, `name` and the axis. It may be offloaded, is saved
  // with what each rank has of it, and begins anew (Lasting) where a checkpoint has none of as many ranks.
  TensorId state(size_t i, std::string_view name, const Shape& shape, const FormState& state = {});

  // The engine's own exchange: full sums over the axis of tensors, in their types, all of each or this rank's share of
  // its rows as wanted. One exchange, of any number of tensors of one type.
  std::vector<TensorId> sum(const std::vector<TensorId>& tensors);
  // Emits a kind that works element by element; its result is split as its first input is.
  TensorId emit(std::string_view kind, const std::vector<TensorId>& inputs, Attributes attributes = {});

 private:
  friend class GradientExchanges;
  Builder& build_;
  const Mesh& mesh_;
  std::string axis_;
  bool shares_;
  std::vector<TensorId> gradients_, overflow_;
  std::vector<std::string> parameters_;
  std::vector<std::vector<std::string>> partial_;  // by gradient: axes over which it is not summed yet
};

// What goes over the wire. A plain value: a name for messages, and a function that emits the ops of one bucket and
// returns for each gradient its result: the sum, of the gradient's type, all rows of it or this rank's share of them.
struct ExchangeForm {
  std::string name;
  std::function<std::vector<TensorId>(GradientBucket&)> exchange;
  // Gradients must be unscaled and known to be finite, since the form remembers something of them. With loss scaling
  // such a form is used once a step, after the gradients of all ranks have been looked at.
  bool needs_finite = false;
};

// stage `exchange`: how each gradient is summed over ranks. For training alone; called when the backward pass of one
// microbatch has been made.
class ExchangeStage {
 public:
  ExchangeStage(const Program& program, BatchShape batch, const Mesh& mesh, const std::vector<Gradient>& gradients,
                Phases phases = {})
      : program_(program), batch_(batch), mesh_(mesh), gradients_(gradients), phases_(std::move(phases)) {}
  const Program& program() const { return program_; }  // of one microbatch
  const BatchShape& batch() const { return batch_; }
  const Mesh& mesh() const { return mesh_; }
  const Phases& phases() const { return phases_; }  // that the program is for
  const std::vector<Gradient>& gradients() const { return gradients_; }

  // Of the sum of a gradient over an axis (or all parts of `data`). A second result for one gradient and axis is an
  // Error, as is a second form; it names both plugins. What is not partial over the axis is not exchanged.
  void want(const Gradient& gradient, const GradientResult& result, std::string_view axis = kDataAxis);
  // Without one, gradients cross as they are (full precision). What a plugin says of one name is one form: gradients
  // of it are exchanged together.
  void form(const Gradient& gradient, const ExchangeForm& form, std::string_view axis = kDataAxis);
  // The gradient is not summed over the axis, whatever is wanted of it there: its ranks train apart, each by the
  // gradient of its own sequences' mean loss, and parameters and states differ by rank (Lasting::own_over) but for
  // those that say `alike`. Who leaves gradients brings parameters together, in stage update; all in each program of a
  // run, and over one axis. Where the axis has one rank, nothing happens.
  void leave(const Gradient& gradient, std::string_view axis);
  // Something that users should know of the plan: that the plugin does nothing here, and why. Told once.
  void note(std::string text);

 private:
  friend class GradientExchanges;
  struct Wanted {
    GradientResult result;
    std::string axis, by;  // `by`: the plugin
  };
  struct Formed {
    size_t form;  // in forms_
    std::string by;
  };
  struct Left {
    std::string axis, by;
  };
  const Program& program_;
  BatchShape batch_;
  const Mesh& mesh_;
  const std::vector<Gradient>& gradients_;
  Phases phases_;
  std::string plugin_;  // whose turn it is
  std::vector<ExchangeForm> forms_;
  std::map<std::pair<std::string, std::string>, size_t> form_named_;  // by plugin and name
  std::map<std::string, std::map<std::string, Wanted>> wanted_;       // by parameter and axis of the grid
  std::map<std::string, std::map<std::string, Formed>> formed_;
  std::map<std::string, Left> left_;  // by parameter
  std::vector<std::string> notes_;
};

}  // namespace strata
