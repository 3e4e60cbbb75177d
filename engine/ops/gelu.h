// The constants of the tanh approximation of GELU (Hendrycks and Gimpel, 1606.08415):
// x sigmoid(2 kGelu (x + kCubic x^3)), kGelu the root of 2 / pi.
#pragma once

namespace strata {

constexpr float kGelu = 0.7978845608f, kCubic = 0.044715f;

}  // namespace strata
