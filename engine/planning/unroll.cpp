// Gradient accumulation by unrolling; see unroll.h.
#include "engine/planning/unroll.h"

#include <algorithm>
#include <map>

#include "engine/planning/hoist.h"
#include "strata/op_kind.h"

namespace strata {
namespace {

class Unroller {
 public:
  Unroller(const Program& single, const PassTable& passes, const std::vector<TensorId>& parameters,
           std::vector<TensorId>& gradients, bool balanced, const Mesh& mesh)
      : single_(single),
        passes_(passes),
        parameters_(parameters),
        gradients_(gradients),
        balanced_(balanced),
        mesh_(mesh) {
    uses_.assign(single.tensors.size(), 0);
    for (const Op& op : single.ops)
      for (TensorId id : op.inputs)
        if (id) ++uses_[id.value];
    producer_.assign(single.tensors.size(), -1);
    for (size_t i = 0; i < single.ops.size(); ++i)
      for (TensorId id : single.ops[i].outputs) producer_[id.value] = int32_t(i);
    find_finishing();
    for (const Tensor& tensor : single.tensors) names_.emplace_back(tensor.name.text());
    for (size_t i = 0; i < single.tensors.size(); ++i)
      shared_.push_back(single.tensors[i].persistent ? result_.add(single.tensors[i]) : TensorId{});
    sums_.resize(gradients.size());
    next_sums_.resize(gradients.size());
  }

  Program run(const ScheduleStage& schedule) {
    microbatches_ = schedule.microbatches;
    goes_on_ = schedule.sums_go_on;
    const bool has_before = !schedule.phases.is_first_step();
    const std::vector<Pass> left = passes_.left(schedule);
    const size_t begun = left.empty() && schedule.sent_later.empty() ? 0 : size_t(microbatches_);  // in the step before
    maps_.assign(size_t(microbatches_) + begun, shared_);
    placed_.assign(size_t(microbatches_) + begun, std::vector<int32_t>(single_.ops.size(), -1));
    left_.assign(begun, std::vector<char>(single_.ops.size(), false));
    for (const Pass& pass : left)
      for (int32_t i : passes_.ops(pass)) left_[size_t(pass.microbatch)][size_t(i)] = true;
    for (const Pass& pass : schedule.sent_later)
      for (int32_t i : passes_.ops(pass))
        if (is_handed_on(i, Stream::send)) left_[size_t(pass.microbatch)][size_t(i)] = true;
    for (size_t m = 0; m < begun; ++m) find_kept(int(m));
    if (goes_on_) begin_sums(schedule, has_before);
    const size_t additions = balanced_ ? gradients_.size() : 0;
    const size_t copies = size_t(schedule.microbatches);
    // And as much again as one microbatch for what happens once a step: growing would copy it all.
    result_.ops.reserve((single_.ops.size() + additions) * (copies + 1));
    result_.tensors.reserve(result_.tensors.size() + (unshared() + additions) * (copies + 1));
    if (has_before)
      for (const Pass& pass : schedule.sent_later)
        for (int32_t i : passes_.ops(pass))
          if (is_handed_on(i, Stream::send)) place(size_t(i), pass.microbatch - microbatches_);
    auto next = schedule.receives.begin();
    for (size_t p = 0; p < schedule.order.size(); ++p) {
      for (; next != schedule.receives.end() && next->before <= p; ++next) receive(next->pass);
      const Pass& pass = schedule.order[p];
      for (int32_t i : passes_.ops(pass))
        if (runs_here(size_t(i), pass.microbatch) && !finishes_[size_t(i)]) place(size_t(i), pass.microbatch);
      if (pass.part == Pass::Part::forward) continue;
      for (size_t g : made_in(pass)) balanced_ ? grow(g, pass) : accumulate(g, pass);
    }
    if (balanced_ && !schedule.order.empty()) close_trees(schedule.order.back());
    if (goes_on_) hand_on_sums();
    for (size_t g = 0; g < gradients_.size(); ++g) finish(g);
    for (const auto& [from, to] : kept_) keep(from, to);
    for (int m = -int(begun); m < microbatches_; ++m)
      for (TensorId loss : single_.losses) {
        if (!is_made(loss, m)) continue;
        result_.losses.push_back(mapped(loss, m));
        result_[result_.losses.back()].step_output = true;
      }
    for (int m = 0; m < microbatches_; ++m)
      for (const auto& [tensor, forms] : single_.forms) {
        if (!is_made({tensor}, m)) continue;
        std::vector<RestingForm> copies = forms;
        for (RestingForm& form : copies)
          for (auto* list : {&form.rest, &form.restore})
            for (Op& op : *list) {
              for (TensorId& id : op.inputs) id = mapped(id, m);
              for (TensorId& id : op.outputs) id = mapped(id, m);
              op.microbatch = m;
            }
        result_.forms[mapped({tensor}, m).value] = std::move(copies);
      }
    result_.storage_directories = single_.storage_directories;
    result_.storage_limit = single_.storage_limit;
    for (size_t g = 0; g < gradients_.size(); ++g) gradients_[g] = sums_[g].total;
    std::vector<char> movable(result_.ops.size(), false);
    for (size_t i : additions_) movable[i] = true;
    hoist(result_, movable);
    return std::move(result_);
  }

