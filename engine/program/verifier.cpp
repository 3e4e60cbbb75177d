// Checks a program after every pass and names the pass that broke it; what is checked stands in program.h (verify).
#include <algorithm>
#include <iterator>
#include <ranges>
#include <map>
#include <set>
#include <string>
#include <unordered_set>

#include "engine/program/sharding.h"
#include "engine/program/signature.h"
#include "strata/communicator.h"
#include "strata/layout.h"
#include "strata/mesh.h"
#include "strata/op_kind.h"

namespace strata {
namespace {

class Verifier {
 public:
  Verifier(const Program& program, std::string_view after, const Mesh* mesh)
      : program_(program), after_(after), mesh_(mesh), written_(program.tensors.size()), signatures_(program) {}

  void run() {
    for (size_t t = 0; t < program_.tensors.size(); ++t) check_tensor(int32_t(t));
    for (size_t i = 0; i < program_.ops.size(); ++i) {
      const Op& op = program_.ops[i];
      at_ = i;
      check_op(op);
      check_tiers(op);
      check_order(op);
    }
    for (TensorId loss : program_.losses)
      if (!known(loss) || !written_[size_t(loss.value)]) refuse("nothing writes the loss.");
    check_forms();
    if (is_split_) partial_sums(program_, after_, mesh_);
  }

 private:
  bool known(TensorId id) const { return id.value >= 0 && id.value < int32_t(program_.tensors.size()); }

  [[noreturn]] void refuse(const std::string& what) const {
    throw Error("the program is not well formed after \"" + std::string(after_) + "\": " + what);
  }
  [[noreturn]] void refuse(const Tensor& tensor, const std::string& what) const {
    refuse("tensor " + tensor.name + " " + what);
  }
  [[noreturn]] void refuse(const Op& op, const std::string& what, bool ids_are_right = true) const {
    refuse(place() + " (" + op.kind->name + ") " + what + (ids_are_right ? "\n  " + print(program_, op) : ""));
  }

  // What is being checked, for messages.
  std::string place() const {
    const std::string op = "op " + std::to_string(at_);
    return form_ ? form_text() + (rests_ ? "rest " : "restore ") + op : op;
  }
  std::string form_text() const { return "resting form \"" + form_->name + "\" of " + form_of_->name + ": "; }

  void check_tensor(int32_t index) {
    const Tensor& tensor = program_.tensors[size_t(index)];
    written_[size_t(index)] = tensor.persistent || (tensor.role == Role::data && !tensor.copy_of);
    if (tensor.shape.empty()) refuse(tensor, "has no dimension; a scalar has shape (1).");
    for (size_t d = 0; d < tensor.shape.size(); ++d)
      if (tensor.shape[d] < 0 || (tensor.shape[d] == 0 && !is_split(tensor, int(d))))  // a share may be empty
        refuse(tensor, "has shape " + text(tensor.shape) + ".");
    if (tensor.copy_of && !known(tensor.copy_of)) refuse(tensor, "is a copy of a tensor that does not exist.");
    check_layout(tensor);
    check_names(tensor);
    if (tensor.part_of) check_part(tensor);
  }

  void check_names(const Tensor& tensor) const {
    if (tensor.part_of || tensor.dimensions.empty()) return;
    try {
      require_names_fit(tensor);
    } catch (const Error& error) {
      refuse(error.what());
    }
  }

  static bool is_split(const Tensor& tensor, int dimension) {
    for (const Split& split : tensor.layout)
      if (split.dimension == dimension) return true;
    return false;
  }

  void check_layout(const Tensor& tensor) {
    is_split_ = is_split_ || !tensor.layout.empty();
    if (tensor.layout.empty()) return;
    std::set<std::string> axes;
    for (size_t s = 0; s < tensor.layout.size(); ++s) {
      const Split& split = tensor.layout[s];
      const std::string what =
          "is split along dimension " + std::to_string(split.dimension) + " over axis \"" + split.axis + "\"";
      if (split.dimension < 0 || split.dimension >= int(tensor.shape.size()))
        refuse(tensor, what + ", but has shape " + text(tensor.shape) + ".");
      if (split.axis.empty() || !axes.insert(split.axis).second)
        refuse(tensor, what + ", which is no axis of its own.");
      // What is held: the next split of the dimension divides it, or it is the tensor's own size.
      const Split* next = nullptr;
      for (size_t n = s + 1; n < tensor.layout.size() && !next; ++n)
        if (tensor.layout[n].dimension == split.dimension) next = &tensor.layout[n];
      if (next)
        check_nested(tensor, split, *next);
      else
        check_split(tensor, split, tensor.shape[size_t(split.dimension)], what);
    }
  }

  Range share(const Split& split) const {
    const Axis& axis = (*mesh_)[split.axis];
    return share_of(split, axis.coordinate, axis.size);
  }

