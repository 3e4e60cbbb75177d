// The pass behind split_program.h: goes through the ops of a program and gives each what it can take. For
// split_program.cpp, which places ops one by one, split_choice.cpp, which chooses how an axis splits one, and
// split_exchanges.cpp, which makes its inputs so.
#pragma once
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "engine/program/sharding.h"
#include "strata/stages.h"

namespace strata {

// Parameters and data as plugins want them split (split_inputs.cpp).
void split_parameters(Program& program, const std::vector<NamedSplit>& splits, const Mesh& mesh);
void split_data(Program& program, const std::vector<NamedSplit>& splits, const Mesh& mesh);

inline std::string in_quotes(const std::string& text) { return "\"" + text + "\""; }
// -1: no dimension has that name.
int named_dimension(const Tensor& tensor, const std::string& name);
std::string ranks_of(const Mesh& mesh, const std::string& axis);  // "the 4 ranks of axis "tensor""

class Splitter {
 public:
  Splitter(Program& program, const std::vector<NamedSplit>& splits, const std::vector<TensorId>& kept,
           const Mesh& mesh);
  void run();

 private:
  bool is_partial(TensorId id) const { return !partial_[size_t(id.value)].empty(); }
  bool is_plain(TensorId id) const { return program_[id].layout.empty() && !is_partial(id); }
  // What has a gradient in the end: numbers that may depend on a parameter.
  bool differentiable(TensorId id) const { return depends_[size_t(id.value)] && program_[id].dtype != DType::i32; }
  // Learns of tensors and ops that came since the last call.
  void track();
  void track(const Op& op);
  // Of a parameter that is whole over an axis: ops whose work the axis splits make gradients that are partial sums, the
  // others whole ones.
  void count_uses(const Op& op);

  void place(Op op);
  // How a tensor crosses between ranks with programs of their own: as its named dimensions are split, which both know.
  Layout of_names(const Tensor& tensor) const;
  void receive_split(TensorId id);
  TensorId as_received(TensorId id, const Op& op);
  // Emits the op on what it can take; true where others took its place.
  bool emit(Op op);
  void replace(const Op& op, const std::string& axis, int size);
  // The addend of an output: into the op again where both are split alike, otherwise by an op of its own.
  void add_back(int output, TensorId result, TensorId addend, bool replaced);
  // What an op has left: named tensors as plugins want them, what is kept whole, and no partial sum that two would sum.
  void settle(TensorId id);
  bool is_loss(TensorId id) const {
    return std::find(program_.losses.begin(), program_.losses.end(), id) != program_.losses.end();
  }
  // Ranks that have tokens of their own keep what those add to a loss: who reports it adds that up (Mesh::counts).
  void settle_loss(TensorId id) const;
  void lay_out(TensorId id, const std::string& axis, int d);
  // A parameter of which some ops make whole gradients and others partial sums: those are summed at once.
  void replicate_parameters();

  // One axis: which factor of the op it splits (-1: none), and inputs that fit.
  int prepare(Op& op, const std::string& axis);
  // Where a partial sum would wait: if what is made of it ends where each rank has a share, the factor that is shared
  // then. It is better summed at once to shares, which is as many bytes, and what lies between is less work.
  int wanted_factor(const Op& op, const Factors& all, const std::string& axis) const;
  bool needs_whole(const Op& op, int factor, const std::string& axis) const;
  bool can_split(const Op& op, const Factors& all, int factor, const std::string& axis) const;
  // Whether a partial sum may go through the op: it is linear in all that are partial sums, and all in which it is are.
  bool stays_partial(const Op& op, const std::string& axis) const;
  // The factor that an axis splits. Parameters are as they are; of activations the most bytes stay where they are.
  int choose(const Op& op, const Factors& all, const std::string& axis) const;
  [[noreturn]] void refuse(const Op& op, TensorId id, const std::string& axis, TensorId other) const;

  // The op that made a tensor makes a new one instead, which is returned; the tensor is to be made of that.
  TensorId displace(TensorId id, const std::string& suffix);
  // An op of the pass's own that makes `result`, which exists, or a new tensor.
  TensorId exchange(std::string_view kind, TensorId from, const std::string& axis, Attributes attributes,
                    const std::string& suffix, TensorId result = {});
  Attributes along(const std::string& axis, int dimension) const {
    return {{"dimension", int64_t(dimension)}, {"size", int64_t(mesh_.size(axis))}};
  }
  // A partial sum is summed: all of it everywhere, or each rank's share along `dimension`.
  void sum(TensorId id, const std::string& axis, int dimension = -1);
  // What a split tensor, or a whole one, is for an op that wants it otherwise; made once.
  TensorId converted(TensorId id, const std::string& kind, const std::string& axis, const Attributes& attributes,
                     const std::string& suffix);
  TensorId gathered(TensorId id, const std::string& axis, bool work_is_split);
  // What ranks have of pairs of chunks comes together in their order.
  void require_contiguous(TensorId id, const Split& split) const;
  // For kinds without a sharding rule.
  TensorId whole(TensorId id, const Op& op);
  // An input that is whole or split, as the op wants it: split along `dimension`, or whole where that is -1.
  TensorId fitted(TensorId id, const std::string& axis, int dimension, bool work_is_split, bool once);

  struct Use {
    size_t op, input;
  };
  struct Uses {
    bool whole = false;
    std::vector<Use> split{};
  };

  Program& program_;
  const std::vector<NamedSplit>& splits_;
  const Mesh& mesh_;
  Builder build_;
  std::vector<char> kept_, depends_;  // by tensor
  std::vector<Op> original_;          // as they were before anything was split
  std::vector<int> uses_;             // by tensor: inputs of those that it is
  std::vector<size_t> reader_;        // by tensor: the last of those ops that reads it
  std::vector<Partial> partial_;
  std::vector<int32_t> producer_;  // by tensor: op of the new list
  size_t tracked_ = 0;             // ops of the new list that have been looked at
  bool counting_ = true;
  std::map<std::pair<int32_t, std::string>, TensorId> made_;  // conversions, by tensor and what is made of it
  std::map<std::pair<int32_t, std::string>, Uses> parameter_uses_;
};

}  // namespace strata
