// What stretches rotary positions to longer contexts than a model was first trained for, as the attributes of the op.
#pragma once
#include "plugins/gpt/gpt_config.h"
#include "strata/program.h"

// Sets base, and what differs from plain rotary positions, on `attributes`, for layers that see all tokens or local
// ones. `sequence_length`: "dynamic" scaling turns by it where it exceeds the original context, and "longrope" by its
// long factors.
void set_rotary(const GptConfig& config, bool local, int64_t sequence_length, strata::Attributes& attributes);
// Numbers of a head that turn, once the head's size is known.
inline int64_t rotary_size_of(const GptConfig& config) {
  return config.rotary_size > 0 ? config.rotary_size : config.head_size;
}
// The amplitude that a scaling has when nothing says it (YaRN, arXiv 2309.00071, section 3.4; LongRoPE, as Phi-3 has
// it). `original`: the context before it, in tokens.
double usual_amplitude(const std::string& scaling, double factor, int64_t original);
