// Tensors as planning sees them: a name, a shape, a type and a role; no storage.
// Storage appears only when a plan has been bound to a device (op_kind.h, Binding).
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "strata/shared.h"

namespace strata {

enum class DType : uint8_t { f32, f64, bf16, f16, i32, u8 };
int64_t size_of(DType);  // bytes of one element
std::string_view name_of(DType);

// Row-major, the last dimension is contiguous. {} is not used: a scalar has shape {1}.
using Shape = std::vector<int64_t>;
// The product of the sizes. Every product of sizes goes through here: throws Error where one is negative or there are
// more than kMostElements, so that bytes, and what kernels make of them a thread, stay below 2^63.
int64_t elements(const Shape&);
inline constexpr int64_t kMostElements = int64_t{1} << 42;
bool countable(const Shape&);           // elements() would not throw
std::string text(const Shape&);         // "(4, 256, 768)"
std::string bytes_text(int64_t bytes);  // "1.50 GiB"

// What a tensor is for; the ledger counts bytes by it.
enum class Role : uint8_t { parameter, gradient, optimizer_state, activation, data, scalar, workspace };
inline constexpr int kRoles = 7;
std::string_view name_of(Role);

// Where bytes are: memory of the device, memory of the host, a file on an NVMe disk. On the CPU backend device and host
// are one memory, of which one budget bounds the sum: what may rest on the host stays on the device there.
enum class Tier : uint8_t { device, host, nvme };
inline constexpr int kTiers = 3;
std::string_view name_of(Tier);

struct TensorId {
  int32_t value = -1;
  explicit operator bool() const { return value >= 0; }
  auto operator<=>(const TensorId&) const = default;
};

// The tensors that an op reads or writes: a vector that holds a few without memory of its own, since a program has
// millions of them.
class TensorIds {
 public:
  using value_type = TensorId;
  using iterator = TensorId*;
  using const_iterator = const TensorId*;

  TensorIds() = default;
  TensorIds(std::initializer_list<TensorId> ids) : TensorIds(ids.begin(), ids.end()) {}
  TensorIds(const std::vector<TensorId>& ids) : TensorIds(ids.data(), ids.data() + ids.size()) {}
  TensorIds(const TensorId* first, const TensorId* last) { insert(end(), first, last); }
  TensorIds(const TensorIds& other) : TensorIds() {
    if (other.is_inside())
      take(other);
    else
      insert(end(), other.begin(), other.end());
  }
  TensorIds(TensorIds&& other) noexcept {
    take(other);
    other.size_ = other.outside_ = 0;
  }
  TensorIds& operator=(TensorIds other) noexcept {
    if (!is_inside()) delete[] elsewhere();
    take(other);
    other.size_ = other.outside_ = 0;
    return *this;
  }
  ~TensorIds() {
    if (!is_inside()) delete[] elsewhere();
  }
  operator std::vector<TensorId>() const { return {begin(), end()}; }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  TensorId* begin() { return is_inside() ? inside_ : elsewhere(); }
  TensorId* end() { return begin() + size_; }
  const TensorId* begin() const { return is_inside() ? inside_ : elsewhere(); }
  const TensorId* end() const { return begin() + size_; }
  const TensorId* data() const { return begin(); }
  TensorId& operator[](size_t i) { return begin()[i]; }
  const TensorId& operator[](size_t i) const { return begin()[i]; }
  TensorId& at(size_t i) { return check(i), begin()[i]; }
  const TensorId& at(size_t i) const { return check(i), begin()[i]; }
  TensorId& front() { return *begin(); }
  const TensorId& front() const { return *begin(); }
  TensorId& back() { return end()[-1]; }
  const TensorId& back() const { return end()[-1]; }

  void push_back(TensorId id) { insert(end(), id); }
  void pop_back() { --size_; }
  void clear() { size_ = 0; }
  void resize(size_t size);
  TensorId* insert(const TensorId* at, TensorId id) { return insert(at, &id, &id + 1); }
  // `first` to `last` may lie in any other list.
  TensorId* insert(const TensorId* at, const TensorId* first, const TensorId* last);
  TensorId* erase(const TensorId* at) { return erase(at, at + 1); }
  TensorId* erase(const TensorId* first, const TensorId* last);
  friend bool operator==(const TensorIds& a, const TensorIds& b);

 private:
  static constexpr size_t kInside = 5;
  bool is_inside() const { return !outside_; }
  // Where there are more than fit inside, their address lies there, and behind it for how many there is room.
  TensorId* elsewhere() const;
  size_t capacity() const { return is_inside() ? kInside : size_t(inside_[2].value); }
  void reserve(size_t capacity);
  void take(const TensorIds& other) {  // all of it as it is
    std::copy_n(other.inside_, kInside, inside_);
    size_ = other.size_, outside_ = other.outside_;
  }
  void check(size_t i) const;

