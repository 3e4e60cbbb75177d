// Block by block: decode the moments, update, encode them again; see adamw8bit_kernel.h.
#include "plugins/adamw8bit/adamw8bit_kernel.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "plugins/adamw8bit/adamw8bit_codec.h"
#include "strata/simd.h"

namespace strata::adamw8bit {
namespace {

Map make_map(int first, bool has_sign) {
  Map map{};
  for (int code = 0; code < 256; ++code) map[size_t(code)] = code_value(code, first, has_sign);
  return map;
}

struct Factors {
  float gradient_scale, weight1, beta2, weight2, decay, step_size, inverse_root, epsilon;
};

STRATA_INLINE float largest(const float* x, int64_t count) {
  uint32_t top = 0;  // magnitudes order like their bits
  for (int64_t i = 0; i < count; ++i) top = std::max(top, std::bit_cast<uint32_t>(x[i]) & 0x7FFFFFFF);
  return std::bit_cast<float>(top);
}

STRATA_SIMD void update_block(float* parameter, const float* gradient, uint8_t* m, float* m_scale, uint8_t* v,
                              float* v_scale, int64_t count, const Factors& given, const float* signed_values,
                              const float* unsigned_values) {
  const Factors f = given;
  float first[kBlock], second[kBlock];
  const float old_m = *m_scale, old_v = *v_scale;
  for (int64_t i = 0; i < count; ++i) first[i] = signed_values[m[i]] * old_m;
  for (int64_t i = 0; i < count; ++i) second[i] = unsigned_values[v[i]] * old_v;
  for (int64_t i = 0; i < count; ++i) {
    const float g = gradient[i] * f.gradient_scale;
    first[i] += f.weight1 * (g - first[i]);
    second[i] = f.beta2 * second[i] + f.weight2 * g * g;
    parameter[i] =
        parameter[i] * f.decay - f.step_size * first[i] / (std::sqrt(second[i]) * f.inverse_root + f.epsilon);
  }
  *m_scale = largest(first, count);
  *v_scale = largest(second, count);
  const float to_m = reciprocal(*m_scale), to_v = reciprocal(*v_scale);
  for (int64_t i = 0; i < count; ++i) m[i] = signed_code(first[i] * to_m);
  for (int64_t i = 0; i < count; ++i) v[i] = unsigned_code(second[i] * to_v, true);
}

}  // namespace

const Map& signed_map() {
  static const Map map = make_map(1, true);
  return map;
}
const Map& unsigned_map() {
  static const Map map = make_map(2, false);
  return map;
}

uint8_t encode_signed(float x) { return signed_code(x); }
uint8_t encode_unsigned(float x, bool nonzero) { return unsigned_code(x, nonzero); }

void update(Threads& threads, float* parameter, const float* gradient, uint8_t* m, float* m_scale, uint8_t* v,
            float* v_scale, int64_t rows, int64_t columns, const Settings& s, double step) {
  const double correction1 = 1 - std::pow(s.beta1, step), correction2 = 1 - std::pow(s.beta2, step);
  const Factors factors{float(s.gradient_scale),
                        float(1 - s.beta1),
                        float(s.beta2),
                        float(1 - s.beta2),
                        float(1 - s.learning_rate * s.weight_decay),
                        float(s.learning_rate / correction1),
                        float(1 / std::sqrt(correction2)),
                        float(s.epsilon)};
  const float *signed_values = signed_map().data(), *unsigned_values = unsigned_map().data();
  const int64_t of_row = blocks(columns);
  threads.split(rows * of_row, 16, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t in_row = b % of_row * kBlock, i = b / of_row * columns + in_row;
      update_block(parameter + i, gradient + i, m + i, m_scale + b, v + i, v_scale + b,
                   std::min(kBlock, columns - in_row), factors, signed_values, unsigned_values);
    }
  });
}

}  // namespace strata::adamw8bit
