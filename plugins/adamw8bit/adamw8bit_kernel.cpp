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

// The moments after this step of at most kBlock elements.
STRATA_INLINE void next_moments(const float* gradient, const uint8_t* m, float m_scale, const uint8_t* v, float v_scale,
                                int64_t count, const Factors& f, const float* signed_values,
                                const float* unsigned_values, float* first, float* second) {
  for (int64_t i = 0; i < count; ++i) first[i] = signed_values[m[i]] * m_scale;
  for (int64_t i = 0; i < count; ++i) second[i] = unsigned_values[v[i]] * v_scale;
  for (int64_t i = 0; i < count; ++i) {
    const float g = gradient[i] * f.gradient_scale;
    first[i] += f.weight1 * (g - first[i]);
    second[i] = f.beta2 * second[i] + f.weight2 * g * g;
  }
}

STRATA_INLINE void change(float* parameter, const float* first, const float* second, int64_t count, const Factors& f) {
  for (int64_t i = 0; i < count; ++i)
    parameter[i] =
        parameter[i] * f.decay - f.step_size * first[i] / (std::sqrt(second[i]) * f.inverse_root + f.epsilon);
}

STRATA_INLINE void encode(const float* first, float m_scale, uint8_t* m, const float* second, float v_scale, uint8_t* v,
                          int64_t count) {
  const float to_m = reciprocal(m_scale), to_v = reciprocal(v_scale);
  for (int64_t i = 0; i < count; ++i) m[i] = signed_code(first[i] * to_m);
  for (int64_t i = 0; i < count; ++i) v[i] = unsigned_code(second[i] * to_v, true);
}

STRATA_SIMD void update_block(float* parameter, const float* gradient, uint8_t* m, float* m_scale, uint8_t* v,
                              float* v_scale, int64_t count, const Factors& given, const float* signed_values,
                              const float* unsigned_values) {
  const Factors f = given;
  float first[kBlock], second[kBlock];
  next_moments(gradient, m, *m_scale, v, *v_scale, count, f, signed_values, unsigned_values, first, second);
  change(parameter, first, second, count, f);
  *m_scale = largest(first, count);
  *v_scale = largest(second, count);
  encode(first, *m_scale, m, second, *v_scale, v, count);
}

// The same in two steps, for some of a block's elements.
STRATA_SIMD void largest_moments(const float* gradient, const uint8_t* m, float m_scale, const uint8_t* v,
                                 float v_scale, int64_t count, const Factors& given, const float* signed_values,
                                 const float* unsigned_values, float* of_m, float* of_v) {
  const Factors f = given;
  float first[kBlock], second[kBlock];
  next_moments(gradient, m, m_scale, v, v_scale, count, f, signed_values, unsigned_values, first, second);
  *of_m = largest(first, count);
  *of_v = largest(second, count);
}
STRATA_SIMD void update_some(float* parameter, const float* gradient, uint8_t* m, float m_scale, float to_m, uint8_t* v,
                             float v_scale, float to_v, int64_t count, const Factors& given, const float* signed_values,
                             const float* unsigned_values) {
  const Factors f = given;
  float first[kBlock], second[kBlock];
  next_moments(gradient, m, m_scale, v, v_scale, count, f, signed_values, unsigned_values, first, second);
  change(parameter, first, second, count, f);
  encode(first, to_m, m, second, to_v, v, count);
}

Factors factors_of(const Settings& s, double step) {
  const double correction1 = 1 - std::pow(s.beta1, step), correction2 = 1 - std::pow(s.beta2, step);
  return {float(s.gradient_scale),
          float(1 - s.beta1),
          float(s.beta2),
          float(1 - s.beta2),
          float(1 - s.learning_rate * s.weight_decay),
          float(s.learning_rate / correction1),
          float(1 / std::sqrt(correction2)),
          float(s.epsilon)};
}

// Calls body(block, first element here, count) for the elements [begin, begin + count) of a vector, block by block.
template <class Body>
void by_block(int64_t begin, int64_t count, Body&& body) {
  for (int64_t at = begin; at < begin + count;) {
    const int64_t end = std::min(begin + count, (at / kBlock + 1) * kBlock);
    body(at / kBlock, at - begin, end - at);
    at = end;
  }
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
  const Factors factors = factors_of(s, step);
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

void largest_of_part(const float* gradient, const uint8_t* m, const float* m_scale, const uint8_t* v,
                     const float* v_scale, int64_t begin, int64_t count, int64_t whole, const Settings& s, double step,
                     float* largest_m, float* largest_v) {
  const Factors factors = factors_of(s, step);
  std::fill_n(largest_m, blocks(whole), 0.0f);
  std::fill_n(largest_v, blocks(whole), 0.0f);
  by_block(begin, count, [&](int64_t b, int64_t i, int64_t n) {
    largest_moments(gradient + i, m + i, m_scale[b], v + i, v_scale[b], n, factors, signed_map().data(),
                    unsigned_map().data(), largest_m + b, largest_v + b);
  });
}

void update_part(float* parameter, const float* gradient, uint8_t* m, float* m_scale, uint8_t* v, float* v_scale,
                 const float* largest_m, const float* largest_v, int64_t begin, int64_t count, int64_t whole,
                 const Settings& s, double step) {
  const Factors factors = factors_of(s, step);
  by_block(begin, count, [&](int64_t b, int64_t i, int64_t n) {
    update_some(parameter + i, gradient + i, m + i, m_scale[b], largest_m[b], v + i, v_scale[b], largest_v[b], n,
                factors, signed_map().data(), unsigned_map().data());
  });
  std::copy_n(largest_m, blocks(whole), m_scale);
  std::copy_n(largest_v, blocks(whole), v_scale);
}

}  // namespace strata::adamw8bit
