// The shape of a decoder-only transformer: the options of the gpt plugin as plain data.
#pragma once
#include <cstdint>
#include <string>

#include "strata/tensor.h"

// More is a slip: of blocks, and of what the other sizes count.
inline constexpr int64_t kMostLayers = 65536, kMostOfASize = strata::kMostElements;

struct GptConfig {
  int64_t layers = 4, hidden = 256, heads = 4;
  int64_t kv_heads = 0;   // 0: heads
  int64_t head_size = 0;  // 0: hidden / heads
  int64_t ffn = 0;        // 0: 4 x hidden
  int64_t vocabulary = 256, context = 1024;
  std::string positions = "learned";  // or "rotary"
  double rotary_base = 10000;
  std::string norm = "layer_norm";  // or "rms_norm"
  double norm_epsilon = 1e-5;
  std::string activation = "gelu";  // or "swiglu"
  bool bias = true, qkv_bias = false, tied = true;
  double dropout = 0;
};
