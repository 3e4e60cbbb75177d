// The model's forward program cut into chunks of blocks: which op belongs to which, and what crosses from one to the
// next. Where chunks lie and when they run is another thing (strata/pipeline_schedule.h).
#pragma once
#include <map>
#include <vector>

#include "strata/pipeline_schedule.h"
#include "strata/program.h"

namespace strata::pipeline {

struct Cut {
  std::vector<int> first_block;                 // by chunk, ascending; the first is 0
  std::vector<int> chunk_of;                    // by op, ascending
  std::vector<std::vector<TensorId>> crossing;  // by chunk but the last: what it makes for the next one, in order

  int chunks() const { return int(first_block.size()); }
};

// Throws Error where what a chunk makes is read by another than the next one.
Cut cut(const Program& program, std::vector<int> first_block);

// The first block of each of so many chunks: the longest chunk takes as little time as can be; of such cuts (2% longer
// ones count) the chunk with most bytes has as few as can be, and of those chunks are as even in time as can be.
// `kept`: microbatches whose activations a stage keeps. Throws Error for more chunks than blocks.
std::vector<int> balanced_chunks(const std::vector<ChunkCost>& blocks, int stages, int chunks, int kept);

// The same with the first block of each chunk but the first as the user gives them. Throws Error for what cannot be.
std::vector<int> given_chunks(const std::vector<int64_t>& boundaries, int blocks, int stages, int chunks);

// What the chunks of a cut take and keep.
std::vector<ChunkCost> costs_of_chunks(const std::vector<ChunkCost>& blocks, const std::vector<int>& first_block);

// By parameter: the stages that read it, ascending.
std::map<int32_t, std::vector<int>> holders_of(const Program& program, const Cut& cut,
                                               const std::vector<int>& stage_of);

// Sums over stages are taken in their order. That is the order of one rank where each adds one number: Error for
// others.
void require_one_sum(const Program& program, const std::map<int32_t, std::vector<int>>& holders);

}  // namespace strata::pipeline