  void check_nested(const Tensor& tensor, const Split& outer, const Split& inner) const {
    const int64_t left = mesh_ ? share(outer).count() : outer.full - outer.first;
    if (mesh_ ? inner.full != left : inner.full > left)
      refuse(tensor, "is split along dimension " + std::to_string(inner.dimension) + " over axis \"" + inner.axis +
                         "\" of " + std::to_string(inner.full) + ", but what was split before left " +
                         (mesh_ ? "" : "at most ") + std::to_string(left) + ".");
  }

  void check_split(const Tensor& tensor, const Split& split, int64_t own, const std::string& what) const {
    const std::string held = " of " + std::to_string(split.full) + ", and holds " + std::to_string(own) + " from " +
                             std::to_string(split.first) + " on, ";
    if (split.first < 0 || split.first + own > split.full) refuse(tensor, what + held + "which is not within it.");
    if (!mesh_ || (own == share(split).count() && split.first == share(split).begin)) return;
    const Axis& axis = (*mesh_)[split.axis];
    refuse(tensor, what + held + "but rank " + std::to_string(axis.coordinate) + " of " + std::to_string(axis.size) +
                       " has " + std::to_string(share(split).count()) + " from " + std::to_string(share(split).begin) +
                       " on.");
  }

  void check_part(const Tensor& part) {
    if (!known(part.part_of)) refuse(part, "is a part of a tensor that does not exist.");
    const Tensor& whole = program_[part.part_of];
    const std::string what = "is a part of " + whole.name;
    if (whole.part_of) refuse(part, what + ", which is a part itself.");
    if (part.dtype != whole.dtype) refuse(part, what + ", but of another type.");
    if (part.persistent != whole.persistent || part.home != whole.home)
      refuse(part, what + ", but does not live where and as long as that does.");
    if (part.part_offset < 0 || part.part_offset + part.bytes() > whole.bytes())
      refuse(part, what + " of " + std::to_string(whole.bytes()) + " bytes, from byte " +
                       std::to_string(part.part_offset) + " to " + std::to_string(part.part_offset + part.bytes()) +
                       ", which is not within it.");
  }

  // Everything about one op but its place among the others.
  void check_op(const Op& op) {
    if (!op.kind) refuse(place() + " has no kind.");
    for (TensorId id : op.outputs)
      if (!known(id)) refuse(op, "writes a tensor that does not exist.", false);
    for (TensorId id : op.inputs)
      if (id && !known(id)) refuse(op, "reads a tensor that does not exist.", false);
    if (op.accumulate & ~op.kind->accumulates) refuse(op, "is told to accumulate an output that its kind cannot.");
    if (op.addends() > int(op.inputs.size())) refuse(op, "lacks an addend.", false);
    for (size_t i = op.inputs.size() - size_t(op.addends()); i < op.inputs.size(); ++i)
      if (!op.inputs[i]) refuse(op, "lacks an addend.", false);
    // Copies of an op for other microbatches keep to the rule as it does.
    const uint64_t own = signatures_.of(op);
    if (!sound_.contains(own)) {
      check_shapes(op);
      sound_.insert(own);
    }
    check_stream(op);
    if (has_rule(*op.kind)) check_layouts(op);
  }

  std::vector<TensorSpec> specs_of(const Op& op) const {
    std::string problem;
    try {
      return op.kind->shape(OpView(program_, op));
    } catch (const std::exception& error) {
      problem = error.what();
    } catch (...) {
      problem = "something that is no exception.";
    }
    refuse(op, "breaks its shape rule: " + problem);
  }

  void check_shapes(const Op& op) {
    const std::vector<TensorSpec> specs = specs_of(op);
    if (specs.size() != op.outputs.size())
      refuse(op, "has " + std::to_string(op.outputs.size()) + " outputs, its kind gives " +
                     std::to_string(specs.size()) + ".");
    const OpView view(program_, op);
    for (int o = 0; o < view.outputs(); ++o) {
      const Tensor& output = view.output(o);
      if (output.shape != specs[size_t(o)].shape || output.dtype != specs[size_t(o)].dtype)
        refuse(op, "writes " + output.name + ", which is " + std::string(name_of(output.dtype)) + text(output.shape) +
                       ", but its kind gives " + std::string(name_of(specs[size_t(o)].dtype)) +
                       text(specs[size_t(o)].shape) + ".");
      if (!view.accumulates(o)) continue;
      const Tensor& addend = program_[view.addend(o)];
      if (addend.shape != output.shape || addend.dtype != output.dtype)
        refuse(op, "adds " + addend.name + " " + text(addend.shape) + " to an output of another shape or type.");
    }
  }

  Tier tier_of(TensorId id) const { return program_[program_.whole(id)].home; }

