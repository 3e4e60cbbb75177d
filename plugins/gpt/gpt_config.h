// The shape of a decoder-only transformer: the options of the gpt plugin as plain data.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

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
  std::string activation = "gelu";  // or what gpt.cpp lists
  bool bias = true, qkv_bias = false, tied = true;
  double dropout = 0, attention_dropout = 0;

  // Rotary positions: how much of a head turns, and what stretches angles to longer contexts (rotary.h).
  int64_t rotary_size = 0;  // 0: the head
  std::string rotary_scaling = "none";
  double rotary_factor = 1;
  int64_t rotary_original_context = 0;  // 0: context
  double rotary_low = 1, rotary_high = 32;
  double rotary_amplitude = 0;  // 0: as the scaling has it
  // Of longrope: by what each pair's angle is divided, in sequences up to the original context and in longer ones.
  std::vector<double> rotary_short{}, rotary_long{};

  bool output_bias = false, mlp_bias = false;  // where bias is off
  bool query_key_norm = false, post_norms = false, norm_from_one = false, scaled_embedding = false;

  // Attention: what scores are divided by (its square root; 0: the head's size), soft caps (0: none), and layers that
  // see `window` tokens only.
  double score_scalar = 0, score_cap = 0, logit_cap = 0;
  int64_t window = 0;                      // tokens; 0: all
  std::vector<std::string> layer_kinds{};  // "local" or "global", repeated over the layers; empty: local with a window
  double local_rotary_base = 0;            // 0: local layers turn as global ones

  std::string family{};  // of the folder it came from, such as "llama"

  bool is_local(int64_t layer) const {
    if (window == 0) return false;
    return layer_kinds.empty() || layer_kinds[size_t(layer) % layer_kinds.size()] == "local";
  }
};
