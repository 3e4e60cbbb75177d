// Which moves belong to an update, and their slices; see slice_updates.h.
#include "engine/planning/slice_updates.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>

#include "strata/optimizer.h"

namespace strata {
namespace {

bool is_read(const Op& op) { return op.stream == Stream::read && op.kind->name == "move"; }
bool is_write(const Op& op) { return op.stream == Stream::write && op.kind->name == "move"; }
bool is_cast(const Op& op) { return op.kind->name == "cast" && op.inputs.size() == 1 && op.accumulate == 0; }

class Slicer {
 public:
  Slicer(Program& program, int64_t bytes)
      : program_(program),
        bytes_(bytes),
        written_by_(program.tensors.size(), -1),
        chain_of_(program.ops.size(), -1),
        made_(program.tensors.size()) {}

  int run() {
    for (size_t i = 0; i < program_.ops.size(); ++i) look_at(int32_t(i));
    std::erase_if(chains_, [](const Chain& chain) { return chain.reads.empty() && chain.writes.empty(); });
    for (const Chain& chain : chains_) all_ += parameter_of(chain).bytes();
    std::vector<Chain> chosen;
    for (Chain& chain : chains_)
      if (choose_rows(chain)) chosen.push_back(std::move(chain));
    if (chosen.empty()) return 0;
    write(chosen);
    return int(chosen.size());
  }

 private:
  // An update, what reads its tensors from the disk, what it is cast to, and what writes all that there.
  struct Chain {
    int32_t update;
    std::vector<int32_t> reads{}, casts{}, writes{};
    int64_t rows = 0;  // of a slice
  };

  const Tensor& parameter_of(const Chain& chain) const {
    return program_[program_.ops[size_t(chain.update)].outputs[0]];
  }

  void look_at(int32_t i) {
    const Op& op = program_.ops[size_t(i)];
    if (is_elementwise_update(*op.kind) && !op.inputs[UpdateView::kSeed]) {  // what rounds asks where an element is
      Chain chain{.update = i};
      for (TensorId id : op.outputs)
        if (const int32_t maker = id ? written_by_[size_t(id.value)] : -1;
            maker >= 0 && is_read(program_.ops[size_t(maker)]))
          chain.reads.push_back(maker);
      chain_of_[size_t(i)] = int32_t(chains_.size());
      chains_.push_back(std::move(chain));
    } else if (op.step_part == StepPart::update && (is_cast(op) || is_write(op))) {
      const int32_t maker = written_by_[size_t(op.inputs[0].value)];
      if (const int32_t chain = maker < 0 ? -1 : chain_of_[size_t(maker)]; chain >= 0) {
        (is_cast(op) ? chains_[size_t(chain)].casts : chains_[size_t(chain)].writes).push_back(i);
        if (is_cast(op)) chain_of_[size_t(i)] = chain;
      }
    }
    for (TensorId id : op.outputs) written_by_[size_t(program_.whole(id).value)] = i;
  }

  // The tensors of an op that have a row for each of the parameter.
  std::vector<TensorId*> cut_of(Op& op) const {
    std::vector<TensorId*> list;
    const Shape& shape = program_[op.outputs[0]].shape;
    for (auto* ids : {&op.inputs, &op.outputs})
      for (TensorId& id : *ids)
        if (id && program_[id].shape == shape) list.push_back(&id);
    return list;
  }

  // Slices begin with a block of the disk in every tensor that is moved.
  bool choose_rows(Chain& chain) {
    const Tensor& parameter = parameter_of(chain);
    const int64_t rows = parameter.shape[0];
    if (parameter.bytes() < 2 * bytes_) return false;
    int64_t unit = 1;
    const auto fits = [&](int32_t i) {
      Op& op = program_.ops[size_t(i)];
      for (const TensorId* id : cut_of(op)) {
        const Tensor& tensor = program_[*id];
        // Ranks' shares may have other sizes elsewhere; a part of a part is none.
        if (tensor.part_of || !tensor.layout.empty() || tensor.shape != parameter.shape) return false;
        const int64_t row = tensor.bytes() / rows;
        unit = std::lcm(unit, kStorageAlignment / std::gcd(kStorageAlignment, row));
      }
      return true;
    };
    if (!fits(chain.update)) return false;
    for (const auto* list : {&chain.reads, &chain.casts, &chain.writes})
      if (!std::all_of(list->begin(), list->end(), fits)) return false;
    const int64_t row = parameter.bytes() / rows;
    const int64_t bytes = std::max(bytes_, std::min(parameter.bytes() / kSlices, all_ / kLeastShare));
    const int64_t least = (bytes + row - 1) / row;
    chain.rows = std::max(unit, (least + unit - 1) / unit * unit);
    return chain.rows < rows;
  }

