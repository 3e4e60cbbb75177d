// Chunks, halves of the backward pass, and what passes need of each other; see passes.h.
#include "engine/planning/passes.h"

#include <algorithm>
#include <utility>

#include "strata/op_kind.h"

namespace strata {
namespace {

constexpr int kUnknown = -1;

// The op of the program that makes each tensor, the last where there are several; -1: none.
std::vector<int32_t> makers(const Program& program) {
  std::vector<int32_t> maker(program.tensors.size(), -1);
  for (size_t i = 0; i < program.ops.size(); ++i)
    for (TensorId id : program.ops[i].outputs) maker[size_t(id.value)] = int32_t(i);
  return maker;
}

bool is_forward(const Op& op) { return op.step_part == StepPart::forward; }

int chunk_of_block(int block, const std::vector<int>& chunks) {
  const auto next = std::upper_bound(chunks.begin(), chunks.end(), block);
  return std::max(0, int(next - chunks.begin()) - 1);
}

// An op outside of blocks goes with what it reads: a forward op with the last chunk that it needs; a backward op with
// the last to run backward, which is the first, or if it reads no gradient yet (a loss), with the forward ops it reads.
// What reads nothing goes with who reads it.
void assign_chunks(Program& program, const std::vector<int>& chunks) {
  const std::vector<int32_t> maker = makers(program);
  auto& ops = program.ops;
  for (Op& op : ops) {
    op.chunk = int16_t(op.block >= 0 ? chunk_of_block(op.block, chunks) : kUnknown);
    if (op.chunk != kUnknown) continue;
    int forward = kUnknown, backward = kUnknown;
    for (TensorId id : op.inputs) {
      if (!id || maker[size_t(id.value)] < 0) continue;
      const Op& before = ops[size_t(maker[size_t(id.value)])];
      if (&before >= &op || before.chunk == kUnknown) continue;
      if (is_forward(before))
        forward = std::max(forward, int(before.chunk));
      else
        backward = backward == kUnknown ? before.chunk : std::min(backward, int(before.chunk));
    }
    op.chunk = int16_t(is_forward(op) || backward == kUnknown ? forward : backward);
  }
  std::vector<int> reader(program.tensors.size(), kUnknown);
  for (size_t i = ops.size(); i-- > 0;) {
    Op& op = ops[i];
    int known = kUnknown;
    for (TensorId id : op.outputs) known = std::max(known, reader[size_t(id.value)]);
    if (op.chunk == kUnknown) op.chunk = int16_t(std::max(0, known));
    for (TensorId id : op.inputs) {
      if (!id) continue;
      int& first = reader[size_t(id.value)];
      if (first == kUnknown || (is_forward(op) ? op.chunk < first : op.chunk > first)) first = op.chunk;
    }
  }
}

// The backward ops on which the gradient of an activation, a loss, another step output or another rank depends.
std::vector<char> leading_ops(const Program& program, const std::vector<TensorId>& activation_gradients) {
  std::vector<char> asked(program.tensors.size(), false), leads(program.ops.size(), false);
  for (TensorId id : activation_gradients) asked[size_t(id.value)] = true;
  for (TensorId id : program.losses) asked[size_t(id.value)] = true;
  for (size_t i = program.ops.size(); i-- > 0;) {
    const Op& op = program.ops[i];
    if (is_forward(op)) continue;
    leads[i] = op.outputs.empty() || std::any_of(op.outputs.begin(), op.outputs.end(), [&](TensorId id) {
                 return asked[size_t(id.value)] || program[id].step_output;
               });
    if (!leads[i]) continue;
    for (TensorId id : op.inputs)
      if (id) asked[size_t(id.value)] = true;
  }
  return leads;
}

std::string where_of(const ScheduleStage& schedule, size_t pass) {
  return "pass " + std::to_string(pass) + " of the schedule, " + text(schedule.order[pass]) + ": ";
}

void require_chunks(const std::vector<int>& chunks, int blocks) {
  bool right = !chunks.empty() && chunks.front() == 0 && chunks.size() <= INT16_MAX;
  for (size_t c = 1; right && c < chunks.size(); ++c) right = chunks[c] > chunks[c - 1] && chunks[c] < blocks;
  if (right) return;
  std::string list;
  for (int first : chunks) list += (list.empty() ? "" : ", ") + std::to_string(first);
  throw Error("the schedule's chunks begin with the blocks {" + list + "}; the first begins with block 0, each other " +
              "with a later block than the one before, and the model has " + std::to_string(blocks) + " blocks.");
}

}  // namespace

std::string text(const Pass& pass) {
  constexpr std::string_view names[] = {"forward", "backward", "input gradient", "weight gradient"};
  return std::string(names[size_t(pass.part)]) + " of chunk " + std::to_string(pass.chunk) + ", microbatch " +
         std::to_string(pass.microbatch);
}

std::vector<Pass> default_order(int microbatches, int chunks, bool backward) {
  std::vector<Pass> order;
  for (int m = 0; m < microbatches; ++m) {
    for (int c = 0; c < chunks; ++c) order.push_back({Pass::Part::forward, c, m});
    for (int c = chunks; backward && c-- > 0;) order.push_back({Pass::Part::backward, c, m});
  }
  return order;
}

void ScheduleStage::cut(std::vector<int> first_blocks) {
  require_chunks(first_blocks, blocks);
  chunks = std::move(first_blocks);
  order = default_order(microbatches, int(chunks.size()), true);
}

int blocks_of(const Program& program) {
  int blocks = 0;
  for (const Op& op : program.ops) blocks = std::max(blocks, op.block + 1);
  return blocks;
}

PassTable::PassTable(Program& single, const std::vector<TensorId>& activation_gradients,
                     const std::vector<int>& chunks) {
  require_chunks(chunks, blocks_of(single));
  assign_chunks(single, chunks);
  chunks_ = int(chunks.size());
  ops_.resize(chunks.size());
  const std::vector<char> leads = leading_ops(single, activation_gradients);
  maker_.assign(single.tensors.size(), -1);
  for (size_t i = 0; i < single.ops.size(); ++i) {
    const Op& op = single.ops[i];
    const Pass::Part part = is_forward(op) ? Pass::Part::forward
                            : leads[i]     ? Pass::Part::input_gradient
                                           : Pass::Part::weight_gradient;
    unit_of_.push_back(unit(part, op.chunk));
    ops_[size_t(op.chunk)][size_t(part)].push_back(int32_t(i));
    if (!is_forward(op)) ops_[size_t(op.chunk)][size_t(Pass::Part::backward)].push_back(int32_t(i));
    for (TensorId id : op.outputs) maker_[size_t(id.value)] = unit_of_.back();
  }
  find_needs(single);
}

// By the tensors that units hand on; and by persistent tensors that ops update, which keep the order that forward and
// backward pass have without a schedule.
void PassTable::find_needs(const Program& single) {
  needs_.assign(size_t(chunks_ * kParts), std::vector<char>(size_t(chunks_ * kParts), false));
  std::vector<std::vector<int>> touched(single.tensors.size());  // by persistent tensor: units so far
  std::vector<int> wrote(single.tensors.size(), -1);
  const auto visit = [&](size_t i) {
    const int own = unit_of_[i];
    const auto need = [&](int other) {
      if (other >= 0 && other != own) needs_[size_t(own)][size_t(other)] = true;
    };
    for (TensorId id : single.ops[i].inputs) {
      if (!id) continue;
      const TensorId whole = single.whole(id);
      need(wrote[size_t(whole.value)]);
      if (single[whole].persistent) touched[size_t(whole.value)].push_back(own);
    }
    for (TensorId id : single.ops[i].outputs) {
      const TensorId whole = single.whole(id);
      for (int other : touched[size_t(whole.value)]) need(other);
      need(wrote[size_t(whole.value)]);
      touched[size_t(whole.value)].clear();
      wrote[size_t(whole.value)] = own;
    }
  };
  for (const bool forward : {true, false})
    for (size_t i = 0; i < single.ops.size(); ++i)
      if (is_forward(single.ops[i]) == forward) visit(i);
}

std::vector<int> PassTable::units(const Pass& pass) const {
  if (pass.part != Pass::Part::backward) return {unit(pass.part, pass.chunk)};
  return {unit(Pass::Part::input_gradient, pass.chunk), unit(Pass::Part::weight_gradient, pass.chunk)};
}

Pass PassTable::pass_of(int unit, int microbatch) const {
  constexpr Pass::Part parts[] = {Pass::Part::forward, Pass::Part::input_gradient, Pass::Part::weight_gradient};
  return {parts[unit % kParts], unit / kParts, microbatch};
}

bool PassTable::makes(const Pass& pass, TensorId tensor) const {
  const std::vector<int> own = units(pass);
  int maker = maker_[size_t(tensor.value)];
  if (maker < 0 || pass_of(maker, 0).part == Pass::Part::forward) maker = unit(Pass::Part::weight_gradient, 0);
  return std::find(own.begin(), own.end(), maker) != own.end();
}

void PassTable::require_pass(const Pass& pass, const ScheduleStage& schedule, const std::string& where) const {
  const int microbatches = schedule.microbatches;
  if (pass.chunk < 0 || pass.chunk >= chunks_)
    throw Error(where + "there " + (chunks_ == 1 ? "is 1 chunk" : "are " + std::to_string(chunks_) + " chunks") +
                ", counted from 0.");
  if (pass.microbatch >= microbatches || pass.microbatch < -microbatches)
    throw Error(where + "there " +
                (microbatches == 1 ? "is 1 microbatch" : "are " + std::to_string(microbatches) + " microbatches") +
                ", counted from 0, in the step before from -" + std::to_string(microbatches) + " to -1.");
  if (pass.microbatch < 0 && schedule.phases.has_first_step())
    throw Error(where +
                "before the first step there is none. Declare a phase of step 1 alone (stage phases), and leave "
                "it out there.");
}

std::vector<std::vector<char>> PassTable::left_units(const ScheduleStage& schedule) const {
  std::vector<char> has_ops(needs_.size(), false);
  for (int u : unit_of_) has_ops[size_t(u)] = true;
  std::vector<std::vector<char>> left(size_t(schedule.microbatches), has_ops);
  for (const Pass& pass : schedule.order)
    if (pass.microbatch >= 0)
      for (int u : units(pass)) left[size_t(pass.microbatch)][size_t(u)] = false;
  return left;
}

std::vector<Pass> PassTable::left(const ScheduleStage& schedule) const {
  std::vector<Pass> passes;
  const std::vector<std::vector<char>> left = left_units(schedule);
  for (size_t m = 0; m < left.size(); ++m)
    for (size_t u = 0; u < left[m].size(); ++u)
      if (left[m][u]) passes.push_back(pass_of(int(u), int(m)));
  return passes;
}

// What is sent later is made in this step, and is the last that the pass does.
void PassTable::check_sent_later(const ScheduleStage& schedule) const {
  for (size_t i = 0; i < schedule.sent_later.size(); ++i) {
    const Pass& pass = schedule.sent_later[i];
    const std::string where = "what the schedule sends in the next step, of the " + text(pass) + ": ";
    const auto is_same = [&](const Pass& other) {
      return other.part == pass.part && other.chunk == pass.chunk && other.microbatch == pass.microbatch;
    };
    if (pass.microbatch < 0 || std::none_of(schedule.order.begin(), schedule.order.end(), is_same))
      throw Error(where + "it is a pass of this step's microbatches that this step runs.");
    if (std::any_of(schedule.sent_later.begin(), schedule.sent_later.begin() + int64_t(i), is_same))
      throw Error(where + "it is named twice.");
    if (schedule.phases.has_first_step() && !schedule.phases.is_first_step())
      throw Error(where + "before the first step there is none. Declare a phase of step 1 alone (stage phases).");
  }
}

void PassTable::check(const ScheduleStage& schedule) const {
  const size_t units_in_all = needs_.size();
  for (size_t p = 0; p < schedule.order.size(); ++p) require_pass(schedule.order[p], schedule, where_of(schedule, p));
  for (const ScheduleStage::Receive& receive : schedule.receives)
    require_pass(receive.pass, schedule, "a receive of the schedule, for the " + text(receive.pass) + ": ");
  check_sent_later(schedule);
  const std::vector<std::vector<char>> left = left_units(schedule);
  std::vector<std::vector<char>> done(left.size(), std::vector<char>(units_in_all, false)), before = left;
  for (auto& ran : before)  // what was not left to this step has run
    for (char& unit : ran) unit = !unit;
  for (size_t p = 0; p < schedule.order.size(); ++p) {
    const Pass& pass = schedule.order[p];
    const bool begun = pass.microbatch < 0;
    const size_t m = size_t(begun ? pass.microbatch + schedule.microbatches : pass.microbatch);
    auto& ran = begun ? before[m] : done[m];
    const std::vector<int> own = units(pass);
    const auto is_left = [&](int u) { return left[m][size_t(u)]; };
    if (begun && std::none_of(own.begin(), own.end(), is_left))
      throw Error(where_of(schedule, p) + "it has run in the step that it was begun in.");
    for (int u : own)
      if ((!begun || is_left(u)) && std::exchange(ran[size_t(u)], true))
        throw Error(where_of(schedule, p) + "it has run before.");
    for (int u : own)
      for (size_t other = 0; other < units_in_all; ++other)
        if (needs_[size_t(u)][other] && !ran[other])
          throw Error(where_of(schedule, p) + "it needs the " + text(pass_of(int(other), pass.microbatch)) +
                      ", which has not run yet.");
  }
  if (schedule.phases.is_first_step()) return;  // whether others run what it leaves, the plan of the run checks
  for (const Pass& pass : this->left(schedule))
    if (!before[size_t(pass.microbatch)][size_t(units(pass).front())])
      throw Error("the schedule never runs the " + text(pass) + ".");
}

}  // namespace strata
