// Loss scaling's kinds on the GPU; see loss_scale.cpp.
#include "cuda/bind.h"

namespace strata::cuda::loss_scale_kernels {
namespace {

constexpr int kBlock = 256, kEach = 8, kMostFlags = 256;

STRATA_KERNEL clear(double* flag) { *flag = 0; }
template <class T>
STRATA_KERNEL overflowed(const T* x, int64_t count, double* flag) {
  const int64_t first = (int64_t(blockIdx.x) * kBlock + threadIdx.x) * kEach;
  float v[kEach];
  if (first >= count) return;
  load(x, first, count, v);
  bool found = false;
#pragma unroll
  for (int e = 0; e < kEach; ++e) found |= !(v[e] - v[e] == 0);
  if (found) *flag = 1;  // whoever writes, writes the same
}

struct Flags {
  const double* from[kMostFlags];
};
STRATA_KERNEL any_overflowed(Flags flags, int count, double* out, bool first) {
  double flag = first ? 0.0 : *out;
  for (int i = 0; i < count; ++i) flag = *flags.from[i] > flag ? *flags.from[i] : flag;
  *out = flag;
}
STRATA_KERNEL next_loss_scale(Flags flags, int count, double window, double* factor, double* scale, double* good) {
  bool overflow = false;
  for (int i = 0; i < count; ++i) overflow |= *flags.from[i] != 0;
  *factor = overflow ? 0.0 / (*scale - *scale) : 1 / *scale;  // 0/0: NaN
  if (window == 0) return;
  *good = overflow ? 0 : *good + 1;
  if (overflow) *scale = *scale / 2 < 1 ? 1.0 : *scale / 2;
  if (*good == window) {
    *scale = *scale * 2 > 1099511627776.0 ? 1099511627776.0 : *scale * 2;
    *good = 0;
  }
}

const Registration each("overflowed", [](const Binding& b) -> Launch {
  return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
    using T = decltype(zero);
    return [=, x = b.in<T>(0), n = count(b.input(0)), flag = b.out<double>(0), queue = b.queue()] {
      launch(clear, dim3(1), 1, 0, queue, flag);
      launch(overflowed<T>, dim3(blocks(n, kBlock * kEach)), kBlock, 0, queue, x, n, flag);
    };
  });
});
const Registration any("any_overflowed", [](const Binding& b) -> Launch {
  std::vector<std::pair<Flags, int>> groups;
  for (int i = 0; i < b.inputs(); ++i) {
    if (i % kMostFlags == 0) groups.push_back({});
    groups.back().first.from[groups.back().second++] = b.in<double>(i);
  }
  return [=, out = b.out<double>(0), queue = b.queue()] {
    for (size_t g = 0; g < groups.size(); ++g)
      launch(any_overflowed, dim3(1), 1, 0, queue, groups[g].first, groups[g].second, out, g == 0);
  };
});
const Registration next("next_loss_scale", [](const Binding& b) -> Launch {
  Flags flags{};
  const int count = b.inputs() - 2;
  require(count <= kMostFlags, b, "at most 256 flags");
  for (int i = 0; i < count; ++i) flags.from[i] = b.in<double>(i);
  return [=, window = b.attributes().real("window"), factor = b.out<double>(0), scale = b.out<double>(1),
          good = b.out<double>(2), queue = b.queue()] {
    launch(next_loss_scale, dim3(1), 1, 0, queue, flags, count, window, factor, scale, good);
  };
});

}  // namespace
}  // namespace strata::cuda::loss_scale_kernels
