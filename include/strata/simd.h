// STRATA_SIMD before a function makes the compiler build it for several x86-64 levels and choose at load time, so that
// one build runs on any machine at its full vector width. For free functions with plain loops over pointers; what
// such a function calls must be inlined into it (STRATA_INLINE) to get the same treatment.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__) && !defined(STRATA_NO_SIMD)
#define STRATA_SIMD __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define STRATA_SIMD
#endif
#define STRATA_INLINE inline __attribute__((always_inline))
// For small functions that GPU kernels use too.
#ifdef __CUDACC__
#define STRATA_ANYWHERE __host__ __device__ __forceinline__
#else
#define STRATA_ANYWHERE STRATA_INLINE
#endif