 private:
  TensorId mapped(TensorId id, int m) {
    if (!id) return id;
    TensorId& to = maps_[place_of(m)][size_t(id.value)];
    if (!to) {
      Tensor tensor = single_[id];
      tensor.name = m < 0 ? Name(tensor.name + ".before").of_microbatch(m + microbatches_)
                          : names_[size_t(id.value)].of_microbatch(m);
      if (tensor.role == Role::data) {
        to = result_.add(std::move(tensor));
      } else {  // a name of its own without asking (Program::find)
        to = {int32_t(result_.tensors.size())};
        result_.tensors.push_back(std::move(tensor));
      }
    }
    return to;
  }

  // The gradients that a pass makes, in whichever microbatch.
  const std::vector<size_t>& made_in(const Pass& pass) {
    const auto [known, is_new] = made_in_.try_emplace({pass.part, pass.chunk});
    for (size_t g = 0; is_new && g < gradients_.size(); ++g)
      if (gradients_[g] && passes_.makes(pass, gradients_[g])) known->second.push_back(g);
    return known->second;
  }

  // Tensors that exist once a microbatch.
  size_t unshared() const {
    std::vector<char> used(single_.tensors.size(), false);
    for (const Op& op : single_.ops)
      for (const auto* list : {&op.inputs, &op.outputs})
        for (TensorId id : *list)
          if (id && !single_[id].persistent) used[size_t(id.value)] = true;
    return size_t(std::count(used.begin(), used.end(), char(true)));
  }

  void place(size_t i, int m) {
    Op op = single_.ops[i];
    for (TensorId& id : op.inputs) id = mapped(id, m);
    for (TensorId& id : op.outputs) id = mapped(id, m);
    op.microbatch = m < 0 ? m + microbatches_ : m;
    placed_[place_of(m)][i] = int32_t(result_.ops.size());
    result_.ops.push_back(std::move(op));
  }

  // Of gradients that an op with attribute `after_sum` makes, what it reads is summed, and it runs once a step.
  void find_finishing() {
    finishes_.assign(single_.ops.size(), false);
    finished_.resize(gradients_.size());
    for (size_t g = 0; g < gradients_.size(); ++g) {
      const int32_t producer = gradients_[g] ? producer_[size_t(gradients_[g].value)] : -1;
      if (producer < 0) continue;
      const Op& op = single_.ops[size_t(producer)];
      if (op.attributes.integer("after_sum", 0) == 0 || uses_[size_t(gradients_[g].value)] > 0) continue;
      STRATA_CHECK(op.inputs.size() == 1 && op.outputs.size() == 1);
      finishes_[size_t(producer)] = true;
      finished_[g] = gradients_[g];
      gradients_[g] = op.inputs[0];
      --uses_[size_t(op.inputs[0].value)];
    }
  }
  void finish(size_t g) {
    if (!finished_[g] || !sums_[g].total) return;
    Op op = single_.ops[size_t(producer_[size_t(finished_[g].value)])];
    const int last = microbatches_ - 1;
    op.inputs = {sums_[g].total};
    op.outputs = {mapped(finished_[g], last)};
    op.microbatch = last;
    sums_[g].total = op.outputs[0];
    result_[sums_[g].total].role = Role::gradient;
    additions_.push_back(result_.ops.size());
    result_.ops.push_back(std::move(op));
  }

  // What a pass receives from other stages, ahead of it.
  void receive(const Pass& pass) {
    for (int32_t i : passes_.ops(pass)) {
      if (!is_handed_on(i, Stream::receive)) continue;
      if (placed_[place_of(pass.microbatch)][size_t(i)] >= 0)
        throw Error("the schedule receives what the " + text(pass) + " needs when it has run.");
      place(size_t(i), pass.microbatch);
    }
  }