  void check_stream(const Op& op) {
    if (!op.kind->exchange && op.stream == Stream::compute) return;
    const std::string stream(name_of(op.stream));
    const bool right = op.kind->exchange ? op.stream == stream_of(*op.kind, op.attributes) : !is_exchange(op.stream);
    if (!right)
      refuse(op, op.kind->exchange ? "is an exchange, but on the stream " + stream + "; exchanges never leave theirs."
                                   : "is on a stream of exchanges, but is none.");
    if (op.kind->exchange) check_exchange(op);
    if (moves_bytes(op.stream) && op.kind->name != "move")
      refuse(op, "is on the stream " + stream + ", which is for moves alone.");
    if (op.stream == Stream::host && op.tier != Tier::host && !program_.one_memory)
      refuse(op, "is on the host's stream, but its operands are on the tier " + std::string(name_of(op.tier)) + ".");
  }

  static bool moves_bytes(Stream stream) {
    return stream == Stream::to_device || stream == Stream::to_host || stream == Stream::read ||
           stream == Stream::write;
  }

  // Not of the ops of forms, which are written as if all was on the device: restoring brings their operands there.
  void check_tiers(const Op& op) {
    if (moves_bytes(op.stream)) {
      const Tier from = tier_of(op.inputs[0]), to = tier_of(op.outputs[0]);
      const bool right = op.stream == Stream::read        ? from == Tier::nvme && to != Tier::nvme
                         : op.stream == Stream::write     ? from != Tier::nvme && to == Tier::nvme
                         : op.stream == Stream::to_device ? from == Tier::host && to == Tier::device
                                                          : from == Tier::device && to == Tier::host;
      if (!right)
        refuse(op, "moves from the tier " + std::string(name_of(from)) + " to " + std::string(name_of(to)) +
                       " on the stream " + std::string(name_of(op.stream)) + ".");
    }
    if (op.kind->name == "move") return;
    for (const auto* list : {&op.inputs, &op.outputs})
      for (TensorId id : *list)
        if (id && tier_of(id) == Tier::nvme)
          refuse(op, "uses " + program_[id].name + ", which is on the NVMe tier, where only moves reach.");
  }

  void check_exchange(const Op& op) {
    if (op.tier != Tier::device)
      refuse(op,
             "is an exchange of tensors on the tier " + std::string(name_of(op.tier)) + "; they are on the device.");
    for (const auto& [name, value] : op.attributes.all())
      if (name == "axis" && std::holds_alternative<std::string>(value)) {
        if (mesh_ && mesh_->size(std::get<std::string>(value)) < 2)
          refuse(op, "is an exchange over axis \"" + std::get<std::string>(value) + "\", which has one rank here.");
        check_layouts(op);
        return;
      }
    refuse(op, "is an exchange, but no attribute \"axis\" names the ranks.");
  }

  // Where an op leaves its results split as its kind says, the next one finds what it looks for.
  void check_layouts(const Op& op) const {
    if (!op.kind->layout && !has_rule(*op.kind)) return;
    const auto is_whole = [&](TensorId id) { return !id || program_[id].layout.empty(); };
    if (!op.kind->exchange && std::ranges::all_of(op.inputs, is_whole) && std::ranges::all_of(op.outputs, is_whole))
      return;
    std::vector<Layout> layouts = layouts_of(OpView(program_, op));
    layouts.resize(op.outputs.size());
    const auto same = [](const Split& a, const Split& b) {
      return a.dimension == b.dimension && a.axis == b.axis && a.full == b.full && a.pair == b.pair;
    };
    // Splits of one dimension nest; those of different ones have no order.
    const auto by_dimension = [](const auto& splits) {
      Layout list;
      std::ranges::copy_if(splits, std::back_inserter(list), is_seen);
      std::ranges::stable_sort(list, {}, &Split::dimension);
      return list;
    };
    for (size_t o = 0; o < op.outputs.size(); ++o)
      if (!std::ranges::equal(by_dimension(program_[op.outputs[o]].layout), by_dimension(layouts[o]), same))
        refuse(op, "makes " + program_[op.outputs[o]].name + ", which is not split as the kind leaves it.");
  }

