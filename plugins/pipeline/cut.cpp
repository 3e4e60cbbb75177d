// See cut.h.
#include "plugins/pipeline/cut.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "strata/error.h"

namespace strata::pipeline {
namespace {

// What belongs to no block goes with the op before it: the embedding with the first block, the loss with the last.
std::vector<int> chunks_of_ops(const Program& program, const std::vector<int>& first_block) {
  std::vector<int> chunk_of;
  size_t at = 0;
  for (const Op& op : program.ops) {
    while (at + 1 < first_block.size() && op.block >= first_block[at + 1]) ++at;
    chunk_of.push_back(int(at));
  }
  return chunk_of;
}

}  // namespace

Cut cut(const Program& program, std::vector<int> first_block) {
  Cut cut{.first_block = std::move(first_block), .chunk_of = {}, .crossing = {}};
  cut.chunk_of = chunks_of_ops(program, cut.first_block);
  cut.crossing.resize(size_t(cut.chunks() - 1));
  std::vector<int> maker(program.tensors.size(), -1);
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const int chunk = cut.chunk_of[i];
    for (TensorId id : program.ops[i].inputs) {
      const int from = id ? maker[size_t(id.value)] : -1;
      if (from < 0 || from == chunk) continue;
      if (from + 1 != chunk)
        throw Error("\"" + program[id].name.text() + "\" is made in chunk " + std::to_string(from) +
                    " of the model and read in chunk " + std::to_string(chunk) +
                    "; the model can be cut only where all that crosses is for the next chunk.");
      std::vector<TensorId>& crossing = cut.crossing[size_t(from)];
      if (std::find(crossing.begin(), crossing.end(), id) == crossing.end()) crossing.push_back(id);
    }
    for (TensorId id : program.ops[i].outputs) maker[size_t(id.value)] = chunk;
  }
  for (std::vector<TensorId>& crossing : cut.crossing) std::sort(crossing.begin(), crossing.end());
  return cut;
}

namespace {

void require_blocks(int64_t blocks, int stages, int chunks) {
  if (int64_t{stages} * chunks > blocks)
    throw Error("mesh.pipeline asks for " + std::to_string(stages) + " stages" +
                (chunks == 1 ? "" : " of " + std::to_string(chunks) + " chunks each") + ", but the model has " +
                std::to_string(blocks) + " blocks to divide among them; lower it" +
                (chunks == 1 ? "." : ", or plugins.pipeline.chunks."));
}

// Divides a list of blocks among chunks, each of which has one at least.
class Division {
 public:
  Division(const std::vector<ChunkCost>& blocks, int chunks, int kept) : blocks_(int(blocks.size())), chunks_(chunks) {
    time_.push_back(0), bytes_.push_back(0);
    for (const ChunkCost& cost : blocks) {
      time_.push_back(time_.back() + cost.forward + cost.input_gradient + cost.weight_gradient);
      // A parameter, its gradient and two states of an optimizer.
      bytes_.push_back(bytes_.back() + 4 * double(cost.parameters) + double(kept) * double(cost.activation));
    }
  }

  std::vector<int> divide() {
    constexpr double kAsGood = 1.02;
    const auto most = [](double a, double b) { return std::max(a, b); };
    longest_ = kAsGood * least([&](int a, int b) { return time(a, b); }, most);
    largest_ = least([&](int a, int b) { return bytes(a, b); }, most);
    least([&](int a, int b) { return time(a, b) * time(a, b); }, [](double a, double b) { return a + b; });
    std::vector<int> first_block;
    for (int chunk = chunks_, end = blocks_; chunk-- > 0; first_block.insert(first_block.begin(), end))
      end = begins_[size_t(chunk)][size_t(end)];
    return first_block;
  }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  double time(int a, int b) const { return time_[size_t(b)] - time_[size_t(a)]; }
  double bytes(int a, int b) const { return bytes_[size_t(b)] - bytes_[size_t(a)]; }

