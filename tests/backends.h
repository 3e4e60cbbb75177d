// Which backends a test compares with the reference: the CPU's, and CUDA's. Built with STRATA_GPU the CUDA kernels run
// on a GPU, or the test is skipped where there is none; without, they are those compiled for the host
// (cuda/emulator.h).
#pragma once
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "strata/device.h"
#include "strata/error.h"

namespace strata::test {

#ifdef STRATA_GPU
// The GPU, opened once; null with the reason where it cannot be used.
inline Device* gpu(std::string* reason = nullptr) {
  static std::string why;
  static const std::unique_ptr<Device> device = []() -> std::unique_ptr<Device> {
    try {
      return open_device("cuda", 0);
    } catch (const Error& error) {
      why = error.what();
      return nullptr;
    }
  }();
  if (reason) *reason = why;
  return device.get();
}
#define STRATA_NEEDS_GPU()                    \
  std::string strata_reason;                  \
  if (!::strata::test::gpu(&strata_reason)) { \
    GTEST_SKIP() << strata_reason;            \
  }
inline const std::vector<std::string> kBackends = {"cuda"};
#else
inline Device* gpu() { return nullptr; }
#define STRATA_NEEDS_GPU() static_cast<void>(0)
#ifdef STRATA_EMULATED_CUDA
inline const std::vector<std::string> kBackends = {"cpu", "cuda"};
#else
inline const std::vector<std::string> kBackends = {"cpu"};
#endif
#endif

inline Device* device_of(const std::string& backend) { return backend == "cuda" ? gpu() : nullptr; }

}  // namespace strata::test