  // Reads that stand together become one, slice by slice, and so do writes.
  void write(const std::vector<Chain>& chains) {
    std::map<int32_t, std::vector<int32_t>> together;  // by place: which ops are emitted there, slice by slice
    std::vector<const Chain*> of(program_.ops.size(), nullptr);
    for (const Chain& chain : chains) {
      for (const auto* list : {&chain.reads, &chain.casts, &chain.writes})
        for (int32_t i : *list) of[size_t(i)] = &chain;
      of[size_t(chain.update)] = &chain;
      together[chain.update] = {chain.update};
      for (int32_t i : chain.casts) together[i] = {i};
      for (const auto& run : runs(chain.reads)) together[run.back()] = run;
      for (const auto& run : runs(chain.writes)) together[run.front()] = run;
    }
    std::vector<Op> ops = std::move(program_.ops);
    program_.ops.clear();
    for (size_t i = 0; i < ops.size(); ++i) {
      if (!of[i]) {
        program_.ops.push_back(std::move(ops[i]));
        continue;
      }
      const auto here = together.find(int32_t(i));
      if (here == together.end()) continue;
      const int64_t rows = program_[ops[i].outputs[0]].shape[0];
      std::vector<Cut> cuts;
      for (int32_t op : here->second) cuts.push_back(cut(ops[size_t(op)]));
      for (int64_t begin = 0; begin < rows; begin += of[i]->rows)
        for (const Cut& cut : cuts) emit(cut, begin, std::min(begin + of[i]->rows, rows));
    }
  }

  // An op that is emitted slice by slice, and which of its tensors have slices.
  struct Cut {
    Op op;
    std::vector<TensorId> whole;
  };
  Cut cut(const Op& op) const {
    Cut cut{op, {}};
    for (const TensorId* id : cut_of(cut.op)) cut.whole.push_back(*id);
    return cut;
  }

  // Ops with nothing but others of their stream between them: elsewhere a read would begin later than it was to, and a
  // write before what it waits for.
  std::vector<std::vector<int32_t>> runs(std::vector<int32_t> list) const {
    std::sort(list.begin(), list.end());
    std::vector<std::vector<int32_t>> runs;
    for (int32_t i : list) {
      const auto begin = program_.ops.begin() + (runs.empty() ? 0 : runs.back().back() + 1);
      const bool apart = std::any_of(begin, program_.ops.begin() + i,
                                     [&](const Op& op) { return op.stream != program_.ops[size_t(i)].stream; });
      if (runs.empty() || apart) runs.emplace_back();
      runs.back().push_back(i);
    }
    return runs;
  }

  void emit(const Cut& cut, int64_t begin, int64_t end) {
    program_.ops.push_back(cut.op);
    for (auto* ids : {&program_.ops.back().inputs, &program_.ops.back().outputs})
      for (TensorId& id : *ids)
        if (std::find(cut.whole.begin(), cut.whole.end(), id) != cut.whole.end()) id = slice(id, begin, end);
  }

  TensorId slice(TensorId id, int64_t begin, int64_t end) {
    std::vector<std::pair<int64_t, TensorId>>& parts = made_[size_t(id.value)];
    const auto known = std::lower_bound(parts.begin(), parts.end(), begin,
                                        [](const auto& part, int64_t first) { return part.first < first; });
    if (known != parts.end() && known->first == begin) return known->second;
    const Tensor& tensor = program_[id];
    Shape shape = tensor.shape;
    const int64_t row = tensor.bytes() / shape[0];
    shape[0] = end - begin;
    const Name name = tensor.name + ".rows." + std::to_string(begin);
    const TensorId made = program_.add_part(id, name, std::move(shape), begin * row);
    parts.insert(known, {begin, made});
    return made;
  }

  // Slices of a tensor: more hide no more of its way, and all are planned. Unless one is so large a share of all that
  // is updated (1 / kLeastShare) that the step would be longer for it.
  static constexpr int64_t kSlices = 4, kLeastShare = 64;

  Program& program_;
  const int64_t bytes_;
  int64_t all_ = 0;                  // bytes of all parameters whose updates could be cut
  std::vector<int32_t> written_by_;  // by tensor: the last op that wrote it so far
  std::vector<int32_t> chain_of_;    // by op
  std::vector<Chain> chains_;
  std::vector<std::vector<std::pair<int64_t, TensorId>>> made_;  // by tensor: its slices and their first rows
};

}  // namespace

int slice_updates(Program& program, int64_t bytes) { return Slicer(program, bytes).run(); }

}  // namespace strata