  alignas(8) TensorId inside_[kInside]{};
  uint32_t size_ : 31 = 0, outside_ : 1 = 0;
};

// How a persistent tensor gets its first values. Normal values come from Philox keyed by the run's seed, the
// tensor's name and the global element index, so they do not depend on layout, order or thread count.
struct Initializer {
  enum class Kind : uint8_t { zeros, ones, normal, constant } kind = Kind::zeros;
  double value = 0;  // the standard deviation, or the constant
  bool operator==(const Initializer&) const = default;
};

// A dimension that is split over a mesh axis: of its `full` size each rank holds the share that share_of
// (communicator.h) gives its coordinate. Shapes are those of coordinate 0, which are the largest, while planning; so
// every rank plans the same.
struct Split {
  int dimension = 0;
  std::string axis;
  int64_t full = 0;   // what is divided: what earlier splits of the dimension left of it
  int64_t first = 0;  // index in `full` of what this rank holds; set once planning is over
  // 0: what a rank holds is contiguous. Otherwise it is two chunks of that many elements, one from the front, at
  // `first`, and its mirror image from the back, so that causal work is as much on every rank. Of one dimension at
  // most, and the first split of it. Exchanges leave such tensors in the order of ranks (attribute order = "ranks").
  int64_t pair = 0;
  // Kinds do not see it: what ranks compute with is a tensor of their own, put together in checkpoints alone.
  bool unseen = false;
  bool operator==(const Split&) const = default;
};

// Which part of a tensor a rank holds: splits applied in order, several of one dimension too. No splits: all of it, the
// same on every rank. layout.h turns this into indices.
using Layout = std::vector<Split>;

// What a model calls a dimension of a tensor: "hidden", "ffn", "vocabulary", "heads", "batch", "time". Strategies say
// which names are split over which axes of the mesh, and know no model's tensors. `unit`: elements that stay together
// when the dimension is split, such as those of a head; a dimension of unit u and size n can be split n / u ways.
struct Dimension {
  std::string name;
  int64_t unit = 1;
  Dimension(std::string name, int64_t unit = 1) : name(std::move(name)), unit(unit) {}
  Dimension(const char* name, int64_t unit = 1) : name(name), unit(unit) {}
  bool operator==(const Dimension&) const = default;
};
using Dimensions = std::vector<Dimension>;
std::string text(const Shape&, const Dimensions&);  // "(heads 12 x 192, hidden 768)"; as text(shape) without names

// What only a persistent tensor has.
struct Lasting {
  Initializer initializer{};
  // A working copy: the name of the persistent f32 tensor (the master) of which this one is the value in fewer bits.
  // First values and those of a checkpoint come from the master's; checkpoints hold the master alone.
  Name rounded_from{};
  // Of a parameter whose rows are several matrices (or vectors) of their own, stored as one: the first fused[0] rows
  // belong to matrix 0, the next fused[1] to matrix 1 and so on, and again from matrix 0 until the rows end. Empty: it
  // is one. Optimizers that look at a matrix as a whole (Adafactor) take each for itself. Rows are those of the whole
  // tensor: a rank's part begins wherever its box does (box_of).
  std::vector<int64_t> fused{};
  // A checkpoint without it, or with one of another shape (of another number of ranks), is loaded all the same: it gets
  // its first values, and the run says so. For what a run can do without, such as the errors of compressed gradients.
  bool begins_anew = false;
  // Never in a checkpoint, and begins with its first values whatever is loaded: of no use when one is made.
  bool unsaved = false;
  // Of a parameter that is not trained: it has no gradient, no optimizer state and no master. Tables [parameters] of
  // the configuration and plugins (in stage forward, with Capabilities::early) say so, before anybody looks.
  bool frozen = false;
  // Of a parameter that a plugin adds to the model: a checkpoint of the model alone leaves its first values.
  bool added = false;
  // Ranks along that axis of the mesh (`data`: all its parts) train apart (ExchangeStage::leave), and each has a value
  // of its own. The engine says so. A checkpoint holds those of all, each under a name of its own.
  std::string own_over{};
  // The same on ranks that train apart, since what changes it has been exchanged.
  bool alike = false;
  // Ranks along that axis of the mesh (`data`: all its parts), which then have to be of one host, have one memory of
  // it: what one of them writes all read at once, and nobody waits. Such a tensor is `alike`.
  std::string one_memory_over{};
  // What ranks that train apart have together, for a tensor of which each has its own: begins with that one's values,
  // and a checkpoint has it under that one's name.
  Name stands_for{};
  // By what the optimizer's learning rate and weight decay are multiplied for this parameter (UpdateStage::adjusted).
  double learning_rate_factor = 1, weight_decay_factor = 1;
};

// A program has millions, most of them copies for another microbatch: what is long is shared by copies (shared.h).
struct Tensor {
  Name name;
  SharedVector<int64_t> shape;
  DType dtype = DType::f32;
  Role role = Role::activation;
  Tier home = Tier::device;  // of a persistent tensor: where it lives; of any other: the arena it lies in
  // The tiers it may rest on between uses: set by plugins in stage `placement` or before; the planner chooses among
  // them, the nearest that the budgets allow, and moves the bytes. Equal to `device`: it stays where it is used.
  Tier nearest = Tier::device, farthest = Tier::device;
  // Survives the step (parameters, states, scalars); what does not is planned by liveness.
  bool persistent = false;
  // Readable on the host after the step: stays allocated to the step's end.
  bool step_output = false;
  Shared<Lasting> lasting{};
  SharedVector<Split> layout{};
  // Made by the residency planner: another copy of this tensor, on another tier or restored. Its name is another one.
  TensorId copy_of{};
  // A part of another tensor's memory, this many bytes after its start: an op that writes a part updates the whole in
  // place. Parts of parts are not used.
  TensorId part_of{};
  int64_t part_offset = 0;
  // What the model calls the dimensions, one each, or none: of parameters and data, and of the activations that it
  // declares. Sizes of the whole tensor are multiples of the units.
  SharedVector<Dimension> dimensions{};
  Shape full_shape() const;  // of the whole tensor that `layout` divides
  int64_t bytes() const { return elements(shape) * size_of(dtype); }
};
static_assert(sizeof(Tensor) == 72);  // what is rare goes to Lasting, what copies have in common is shared

// Throws Error unless the tensor's dimensions have no names, or one each, and hold a whole number of their units.
void require_names_fit(const Tensor& tensor);

// Shape and type of a tensor to be made.
struct TensorSpec {
  Shape shape;
  DType dtype = DType::f32;
};

}  // namespace strata