  // Whether an op hands something on between ranks with programs of their own.
  bool is_handed_on(int32_t i, Stream way) const {
    const Op& op = single_.ops[size_t(i)];
    return op.stream == way && mesh_[op.attributes.string("axis")].own_programs;
  }

  // Of a pass: whether the op has not run yet, and is of this step.
  bool runs_here(size_t i, int m) const {
    if (placed_[place_of(m)][i] >= 0) return false;
    return left_.empty() || left_[size_t(m < 0 ? m + microbatches_ : m)][i] == (m < 0);
  }

  // In lists by microbatch: those that began in the step before come after those of this one.
  size_t place_of(int m) const { return size_t(m < 0 ? m + 2 * microbatches_ : m); }

  // Whether a tensor of a microbatch is made in this step, or by nobody (data).
  bool is_made(TensorId id, int m) const {
    const int32_t producer = producer_[size_t(id.value)];
    if (left_.empty()) return true;
    const bool left = producer >= 0 && left_[size_t(m < 0 ? m + microbatches_ : m)][size_t(producer)];
    return m < 0 ? left && placed_[place_of(m)][size_t(producer)] >= 0 : !left;
  }

  // A persistent tensor for everything that the ops of a microbatch which are left to the next step read and do not
  // make.
  void find_kept(int m) {
    std::vector<char> made(single_.tensors.size(), false), changed(made);
    for (size_t i = 0; i < single_.ops.size(); ++i)
      for (TensorId id : single_.ops[i].outputs) {
        changed[size_t(single_.whole(id).value)] = true;
        if (left_[size_t(m)][i]) made[size_t(single_.whole(id).value)] = true;
      }
    for (size_t i = 0; i < single_.ops.size(); ++i)
      for (TensorId id : single_.ops[i].inputs) {
        if (!left_[size_t(m)][i] || !id || made[size_t(single_.whole(id).value)]) continue;
        TensorId& slot = maps_[place_of(m - microbatches_)][size_t(id.value)];
        if (slot != shared_[size_t(id.value)]) continue;  // has one
        const Tensor& tensor = single_[id];
        if (tensor.part_of || (tensor.persistent && changed[size_t(id.value)]))
          throw Error("a pass that is left to the next step reads " + tensor.name + ", " +
                      (tensor.part_of ? "a part of a tensor" : "which ops of other microbatches change") +
                      "; that cannot be kept for it.");
        if (tensor.persistent) {  // all microbatches of a step see one value of it
          TensorId& one = kept_of_step_[id.value];
          if (!one) {
            one = result_.add(kept(tensor, tensor.name + kKept));
            kept_.emplace_back(shared_[size_t(id.value)], one);
          }
          slot = one;
          continue;
        }
        slot = result_.add(kept(tensor, (tensor.name + kKept) + "." + std::to_string(m) + of_program()));
        kept_.emplace_back(mapped(id, m), slot);
      }
  }

  // Of a name for what ranks with other programs have of their own, by whatever name.
  std::string of_program() const {
    const Axis programs = mesh_.programs();
    return programs.size > 1 ? ".program" + std::to_string(programs.coordinate) : "";
  }

  Tensor kept(Tensor tensor, std::string name) const {
    if (!tensor.persistent && mesh_.size(kDataAxis) > 1) {  // each rank's own: together one tensor, split by rows
      Layout layout{{.dimension = 0,
                     .axis = std::string(kDataAxis),
                     .full = tensor.full_shape()[0] * mesh_.size(kDataAxis),
                     .unseen = true}};
      layout.insert(layout.end(), tensor.layout.begin(), tensor.layout.end());
      tensor.layout = std::move(layout);
      tensor.dimensions = {};
    }
    tensor.name = Name(std::move(name));
    tensor.role = Role::optimizer_state;
    tensor.persistent = true;
    tensor.step_output = false;
    tensor.lasting = {};
    return tensor;
  }

  // As soon as the value is there and the one of the step before is not needed any more (hoist).
  void keep(TensorId from, TensorId to) {
    Op op = make_op("move", {from}, {to});
    op.step_part = StepPart::backward;
    additions_.push_back(result_.ops.size());
    result_.ops.push_back(std::move(op));
  }

