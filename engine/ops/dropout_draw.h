// What is dropped, and how rows of numbers lose it: the draw of `dropout`, which others make too (attention). Element
// `index` of all draws word index % 4 of the Philox block index / 4 of its stream in this step, and is dropped where
// that is below the threshold. Nothing is stored.
#pragma once
#include <cstdint>

#include "strata/random.h"

namespace strata {

struct DropoutDraw {
  uint64_t seed, stream;
  // The scalars [run] seed and step, and attribute "stream" of the op.
  DropoutDraw(double run_seed, double step, int64_t of_op)
      : seed(uint64_t(run_seed)), stream(uint64_t(of_op) ^ (uint64_t(step) * 0x9E3779B97F4A7C15ull)) {}
};

// Below it a word drops its element.
inline uint32_t dropout_threshold(double probability) { return uint32_t(probability * 4294967296.0); }

inline bool is_kept(const DropoutDraw& draw, uint64_t index, uint32_t threshold) {
  return random_block(draw.seed, draw.stream, index / 4)[index % 4] >= threshold;
}

// y = x·factor where kept, else 0, for elements `first` to `first + count` of all; y may be x. Runs that begin at a
// multiple of 4 are fastest.
void drop_row(const float* x, float* y, int64_t count, int64_t first, uint32_t threshold, float factor,
              const DropoutDraw& draw);

}  // namespace strata
