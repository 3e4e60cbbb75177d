// Tensor cores and asynchronous copies as functions: PTX on a GPU, their definition on the emulator. Fragments are
// those of the PTX specification ("Matrix fragments for mma.m16n8k16"): lane 4g + t holds
//   A (16 x 16): rows g and g + 8, columns 2t, 2t + 1 and 8 further;  B (16 x 8): rows 2t, 2t + 1 and 8 further, column
//   g; C (16 x 8): rows g and g + 8, columns 2t and 2t + 1.
#pragma once
#include "cuda/kernel.h"

namespace strata::cuda {

#ifdef STRATA_EMULATE

using SharedAddress = uintptr_t;
inline SharedAddress shared_address(const void* shared) { return reinterpret_cast<uintptr_t>(shared); }

template <class T>
uint32_t pack(float low, float high) {
  return uint32_t(from_float<T>(low).bits) | uint32_t(from_float<T>(high).bits) << 16;
}
inline float fast_exp2(float x) { return std::exp2(x); }
inline float fast_log2(float x) { return std::log2(x); }
inline float fast_inverse(float x) { return 1 / x; }

template <class T>
void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  struct Registers {
    uint32_t a[4], b[2];
  };
  const Registers* all = Emulator::get().publish(Registers{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
  const auto half = [](uint32_t pair, int which) { return to_float(T{uint16_t(pair >> (16 * which))}); };
  const int lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
    float sum = c[i];
    for (int k = 0; k < 16; ++k)
      sum += half(all[row % 8 * 4 + k % 8 / 2].a[row / 8 + 2 * (k / 8)], k % 2) *
             half(all[column * 4 + k % 8 / 2].b[k / 8], k % 2);
    c[i] = sum;
  }
}
inline void load_matrices(uint32_t (&r)[4], SharedAddress row, bool transposed) {
  const SharedAddress* rows = Emulator::get().publish(row);
  const int lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  for (int m = 0; m < 4; ++m) {
    const auto element = [&](int i, int j) { return uint32_t(reinterpret_cast<const uint16_t*>(rows[8 * m + i])[j]); };
    r[m] =
        transposed ? element(2 * t, g) | element(2 * t + 1, g) << 16 : element(g, 2 * t) | element(g, 2 * t + 1) << 16;
  }
}
template <int kBytes>
void copy_async(SharedAddress to, const void* from, bool there) {
  Emulator::get().copy_async(reinterpret_cast<void*>(to), there ? from : nullptr, kBytes);
}
inline void commit_copies() { Emulator::get().commit_copies(); }
template <int kLeft>
void wait_copies() {
  Emulator::get().wait_copies(kLeft);
}

#else

// Where in shared memory, for the instructions below: 32 bits, so that places in tiles are a sum with a constant.
using SharedAddress = uint32_t;
STRATA_DEVICE SharedAddress shared_address(const void* shared) { return uint32_t(__cvta_generic_to_shared(shared)); }

// Two numbers, rounded to the nearest, in one instruction.
template <class T>
STRATA_DEVICE uint32_t pack(float low, float high);
template <>
STRATA_DEVICE uint32_t pack<bf16>(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
template <>
STRATA_DEVICE uint32_t pack<f16>(float low, float high) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// One instruction each, to 2^-22 (the logarithm: absolute near 1) and to 1 in 2^-23; beyond the range of f32 zero and
// infinity.
STRATA_DEVICE float fast_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
STRATA_DEVICE float fast_log2(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
STRATA_DEVICE float fast_inverse(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// C += A B, summed in f32; T: bf16 or f16.
template <class T>
STRATA_DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
template <>
STRATA_DEVICE void mma<bf16>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
STRATA_DEVICE void mma<f16>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8 x 8 matrices of 16-bit elements from shared memory: lane 8m + i gives the address of row i of matrix m (16
// bytes, aligned); of each matrix the lane gets row g, columns 2t and 2t + 1, transposed: rows 2t and 2t + 1, column g.
STRATA_DEVICE void load_matrices(uint32_t (&r)[4], SharedAddress row, bool transposed) {
  if (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

// 4 or 16 bytes into shared memory beside what follows; zeros unless `there`, whatever `from` is.
template <int kBytes>
STRATA_DEVICE void copy_async(SharedAddress to, const void* from, bool there) {
  if constexpr (kBytes == 16)  // past the first cache
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes),
                 "r"(there ? kBytes : 0)
                 : "memory");
}
STRATA_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most kLeft of the groups committed are under way.
template <int kLeft>
STRATA_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

#endif

}  // namespace strata::cuda