  // The least that chunks within the limits found so far come to together; begins_[chunk][end]: the first block of a
  // chunk that ends there.
  template <class Weight, class Together>
  double least(const Weight& weight, const Together& together) {
    std::vector<double> before(size_t(blocks_) + 1, kNever);
    before[0] = 0;
    begins_.clear();
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      std::vector<double> now(before.size(), kNever);
      begins_.emplace_back(before.size(), 0);
      for (int end = chunk + 1; end <= blocks_; ++end)
        for (int begin = chunk; begin < end; ++begin) {
          if (before[size_t(begin)] == kNever || time(begin, end) > longest_ || bytes(begin, end) > largest_) continue;
          const double all = together(before[size_t(begin)], weight(begin, end));
          if (all < now[size_t(end)]) now[size_t(end)] = all, begins_.back()[size_t(end)] = begin;
        }
      before = std::move(now);
    }
    return before.back();
  }

  const int blocks_, chunks_;
  std::vector<double> time_, bytes_;  // of all blocks before one
  double longest_ = kNever, largest_ = kNever;
  std::vector<std::vector<int>> begins_;
};

}  // namespace

std::vector<int> balanced_chunks(const std::vector<ChunkCost>& blocks, int stages, int chunks, int kept) {
  require_blocks(int64_t(blocks.size()), stages, chunks);
  return Division(blocks, stages * chunks, kept).divide();
}

std::vector<int> given_chunks(const std::vector<int64_t>& boundaries, int blocks, int stages, int chunks) {
  require_blocks(blocks, stages, chunks);
  const size_t wanted = size_t(stages) * size_t(chunks) - 1;
  if (boundaries.size() != wanted)
    throw Error("plugins.pipeline.boundaries names " + std::to_string(boundaries.size()) + " blocks, and " +
                std::to_string(stages) + " stages of " + std::to_string(chunks) + (chunks == 1 ? " chunk" : " chunks") +
                " have " + std::to_string(wanted) + " boundaries: the first block of each chunk but the first.");
  std::vector<int> first_block{0};
  for (int64_t first : boundaries) {
    if (first <= first_block.back() || first >= blocks)
      throw Error("plugins.pipeline.boundaries: " + std::to_string(first) + " comes after " +
                  std::to_string(first_block.back()) + "; boundaries ascend, from 1 to " + std::to_string(blocks - 1) +
                  ", the last block of the model.");
    first_block.push_back(int(first));
  }
  return first_block;
}

std::vector<ChunkCost> costs_of_chunks(const std::vector<ChunkCost>& blocks, const std::vector<int>& first_block) {
  std::vector<ChunkCost> costs;
  for (size_t b = 0; b < blocks.size(); ++b) {
    if (costs.size() < first_block.size() && int(b) == first_block[costs.size()]) costs.push_back({0, 0, 0, 0, 0, 0});
    costs.back() += blocks[b];
  }
  return costs;
}

std::map<int32_t, std::vector<int>> holders_of(const Program& program, const Cut& cut,
                                               const std::vector<int>& stage_of) {
  std::map<int32_t, std::vector<int>> all;
  for (size_t i = 0; i < program.ops.size(); ++i)
    for (TensorId id : program.ops[i].inputs) {
      if (!id || program[id].role != Role::parameter) continue;
      std::vector<int>& holders = all[id.value];
      const int stage = stage_of[size_t(cut.chunk_of[i])];
      const auto at = std::lower_bound(holders.begin(), holders.end(), stage);
      if (at == holders.end() || *at != stage) holders.insert(at, stage);
    }
  return all;
}

void require_one_sum(const Program& program, const std::map<int32_t, std::vector<int>>& holders) {
  std::map<int32_t, int> readers;
  for (const Op& op : program.ops)
    for (TensorId id : op.inputs)
      if (id && program[id].role == Role::parameter) ++readers[id.value];
  for (const auto& [id, stages] : holders)
    if (stages.size() > 1 && readers[id] > 2 && !program[{id}].lasting->frozen)
      throw Error("\"" + program[{id}].name.text() + "\" is used by " + std::to_string(readers[id]) +
                  " ops on several stages; their gradients cannot be summed in the order of one rank, as "
                  "run.reproducible promises. Unset it, or set mesh.pipeline = 1.");
}

}  // namespace strata::pipeline
