// The program of one optimizer step on one rank: a flat list of ops over tensors, known before the first step runs.
// Plain data: built by Builder, rewritten by plugins, checked by the verifier, then planned and never changed.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "strata/tensor.h"

namespace strata {

struct OpKind;

// Hardware queues; ops on one stream run in program order, streams run side by side. Exchanges have four, so that none
// waits behind another of a different class: over the axes that split the batch (exchange), over any other axis
// (model_exchange), and both ways between two ranks.
enum class Stream : uint8_t { compute, host, to_device, to_host, read, write, exchange, model_exchange, send, receive };
inline constexpr int kStreams = 10;
inline bool is_exchange(Stream stream) { return stream >= Stream::exchange; }
std::string_view name_of(Stream);

// Parts of the step, in order. The step loop calls plugins at the start and end of each.
enum class StepPart : uint8_t { load, forward, backward, reduce, update, publish };
std::string_view name_of(StepPart);

// Why an op is there: the model and its update, or residency: making a resting form, and restoring from it. `again`:
// to make something anew that was made too early (Program::again_if).
enum class Purpose : uint8_t { work, rest, restore, again };
std::string_view name_of(Purpose);

using Attribute = std::variant<int64_t, double, std::string>;

// A few named constants of an op, shared by its copies until one of them is changed. Asking for one that is not there,
// or as another type, is an internal error.
class Attributes {
 public:
  using List = std::vector<std::pair<std::string, Attribute>>;
  Attributes() = default;
  Attributes(std::initializer_list<std::pair<std::string, Attribute>> values) : values_(values) {}
  bool has(std::string_view name) const;
  int64_t integer(std::string_view name, std::optional<int64_t> otherwise = {}) const;
  double real(std::string_view name, std::optional<double> otherwise = {}) const;  // accepts an integer too
  std::string string(std::string_view name) const;
  void set(std::string_view name, Attribute value);
  const List& all() const { return values_; }
  bool is_same(const Attributes& other) const { return values_.is_same(other.values_); }  // shared, not only equal

 private:
  SharedVector<std::pair<std::string, Attribute>> values_;
};

// One operation. An invalid TensorId among the inputs is an optional input left out. A tensor that is both input
// and output is updated in place; all other outputs are written whole.
struct Op {
  const OpKind* kind = nullptr;
  TensorIds inputs{};
  TensorIds outputs{};
  Attributes attributes{};
  Stream stream = Stream::compute;
  Tier tier = Tier::device;  // where its operands are: host for updates beside offloaded states
  Purpose purpose = Purpose::work;
  StepPart step_part = StepPart::forward;
  int block = -1;       // transformer block, or -1 outside of blocks
  int microbatch = -1;  // -1 for ops that run once a step
  int16_t chunk = -1;   // of blocks (ScheduleStage::chunks); set by the engine once the schedule is known
  // Bit i: output i is added to an addend. The addends are the last inputs, in the order of the bits.
  uint16_t accumulate = 0;
  int addends() const { return __builtin_popcount(accumulate); }
};
static_assert(sizeof(Op) == 80);  // a program has millions

struct OpId {
  int32_t value = -1;
  auto operator<=>(const OpId&) const = default;
};

// How a tensor rests between two uses, and how it becomes usable again: the mechanism of all memory strategies but the
// movement between tiers (Tensor::nearest, farthest), which the planner adds by itself. Plain data: ops over tensors of
// the program, not in its list yet.
struct RestingForm {
  // Without being asked for by a budget: between forward and backward pass, or wherever ops of another block come
  // between two uses; `unless_budget`: that, but with a budget only as it asks.
  enum class When : uint8_t { asked, after_forward, between_blocks, unless_budget };
  std::string name;           // "recompute", "sparse": for reports
  std::vector<Op> rest{};     // make what is kept from the tensor when it is given up; empty: nothing is kept
  std::vector<Op> restore{};  // write the tensor again, from what `rest` made and from tensors of the program
  When when = When::after_forward;
  // Whether that writes the bits that were given up. Where not, tensors rest so whatever it saves: what a rank computes
  // is not to hang on its shapes.
  bool exact = true;
};

struct Program {
  std::vector<Tensor> tensors;
  std::vector<Op> ops;
  std::unordered_map<int32_t, SharedVector<RestingForm>>
      forms;  // by tensor; the planner takes the cheapest that will do, and leaves none
  std::vector<std::string> storage_directories;  // of the NVMe tier, best one a disk; empty: there is none
  bool direct_storage = false;                   // the device reads and writes there without the host's memory
  bool one_memory = false;       // device and host are one: what lies on the device the host's stream reaches too
  int64_t storage_limit = 0;     // bytes the NVMe tier may take; 0: what is free
  std::vector<TensorId> losses;  // one {1} tensor a microbatch; the step's loss is their sum
  // A persistent f64 {1} scalar: where it is 0 the ops of purpose `again`, which come after the op that writes it, do
  // nothing. Invalid: there are none.
  TensorId again_if{};

  // A copy without ops and forms.
  static Program with_tensors_of(const Program& other);

  const Tensor& operator[](TensorId id) const { return tensors.at(id.value); }
  Tensor& operator[](TensorId id) { return tensors.at(id.value); }
  TensorId add(Tensor tensor);  // names are made unique
  // A part of `whole`: `shape` from `offset` bytes on.
  TensorId add_part(TensorId whole, Name name, Shape shape, int64_t offset);
  TensorId find(const Name& name) const;              // invalid when there is none
  void rename(TensorId id, const std::string& name);  // to a name that no tensor has
  void drop(TensorId id);  // a tensor that nothing uses: loses its name and takes no memory; other ids stay
  // The tensor whose memory this one lies in: itself, unless it is a part.
  TensorId whole(TensorId id) const {
    return id && tensors[size_t(id.value)].part_of ? tensors[size_t(id.value)].part_of : id;
  }
  // Persistent tensors of a role, parts left out, in the order they were declared.
  std::vector<TensorId> with_role(Role role) const;

 private:
  std::unordered_map<std::string, int32_t> names_;
};

// The program as text, one line a tensor or op: what `strata plan --program` shows.
std::string print(const Program& program);
std::string print(const Program& program, const Op& op);

class Mesh;

// Throws Error naming `after` (the pass or plugin that ran last) when the program is not well formed. What it checks:
// - ids, arity and addends are right; shapes and dtypes are those the kinds infer;
// - every tensor is written before it is read, and what lives within the step once; only persistent tensors (and their
//   copies on other tiers) are updated in place; nothing writes data;
// - dimensions have no names, or one each, and hold whole numbers of their units;
// - parts lie within their whole; splits are of dimensions that exist and within the full size, and with a mesh each is
//   the share of the mesh's rank;
// - exchanges are on the stream of their class and name an axis, with a mesh one of several ranks; nothing else is
//   there; what they make is split as their kinds say;
//   streams that move bytes hold moves between the tiers of their name, the host's ops whose operands are on the host
//   (or where the two are one memory);
//   nothing but a move touches the NVMe tier;
// - the ops of resting forms are well formed, and restoring writes the tensor.
void verify(const Program& program, std::string_view after, const Mesh* mesh = nullptr);

}  // namespace strata
