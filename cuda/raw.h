// 16 bytes of an array as they lie in memory, in four registers: what kernels read ahead, or read twice, does not take
// the eight that the same numbers in f32 do.
#pragma once
#include "cuda/kernel.h"

namespace strata::cuda {

template <class T>
struct Raw {
  static constexpr int kCount = kPack<T>, kEach = 4 / int(sizeof(T));  // numbers; of a word
  Pack<uint32_t> words{};

  STRATA_DEVICE Raw() {}
  // Numbers [i, i + kCount) of a row of `count`; zeros beyond its end. `whole` where rows begin at multiples of 16
  // bytes and have a multiple of kCount numbers.
  STRATA_DEVICE Raw(const T* row, int i, int count, bool whole) {
    if (whole) {
      if (i < count) words = *reinterpret_cast<const Pack<uint32_t>*>(row + i);
      return;
    }
#pragma unroll
    for (int e = 0; e < kCount; ++e)
      if (i + e < count) words.value[e / kEach] |= bits(row[i + e]) << (e % kEach * 16);
  }
  STRATA_DEVICE void write(T* row, int i, int count, bool whole) const {
    if (whole) {
      if (i < count) *reinterpret_cast<Pack<uint32_t>*>(row + i) = words;
      return;
    }
#pragma unroll
    for (int e = 0; e < kCount; ++e)
      if (i + e < count) row[i + e] = number(e);
  }
  STRATA_DEVICE float operator[](int e) const { return to_float(number(e)); }
  STRATA_DEVICE void set(int e, float x) { words.value[e / kEach] |= bits(from_float<T>(x)) << (e % kEach * 16); }

 private:
  STRATA_DEVICE static uint32_t bits(float x) { return float_bits(x); }
  template <class Half>
  STRATA_DEVICE static uint32_t bits(Half x) {
    return x.bits;
  }
  STRATA_DEVICE T number(int e) const {
    if constexpr (sizeof(T) == 4)
      return bits_to_float(words.value[e]);
    else
      return T{uint16_t(words.value[e / 2] >> (e % 2 * 16))};
  }
};

// What Raw calls whole, of arrays of rows.
template <class T, class... Arrays>
bool is_whole(int64_t columns, const Arrays*... arrays) {
  return columns % kPack<T> == 0 && ((reinterpret_cast<uintptr_t>(arrays) % 16 == 0) && ...);
}

}  // namespace strata::cuda