  // Of the gradients of a parameter: one after the other, or in a balanced tree over microbatches.
  struct Partial {
    TensorId sum;
    int count;  // of microbatches
  };
  struct Sum {
    TensorId total;
    int64_t made_at = -1;         // the op of the result that makes it
    std::map<int, Partial> tree;  // by first microbatch
  };
  // Where sums go on, this step's microbatches have one of their own, for the next step's update.
  Sum& sum_of(size_t g, const Pass& pass) { return goes_on_ && pass.microbatch >= 0 ? next_sums_[g] : sums_[g]; }

  // Persistent tensors for what this step's microbatches add up to, which the next step begins with. `has_before`: so
  // does this one.
  void begin_sums(const ScheduleStage& schedule, bool has_before) {
    std::vector<std::map<int, int>> parts(gradients_.size());  // by first microbatch: how many
    for (const Pass& pass : schedule.order)
      if (pass.microbatch >= 0 && pass.part != Pass::Part::forward)
        for (size_t g : made_in(pass)) {
          int first = balanced_ ? pass.microbatch : 0, count = 1;
          auto& known = parts[g];
          for (; balanced_; first &= ~count, count *= 2) {
            const auto sibling = known.find(first ^ count);
            if (sibling == known.end() || sibling->second != count) break;
            known.erase(sibling);
          }
          known[first] = count;
        }
    std::map<std::string, int> numbers;
    for (size_t g = 0; g < gradients_.size(); ++g) {
      const std::string parameter = single_[parameters_[g]].name;
      const int number = numbers[parameter]++;  // of what several ops make of it, apart
      for (const auto& [first, count] : parts[g]) {
        const std::string name = parameter + ".gradient" + (number > 0 ? "." + std::to_string(number) : "");
        const TensorId slot = result_.add(
            kept(single_[gradients_[g]], name + std::string(kKept) + "." + std::to_string(first) + of_program()));
        slots_[{g, first}] = slot;
        if (has_before && balanced_)
          sums_[g].tree[first] = {slot, count};
        else if (has_before)
          sums_[g].total = slot;
      }
    }
  }

  void hand_on_sums() {
    for (auto& [at, slot] : slots_) {
      const auto& [g, first] = at;
      if (sums_[g].total == slot) {  // it is about to change
        Tensor tensor = single_[gradients_[g]];
        tensor.name = Name(result_[slot].name.text() + ".before");
        tensor.role = Role::gradient;
        sums_[g].total = result_.add(std::move(tensor));
        Op op = make_op("move", {slot}, {sums_[g].total});
        op.step_part = StepPart::backward;
        result_.ops.push_back(std::move(op));
      }
      kept_.emplace_back(balanced_ ? next_sums_[g].tree.at(first).sum : next_sums_[g].total, slot);
    }
  }

  // Adds the sum so far to this microbatch's gradient: into the op that makes the first contribution where its kind
  // can accumulate and nothing else reads the bare contribution, by an addition otherwise.
  void accumulate(size_t g, const Pass& pass) {
    const TensorId now = mapped(gradients_[g], pass.microbatch);
    result_[now].role = Role::gradient;
    Sum& sum = sum_of(g, pass);
    const bool folded = sum.total && fold(g, sum, pass.microbatch);
    if (sum.total && !folded) {
      sum.total = add(g, sum.total, now, pass);
      sum.made_at = int64_t(result_.ops.size()) - 1;
    } else {
      sum.total = now;
      const int32_t producer = producer_[size_t(gradients_[g].value)];
      sum.made_at = producer < 0 ? -1 : placed_[place_of(pass.microbatch)][size_t(producer)];
    }
  }

  TensorId add(size_t g, TensorId a, TensorId b, const Pass& pass) {
    Builder build(result_);
    build.step_part = StepPart::backward;
    build.microbatch = pass.microbatch < 0 ? pass.microbatch + microbatches_ : pass.microbatch;
    build.role = Role::gradient;
    additions_.push_back(result_.ops.size());
    const TensorId sum = build.emit("add", {a, b}, {}, single_[parameters_[g]].name + ".gradient");
    result_.ops.back().chunk = int16_t(pass.chunk);
    result_[sum].layout = single_[gradients_[g]].layout;
    return sum;
  }

