// Block by block: decode the moments, update, encode them again; see adamw8bit_kernel.h.
#include "plugins/adamw8bit/adamw8bit_kernel.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "strata/simd.h"

namespace strata::adamw8bit {
namespace {

constexpr int kDecades = 7;

// Middles of the cells, smallest first; `first` cells in the smallest decade.
Map make_map(int first, bool has_sign) {
  Map map{};
  int code = 1;
  for (int decade = 0; decade < kDecades; ++decade) {
    const int cells = first << decade;
    const double low = std::pow(10.0, decade - kDecades), width = 9 * low / cells;
    for (int cell = 0; cell < cells; ++cell, ++code) {
      map[size_t(code)] = float(low + width * (cell + 0.5));
      if (has_sign) map[size_t(code) + 128] = -map[size_t(code)];
    }
  }
  map[has_sign ? 128 : 255] = 1;
  return map;
}

// 1 + the number of the cell that x in (0, 1) falls into, counted from the smallest decade's first; found by comparing
// with the decades' borders, so that it vectorizes.
template <int kFirst>
STRATA_INLINE int32_t cell_of(float x) {
  float low = 1e-7f, per_unit = kFirst / 9e-7f;
  int32_t before = 0, cells = kFirst;
  constexpr float borders[] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f};
  constexpr float densities[] = {kFirst * 2 / 9e-6f,  kFirst * 4 / 9e-5f,  kFirst * 8 / 9e-4f,
                                 kFirst * 16 / 9e-3f, kFirst * 32 / 9e-2f, kFirst * 64 / 9e-1f};
  for (int d = 0; d < 6; ++d) {
    const bool above = x >= borders[d];
    low = above ? borders[d] : low;
    per_unit = above ? densities[d] : per_unit;
    before = above ? kFirst * ((2 << d) - 1) : before;
    cells = above ? kFirst * (2 << d) : cells;
  }
  int32_t cell = int32_t((x - low) * per_unit);
  cell = cell < 0 ? 0 : cell;
  cell = cell >= cells ? cells - 1 : cell;
  return 1 + before + cell;
}

// Half the smallest value, and halfway between the largest cell's middle and 1.
constexpr float kSignedLeast = 2.75e-7f, kSignedMost = (1 + (1 - 0.9f / 128)) / 2;
constexpr float kUnsignedLeast = 1.625e-7f, kUnsignedMost = (1 + (1 - 0.9f / 256)) / 2;

STRATA_INLINE uint8_t signed_code(float x) {
  const float size = std::fabs(x);
  const int32_t sign = std::bit_cast<int32_t>(x) < 0 ? 128 : 0;
  int32_t code = cell_of<1>(size) + sign;
  code = size < kSignedLeast ? 0 : code;
  code = x > kSignedMost ? 128 : code;
  return uint8_t(code);
}
STRATA_INLINE uint8_t unsigned_code(float x, bool nonzero) {
  int32_t code = cell_of<2>(x);
  code = x < kUnsignedLeast ? int32_t(nonzero && x > 0) : code;
  code = x > kUnsignedMost ? 255 : code;
  return uint8_t(code);
}

struct Factors {
  float gradient_scale, weight1, beta2, weight2, decay, step_size, inverse_root, epsilon;
};

STRATA_INLINE float largest(const float* x, int64_t count) {
  uint32_t top = 0;  // magnitudes order like their bits
  for (int64_t i = 0; i < count; ++i) top = std::max(top, std::bit_cast<uint32_t>(x[i]) & 0x7FFFFFFF);
  return std::bit_cast<float>(top);
}

// 1 / scale, or 0 for a block of zeros or of numbers too small to have one.
STRATA_INLINE float reciprocal(float scale) {
  const float factor = scale > 0 ? 1 / scale : 0;
  return factor <= 3.4e38f ? factor : 0;
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
