// AdamW with moments in eight bits (Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit optimizers via block-wise
// quantization", arXiv 2110.02861): dynamic tree codes, one scale a block. Not the plugin.
#pragma once
#include <array>
#include <cstdint>

#include "strata/threads.h"

namespace strata::adamw8bit {

inline constexpr int64_t kBlock = 256;  // elements that share a scale
inline int64_t blocks(int64_t count) { return (count + kBlock - 1) / kBlock; }

// The values in [-1, 1] of the 256 codes. Values are the middles of equal cells that divide each power of ten: 2^i
// cells between 10^(i-7) and 10^(i-6), i = 0 … 6, for the signed map (code = sign · 128 + number), 2^(i+1) for the
// unsigned one; and 0 and 1. Code 0 is 0, so zero bytes are zero moments. The signed map's -0 (code 128) stands for 1.
using Map = std::array<float, 256>;
const Map& signed_map();
const Map& unsigned_map();

// The code whose cell |x| <= 1 falls into. Magnitudes below half the smallest value become 0; with `nonzero`, only 0
// does: a second moment that vanished while the first did not would make an enormous step.
uint8_t encode_signed(float x);
uint8_t encode_unsigned(float x, bool nonzero);

struct Settings {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double learning_rate = 3e-4;
  double weight_decay = 0.1;
  double gradient_scale = 1;
};

// Updates rows × columns parameters and their moments; `step` counts from 1. Scales: (rows, blocks(columns)), so that
// ranks that hold some of the rows have whole blocks.
void update(Threads& threads, float* parameter, const float* gradient, uint8_t* m, float* m_scale, uint8_t* v,
            float* v_scale, int64_t rows, int64_t columns, const Settings& settings, double step);

// The same for a part of a vector (or of a row) of `whole` elements, `count` from `begin` on, whose blocks may begin or
// end on other ranks: first the largest magnitudes of the moments after this step of each of the whole's blocks, 0
// where nothing of a block is here; then, with the largest of all ranks, the update. Scales are those of the whole's
// blocks, on every rank.
void largest_of_part(const float* gradient, const uint8_t* m, const float* m_scale, const uint8_t* v,
                     const float* v_scale, int64_t begin, int64_t count, int64_t whole, const Settings& settings,
                     double step, float* largest_m, float* largest_v);
void update_part(float* parameter, const float* gradient, uint8_t* m, float* m_scale, uint8_t* v, float* v_scale,
                 const float* largest_m, const float* largest_v, int64_t begin, int64_t count, int64_t whole,
                 const Settings& settings, double step);

}  // namespace strata::adamw8bit