  // Balanced sums: a sum over 2^k microbatches from a multiple of 2^k on is added to its neighbour's as soon as both
  // are there, in whatever order the passes make them.
  void grow(size_t g, const Pass& pass) {
    int first = pass.microbatch < 0 ? pass.microbatch + microbatches_ : pass.microbatch;
    Partial now{mapped(gradients_[g], pass.microbatch), 1};
    result_[now.sum].role = Role::gradient;
    auto& tree = sum_of(g, pass).tree;
    for (;;) {
      const int sibling = first ^ now.count;
      const auto found = tree.find(sibling);
      if (found == tree.end() || found->second.count != now.count) break;
      const TensorId other = found->second.sum;
      tree.erase(found);
      now = {sibling < first ? add(g, other, now.sum, pass) : add(g, now.sum, other, pass), 2 * now.count};
      first = std::min(first, sibling);
    }
    tree[first] = now;
  }
  // What is left of a number of microbatches that is no power of two, the smallest first.
  void close_trees(const Pass& last) {
    for (size_t g = 0; g < gradients_.size(); ++g) {
      auto& tree = sums_[g].tree;
      while (tree.size() > 1) {
        const Partial b = tree.rbegin()->second;
        tree.erase(std::prev(tree.end()));
        Partial& a = tree.rbegin()->second;
        a = {add(g, a.sum, b.sum, last), a.count + b.count};
      }
      if (!tree.empty()) sums_[g].total = tree.begin()->second.sum;
    }
  }

  bool fold(size_t g, const Sum& sum, int m) {
    for (TensorId id = gradients_[g];;) {
      if (uses_[id.value] != (id == gradients_[g] ? 0 : 1)) return false;
      const int32_t index = producer_[id.value];
      if (index < 0) return false;
      const Op& op = single_.ops[index];
      const OpView view(single_, op);
      const int output = int(std::find(op.outputs.begin(), op.outputs.end(), id) - op.outputs.begin());
      if (view.accumulates(output)) {
        id = view.addend(output);
        continue;
      }
      if (output >= 16 || !(op.kind->accumulates >> output & 1)) return false;
      const int32_t at = placed_[place_of(m)][size_t(index)];
      Op& placed = result_.ops[size_t(at)];
      // Where passes of microbatches cross, the op may have run before there was a sum.
      if (placed.accumulate >> output & 1 || at < sum.made_at) return false;
      const int before = __builtin_popcount(placed.accumulate & ((1u << output) - 1));
      placed.inputs.insert(placed.inputs.end() - placed.addends() + before, sum.total);
      placed.accumulate |= 1u << output;
      for (TensorId out : placed.outputs)
        if (out == mapped(id, m)) result_[out].role = Role::gradient;
      return true;
    }
  }

  const Program& single_;
  const PassTable& passes_;
  const std::vector<TensorId>& parameters_;
  std::vector<TensorId>& gradients_;
  bool balanced_;
  const Mesh& mesh_;
  int microbatches_ = 1;
  std::vector<std::vector<char>> left_;  // by microbatch and op of the single program; empty: nothing is left
  std::vector<std::pair<TensorId, TensorId>> kept_;                    // for the next step: from where, to where
  std::map<int32_t, TensorId> kept_of_step_;                           // by persistent tensor of the single program
  bool goes_on_ = false;                                               // sums do, in the next step
  std::map<std::pair<size_t, int>, TensorId> slots_;                   // for them, by gradient and first microbatch
  std::map<std::pair<Pass::Part, int>, std::vector<size_t>> made_in_;  // by part and chunk of a pass
  Program result_;
  std::vector<size_t> additions_;   // ops that add up gradients
  std::vector<Name> names_;         // of the tensors of the single program, each one text that its copies share
  std::vector<char> finishes_;      // by op of the single program: runs once a step
  std::vector<TensorId> finished_;  // by gradient: what such an op makes of its sum
  std::vector<int> uses_;
  std::vector<int32_t> producer_;
  std::vector<TensorId> shared_;
  std::vector<Sum> sums_, next_sums_;         // by gradient: for the update of this step, of the next one
  std::vector<std::vector<TensorId>> maps_;   // by microbatch and tensor of the single program
  std::vector<std::vector<int32_t>> placed_;  // by microbatch and op of the single program
};

}  // namespace

Program unroll(const Program& single, const PassTable& passes, const std::vector<TensorId>& parameters,
               std::vector<TensorId>& gradients, const ScheduleStage& schedule, bool balanced, const Mesh& mesh) {
  passes.check(schedule);
  return Unroller(single, passes, parameters, gradients, balanced, mesh).run(schedule);
}

}  // namespace strata
