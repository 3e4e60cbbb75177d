// Names of activations here and in config.json; the first of equals is written.
#pragma once
#include <array>
#include <string_view>

struct ActivationName {
  std::string_view ours, theirs;
};

inline constexpr std::array kGpt2Activations = {
    ActivationName{"gelu", "gelu_new"}, ActivationName{"gelu", "gelu_pytorch_tanh"},
    ActivationName{"gelu_exact", "gelu"}, ActivationName{"relu", "relu"}, ActivationName{"squared_relu", "relu2"}};
inline constexpr std::array kGatedActivations = {
    ActivationName{"swiglu", "silu"}, ActivationName{"swiglu", "swish"}, ActivationName{"geglu", "gelu_pytorch_tanh"},
    ActivationName{"geglu", "gelu_new"}, ActivationName{"geglu_exact", "gelu"}};