  // Of what lives within the step, parts are written once, too, or in place of a part of as many bytes; what reads one
  // that is not there yet, or the whole too early, is refused.
  void check_piece(const Op& op, TensorId id) {
    const Tensor& part = program_[id];
    const TensorId whole = program_.whole(id);
    const auto [found, is_first] = pieces_.try_emplace(whole.value);
    std::map<int64_t, int64_t>& there = found->second;  // end, by beginning
    if (is_first && written_[size_t(whole.value)]) refuse(op, "writes " + part.name + " a second time.");
    const int64_t begin = part.part_offset, end = begin + part.bytes();
    const auto next = there.lower_bound(end);
    const bool is_free = next == there.begin() || std::prev(next)->second <= begin;
    const bool in_place = std::ranges::any_of(op.inputs, [&](TensorId input) {
      return input && input != id && program_[input].part_of == whole && program_[input].part_offset == begin &&
             program_[input].bytes() == part.bytes();
    });
    if (!is_free && !in_place) refuse(op, "writes " + part.name + ", of which something is there already.");
    there[begin] = end;
    written_[size_t(whole.value)] = true;
  }
  bool is_there(TensorId id) const {
    const TensorId whole = program_.whole(id);
    const auto found = pieces_.find(whole.value);
    if (found == pieces_.end()) return written_[size_t(whole.value)];
    int64_t at = program_[id].part_of ? program_[id].part_offset : 0;
    const int64_t end = at + program_[id].bytes();
    for (const auto& [first, last] : found->second)
      if (first <= at && at < end) at = std::max(at, last);
    return at >= end;
  }

  // Written before it is read, and once.
  void check_order(const Op& op) {
    if (op.purpose == Purpose::again && !program_.again_if) refuse(op, "runs only sometimes, but nothing says when.");
    for (TensorId id : op.inputs)
      if (id && !is_there(id)) refuse(op, "reads " + program_[id].name + " before anything has written it.");
    for (size_t o = 0; o < op.outputs.size(); ++o) {
      const TensorId id = op.outputs[o], whole = program_.whole(id);
      const Tensor& tensor = program_[whole];
      for (size_t other = 0; other < o; ++other)
        if (op.outputs[other] == id) refuse(op, "writes " + program_[id].name + " twice.");
      if (tensor.role == Role::data && !tensor.copy_of)
        refuse(op, "writes " + tensor.name + ", which only the data loader may.");
      const bool lasts = tensor.persistent || (tensor.copy_of && program_[program_.whole(tensor.copy_of)].persistent);
      if (!lasts) {
        if (op.purpose == Purpose::again) continue;  // it was written before
        if (id != whole) {
          check_piece(op, id);
          continue;
        }
        for (TensorId input : op.inputs)
          if (input && program_.whole(input) == whole)
            refuse(op, "updates " + tensor.name + " in place, which lives within the step.");
        if (written_[size_t(id.value)]) refuse(op, "writes " + tensor.name + " a second time.");
      }
      written_[size_t(whole.value)] = true;
    }
  }

  void check_forms() {
    std::vector<char> made = written_;  // by any op, in the program or in a form
    for (const auto& [tensor, forms] : program_.forms)
      for (const RestingForm& form : forms)
        for (const auto* list : {&form.rest, &form.restore})
          for (const Op& op : *list)
            for (TensorId id : op.outputs)
              if (known(id)) made[size_t(id.value)] = true;
    for (const auto& [tensor, forms] : program_.forms)
      for (const RestingForm& form : forms) check_form({tensor}, form, made);
  }

  void check_form(TensorId id, const RestingForm& form, const std::vector<char>& made) {
    if (!known(id)) refuse("a resting form \"" + form.name + "\" is of a tensor that does not exist.");
    const Tensor& tensor = program_[id];
    if (tensor.persistent || tensor.part_of)
      refuse(tensor, "has a resting form \"" + form.name + "\", but only whole tensors that live within the step do.");
    form_ = &form, form_of_ = &tensor;
    bool restored = false;
    for (const auto* list : {&form.rest, &form.restore})
      for (size_t i = 0; i < list->size(); ++i) {
        const Op& op = (*list)[i];
        rests_ = list == &form.rest;
        at_ = i;
        check_op(op);
        for (TensorId input : op.inputs)
          if (input && !made[size_t(program_.whole(input).value)])
            refuse(op, "reads " + program_[input].name + ", which nothing writes.");
        for (TensorId output : op.outputs) restored |= list == &form.restore && output == id;
      }
    if (!restored) refuse(form_text() + "nothing that restores it writes it.");
  }

  const Program& program_;
  std::string_view after_;
  const Mesh* mesh_;
  std::vector<char> written_;                             // by tensor
  std::map<int32_t, std::map<int64_t, int64_t>> pieces_;  // by tensor that is written in parts: which bytes
  bool is_split_ = false;                                 // some tensor
  size_t at_ = 0;                                         // the op that is being checked
  // And the form whose it is, for messages; none: the program's.
  const RestingForm* form_ = nullptr;
  const Tensor* form_of_ = nullptr;
  bool rests_ = false;
  Signatures signatures_;
  std::unordered_set<uint64_t> sound_;  // signatures of ops that keep to their shape rules
};

}  // namespace

void verify(const Program& program, std::string_view after, const Mesh* mesh) { Verifier(program, after, mesh).run(); }

}  // namespace strata
