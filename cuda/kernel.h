// What the kernels are written in: CUDA C++ by nvcc, or, for tests on machines without a GPU, C++ by the host's
// compiler on emulator.h. Numbers of 16 bits, 16-byte packs, reductions, and the launch itself.
#pragma once
#include <cstdint>

#ifdef STRATA_EMULATE
#include "cuda/emulator.h"
#else
#include <cuda_runtime.h>

#include <string>
#include <tuple>

#include "strata/error.h"
#define STRATA_KERNEL __global__ void
#define STRATA_DEVICE __device__ __forceinline__

namespace strata::cuda {

// Enqueues a kernel; `shared` bytes of dynamic shared memory. Throws Error where the launch itself is refused.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, int block, int shared, void* queue, Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  const void* const code = reinterpret_cast<const void*>(kernel);
  if (shared > 48 << 10) cudaFuncSetAttribute(code, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  std::tuple<Parameters...> values{Parameters(arguments)...};
  const cudaError_t error = std::apply(
      [&](auto&... value) {
        void* pointers[] = {&value...};
        return cudaLaunchKernel(code, grid, dim3(unsigned(block)), pointers, size_t(shared),
                                static_cast<cudaStream_t>(queue));
      },
      values);
  if (error != cudaSuccess)
    throw Error(std::string("CUDA refuses to launch a kernel: ") + cudaGetErrorString(error) + ".", ExitCode::failed);
}

// Of the GPU in use.
inline int multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
    throw Error("CUDA does not tell how many multiprocessors the device has.", ExitCode::failed);
  return count;
}

template <class T>
STRATA_DEVICE T* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char strata_shared[];
  return reinterpret_cast<T*>(strata_shared);
}

}  // namespace strata::cuda
#endif

namespace strata::cuda {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

STRATA_DEVICE float bits_to_float(uint32_t bits) {
#ifdef STRATA_EMULATE
  return std::bit_cast<float>(bits);
#else
  return __uint_as_float(bits);
#endif
}

STRATA_DEVICE uint32_t float_bits(float x) {
#ifdef STRATA_EMULATE
  return std::bit_cast<uint32_t>(x);
#else
  return __float_as_uint(x);
#endif
}

STRATA_DEVICE float to_float(float x) { return x; }
STRATA_DEVICE float to_float(bf16 x) { return bits_to_float(uint32_t(x.bits) << 16); }
STRATA_DEVICE float to_float(f16 x) {
#ifdef STRATA_EMULATE
  float result;
  to_f32(DType::f16, &x.bits, &result, 1);
  return result;
#else
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
  return result;
#endif
}

template <class T>
STRATA_DEVICE T from_float(float x);
template <>
STRATA_DEVICE float from_float<float>(float x) {
  return x;
}
template <>
STRATA_DEVICE bf16 from_float<bf16>(float x) {
  bf16 result;
#ifdef STRATA_EMULATE
  from_f32(DType::bf16, &x, &result.bits, 1);
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
#endif
  return result;
}
template <>
STRATA_DEVICE f16 from_float<f16>(float x) {
  f16 result;
#ifdef STRATA_EMULATE
  from_f32(DType::f16, &x, &result.bits, 1);
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
#endif
  return result;
}

// Products and sums that are rounded each, where a kernel's bits are to be those of the host's: the compiler makes no
// fused operations of them.
#ifdef STRATA_EMULATE
template <class T>
STRATA_DEVICE T rounded_product(T a, T b) {
  return a * b;
}
template <class T>
STRATA_DEVICE T rounded_sum(T a, T b) {
  return a + b;
}
#else
STRATA_DEVICE float rounded_product(float a, float b) { return __fmul_rn(a, b); }
STRATA_DEVICE double rounded_product(double a, double b) { return __dmul_rn(a, b); }
STRATA_DEVICE float rounded_sum(float a, float b) { return __fadd_rn(a, b); }
STRATA_DEVICE double rounded_sum(double a, double b) { return __dadd_rn(a, b); }
#endif

// kPack elements read or written in one access of 16 bytes; fewer at the end of an array.
template <class T>
inline constexpr int kPack = 16 / int(sizeof(T));

template <class T>
struct alignas(16) Pack {
  T value[kPack<T>];
};

// Elements [i, i + N) of an array of `count`, as f32; zeros beyond the end.
template <int N, class T>
STRATA_DEVICE void load(const T* from, int64_t i, int64_t count, float (&to)[N]) {
  if (i + N <= count && (reinterpret_cast<uintptr_t>(from + i) & (N * sizeof(T) >= 16 ? 15 : N * sizeof(T) - 1)) == 0 &&
      N % kPack<T> == 0) {
#pragma unroll
    for (int p = 0; p < N / kPack<T>; ++p) {
      const Pack<T> pack = reinterpret_cast<const Pack<T>*>(from + i)[p];
#pragma unroll
      for (int k = 0; k < kPack<T>; ++k) to[p * kPack<T> + k] = to_float(pack.value[k]);
    }
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) to[k] = i + k < count ? to_float(from[i + k]) : 0.0f;
  }
}
template <int N, class T>
STRATA_DEVICE void store(T* to, int64_t i, int64_t count, const float (&from)[N]) {
  if (i + N <= count && (reinterpret_cast<uintptr_t>(to + i) & 15) == 0 && N % kPack<T> == 0) {
#pragma unroll
    for (int p = 0; p < N / kPack<T>; ++p) {
      Pack<T> pack;
#pragma unroll
      for (int k = 0; k < kPack<T>; ++k) pack.value[k] = from_float<T>(from[p * kPack<T> + k]);
      reinterpret_cast<Pack<T>*>(to + i)[p] = pack;
    }
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (i + k < count) to[i + k] = from_float<T>(from[k]);
  }
}

// The larger of *to and a number that is not negative, whose bits order as the number does.
STRATA_DEVICE void atomic_max(float* to, float x) {
#ifdef STRATA_EMULATE
  *to = x > *to ? x : *to;
#else
  atomicMax(reinterpret_cast<int*>(to), __float_as_int(x));
#endif
}

// Sum over a warp, on every lane, always in the same tree.
STRATA_DEVICE float warp_sum(float x) {
#pragma unroll
  for (int width = 16; width > 0; width /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, width);
  return x;
}
STRATA_DEVICE float warp_max(float x) {
#pragma unroll
  for (int width = 16; width > 0; width /= 2) {
    const float other = __shfl_xor_sync(0xFFFFFFFFu, x, width);
    x = other > x || other != other ? other : x;
  }
  return x;
}
// Over a block of at most 1024 threads, on every thread: `of_warp` over the warps' results, `otherwise` where there are
// none. `scratch`: 32 floats of shared memory, free again afterwards.
template <class OfWarp>
STRATA_DEVICE float over_block(float x, float otherwise, float* scratch, OfWarp of_warp) {
  x = of_warp(x);
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, warps = (int(blockDim.x) + 31) / 32;
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  x = of_warp(lane < warps ? scratch[lane] : otherwise);
  __syncthreads();
  return x;
}
STRATA_DEVICE float block_sum(float x, float* scratch) {
  return over_block(x, 0.0f, scratch, [](float v) { return warp_sum(v); });
}
STRATA_DEVICE float block_max(float x, float* scratch) {  // -infinity: beyond all
  return over_block(x, bits_to_float(0xFF800000u), scratch, [](float v) { return warp_max(v); });
}

}  // namespace strata::cuda
