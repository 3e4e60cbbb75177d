// Sparse gradients on the GPU: lists, what stays accumulated, and sums are the CPU's to the bit (top_k_kernel.h). As
// there, the k-th largest is found digit by digit from histograms of absolute values' bits, first that of groups'
// largest elements, then that of elements in groups which can have any to send. Atomics are of integers alone.
#include "cuda/bind.h"
#include "plugins/top_k/top_k_kernel.h"
#include "strata/layout.h"

namespace strata::cuda::top_k_kernels {
namespace {

constexpr int kBlock = 256, kWarps = kBlock / 32, kEach = 8;  // elements that a thread accumulates
constexpr int kGroup = 128, kOfLane = kGroup / 32;            // neighbours of which the largest is known
constexpr int kDigits = 3, kBins = 1 << 11;                   // of 11, 10 and 10 bits, from the highest
constexpr int kMostSweeps = 512;                              // blocks that go through all groups
constexpr int kChunk = 4096;                                  // elements of a sum, a block

// What is known of the k-th largest: its highest bits, and how many of those that begin with them are among the k.
struct Known {
  uint32_t bits, left;
};

// Histograms of a digit of groups' largest (steps 0 to 2) and of elements (3 to 5) count what begins with what the
// steps before know; step 6 knows all, and counts what each warp has of it. Each step makes of the one before's
// histogram what it knows, in every block, and keeps it for the next.
struct Task {
  float *accumulated, *velocity;  // velocity: null without momentum
  const double* overflow;
  int64_t count, groups;
  uint32_t k;  // at most count
  uint32_t *bins, *most, *above, *same;
  Known* known;  // before each step; the last is what groups must reach

  STRATA_DEVICE bool skips() const { return overflow && *overflow != *overflow; }
};
constexpr int kSteps = 2 * kDigits, kFloor = kSteps + 1;

STRATA_DEVICE uint32_t size_key(float x) { return float_bits(x) & 0x7FFFFFFFu; }
STRATA_DEVICE int bits_below(int digit) { return 20 - 10 * digit; }
STRATA_DEVICE int bins_of(int digit) { return digit == 0 ? kBins : kBins / 2; }

// Over a warp: of this lane and those before it.
STRATA_DEVICE uint32_t summed_up_to(uint32_t x) {
  const int lane = int(threadIdx.x) % 32;
  for (int width = 1; width < 32; width *= 2) {
    const uint32_t other = __shfl_sync(0xFFFFFFFFu, x, lane >= width ? lane - width : lane);
    x += lane >= width ? other : 0;
  }
  return x;
}
STRATA_DEVICE uint32_t warp_total(uint32_t x) {
  for (int width = 16; width > 0; width /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, width);
  return x;
}

// One digit further, on every thread of a block: each has a run of bins, the first one the highest.
STRATA_DEVICE Known narrowed(Known known, const uint32_t* bins, int digit) {
  __shared__ uint32_t totals[kWarps];
  __shared__ Known found;
  const int each = bins_of(digit) / kBlock, first = bins_of(digit) - 1 - int(threadIdx.x) * each;
  uint32_t own = 0;
  for (int e = 0; e < each; ++e) own += bins[first - e];
  uint32_t up_to = summed_up_to(own);
  if (threadIdx.x % 32 == 31) totals[threadIdx.x / 32] = up_to;
  __syncthreads();
  for (int warp = 0; warp < int(threadIdx.x) / 32; ++warp) up_to += totals[warp];
  if (up_to - own < known.left && known.left <= up_to) {
    uint32_t left = known.left - (up_to - own);
    int bin = first;
    while (bins[bin] < left) left -= bins[bin--];
    found = {known.bits * uint32_t(bins_of(digit)) + uint32_t(bin), left};
  }
  __syncthreads();
  const Known result = found;
  __syncthreads();
  return result;
}

// A warp's share of the groups, one after the other, those whose largest reaches `least`: body(first element).
template <class Body>
STRATA_DEVICE void each_group(const Task& t, uint32_t least, Body&& body) {
  const int64_t warp = (int64_t(blockIdx.x) * kBlock + threadIdx.x) / 32, warps = int64_t(gridDim.x) * kWarps;
  const int64_t end = t.groups * (warp + 1) / warps;
  const int lane = int(threadIdx.x) % 32;
  for (int64_t g = t.groups * warp / warps; g < end; g += 32) {
    const bool reaches = g + lane < end && t.most[g + lane] >= least;
    for (unsigned left = __ballot_sync(0xFFFFFFFFu, reaches); left != 0; left &= left - 1)
      body((g + __ffs(int(left)) - 1) * kGroup);
  }
}

// Adds the gradient, and clears the list and the histograms.
template <class T>
STRATA_KERNEL accumulate(Task t, const T* gradient, float momentum, uint32_t* list, int64_t indices, int64_t words) {
  const int64_t thread = int64_t(blockIdx.x) * kBlock + threadIdx.x, threads = int64_t(gridDim.x) * kBlock;
  for (int64_t i = thread; i < words; i += threads) list[i] = i < indices ? top_k::kNone : 0;
  for (int64_t i = thread; i < kSteps * kBins; i += threads) t.bins[i] = 0;
  if (t.skips()) return;
  const int64_t first = thread * kEach;
  float g[kEach], sum[kEach], v[kEach];
  load(gradient, first, t.count, g);
  load(static_cast<const float*>(t.accumulated), first, t.count, sum);
  if (t.velocity) load(static_cast<const float*>(t.velocity), first, t.count, v);
  uint32_t top = 0;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    if (t.velocity) g[e] = v[e] = rounded_sum(rounded_product(momentum, v[e]), g[e]);
    sum[e] = rounded_sum(sum[e], g[e]);
    const uint32_t key = size_key(sum[e]);
    top = key > top ? key : top;
  }
  if (first < t.count) {
    if (t.velocity) store(t.velocity, first, t.count, v);
    store(t.accumulated, first, t.count, sum);
  }
  for (int width = kGroup / kEach / 2; width > 0; width /= 2) {
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, top, width);
    top = other > top ? other : top;
  }
  if (first % kGroup == 0 && first < t.count) t.most[first / kGroup] = top;
}

// `only_elements`: more are sent than there are groups, so all can have some.
STRATA_KERNEL count_digit(Task t, int step, bool only_elements) {
  __shared__ uint32_t here[kBins];
  if (t.skips()) return;
  const int digit = step % kDigits;
  uint32_t floor = step > kDigits ? t.known[kFloor].bits : 0;
  if (step == kDigits && !only_elements) floor = narrowed(t.known[2], t.bins + 2 * kBins, 2).bits;
  const Known known = digit == 0 ? Known{0, t.k} : narrowed(t.known[step - 1], t.bins + (step - 1) * kBins, digit - 1);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    t.known[step] = known;
    if (step == kDigits) t.known[kFloor].bits = floor;
  }
  for (int i = int(threadIdx.x); i < kBins; i += kBlock) here[i] = 0;
  __syncthreads();
  const int known_from = digit == 0 ? 31 : bits_below(digit - 1);
  const auto see = [&](uint32_t key) {
    if (key >> known_from == known.bits) atomicAdd(&here[key >> bits_below(digit) & uint32_t(bins_of(digit) - 1)], 1u);
  };
  if (step < kDigits)
    for (int64_t g = int64_t(blockIdx.x) * kBlock + threadIdx.x; g < t.groups; g += int64_t(gridDim.x) * kBlock)
      see(t.most[g]);
  else
    each_group(t, floor, [&](int64_t group) {
      const int64_t first = group + int64_t(threadIdx.x % 32) * kOfLane;
      float x[kOfLane];
      load(static_cast<const float*>(t.accumulated), first, t.count, x);
      for (int e = 0; e < kOfLane; ++e)
        if (first + e < t.count && size_key(x[e]) >= floor) see(size_key(x[e]));
    });
  __syncthreads();
  for (int i = int(threadIdx.x); i < kBins; i += kBlock)
    if (here[i] != 0) atomicAdd(&t.bins[step * kBins + i], here[i]);
}

// What a warp's groups have above the smallest that is sent, and of its size.
STRATA_KERNEL count_kept(Task t) {
  if (t.skips()) return;
  const Known known = narrowed(t.known[kSteps - 1], t.bins + (kSteps - 1) * kBins, kDigits - 1);
  if (blockIdx.x == 0 && threadIdx.x == 0) t.known[kSteps] = known;
  uint32_t above = 0, same = 0;
  each_group(t, known.bits, [&](int64_t group) {
    const int64_t first = group + int64_t(threadIdx.x % 32) * kOfLane;
    float x[kOfLane];
    load(static_cast<const float*>(t.accumulated), first, t.count, x);
    for (int e = 0; e < kOfLane; ++e) {
      if (first + e >= t.count) continue;
      above += size_key(x[e]) > known.bits;
      same += size_key(x[e]) == known.bits;
    }
  });
  above = warp_total(above), same = warp_total(same);
  if (threadIdx.x % 32 == 0) {
    const int warp = int(blockIdx.x) * kWarps + int(threadIdx.x) / 32;
    t.above[warp] = above, t.same[warp] = same;
  }
}

// Of what warps before this one counted, on every thread.
STRATA_DEVICE uint32_t before_this_warp(const uint32_t* counts) {
  __shared__ uint32_t totals[kWarps];
  const int warp = int(threadIdx.x) / 32, of_blocks = int(blockIdx.x) * kWarps;
  uint32_t sum = 0;
  for (int i = int(threadIdx.x); i < of_blocks; i += kBlock) sum += counts[i];
  sum = warp_total(sum);
  if (threadIdx.x % 32 == 0) totals[warp] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += totals[w];
  for (int w = 0; w < warp; ++w) sum += counts[of_blocks + w];
  __syncthreads();
  return sum;
}

// Moves what is sent to the list, in rising order.
template <class T>
STRATA_KERNEL move_kept(Task t, uint32_t* indices, T* values) {
  if (t.skips()) return;
  const Known known = t.known[kSteps];
  uint32_t above = before_this_warp(t.above), same = before_this_warp(t.same);
  each_group(t, known.bits, [&](int64_t group) {
    const int64_t first = group + int64_t(threadIdx.x % 32) * kOfLane;
    float x[kOfLane];
    load(static_cast<const float*>(t.accumulated), first, t.count, x);
    uint32_t own = 0;  // above it, and from bit 16 on of its size
    for (int e = 0; e < kOfLane; ++e) {
      if (first + e >= t.count) continue;
      own += size_key(x[e]) > known.bits;
      own += uint32_t(size_key(x[e]) == known.bits) << 16;
    }
    const uint32_t up_to = summed_up_to(own);
    uint32_t above_here = above + ((up_to - own) & 0xFFFF), same_here = same + ((up_to - own) >> 16);
    for (int e = 0; e < kOfLane; ++e) {
      const int64_t i = first + e;
      const bool larger = size_key(x[e]) > known.bits, equal = size_key(x[e]) == known.bits;
      if (i >= t.count || !(larger || equal)) continue;
      if (larger || same_here < known.left) {
        const uint32_t place = above_here + (same_here < known.left ? same_here : known.left);
        const T sent = from_float<T>(x[e]);
        indices[place] = uint32_t(i), values[place] = sent;
        const bool finite = (float_bits(to_float(sent)) & 0x7F800000u) != 0x7F800000u;
        t.accumulated[i] = finite ? rounded_sum(x[e], -to_float(sent)) : 0.0f;
        if (t.velocity) t.velocity[i] = 0;
      }
      above_here += larger, same_here += equal;
    }
    const uint32_t all = __shfl_sync(0xFFFFFFFFu, up_to, 31);
    above += all & 0xFFFF, same += all >> 16;
  });
}

// The first of indices that is not below `from`, on every lane: each step looks at 32 of them.
STRATA_DEVICE int64_t lower_bound(const uint32_t* indices, int64_t k, int64_t from) {
  int64_t low = 0, left = k;
  while (left > 0) {
    const int64_t step = left / 32 + 1, probe = int64_t(threadIdx.x % 32 + 1) * step - 1;
    const bool below = probe < left && int64_t(indices[low + probe]) < from;
    const int64_t passed = int64_t(__ffs(int(~__ballot_sync(0xFFFFFFFFu, below))) - 1) * step;
    low += passed, left = left - passed < step ? left - passed : step - 1;
  }
  return low;
}

// Lists of ranks are added one after the other, in which no index comes twice.
template <class T>
STRATA_KERNEL add_up(const uint8_t* lists, int64_t ranks, int64_t bytes, int64_t k, int64_t first, int64_t count,
                     T* result) {
  __shared__ float sum[kChunk];
  __shared__ int64_t begins[kWarps];
  const int64_t begin = int64_t(blockIdx.x) * kChunk, from = first + begin;
  const int some = int(count - begin < kChunk ? count - begin : kChunk), warp = int(threadIdx.x) / 32;
  const auto indices_of = [&](int64_t rank) { return reinterpret_cast<const uint32_t*>(lists + rank * bytes); };
  for (int i = int(threadIdx.x); i < some; i += kBlock) sum[i] = 0;
  for (int64_t some_ranks = 0; some_ranks < ranks; some_ranks += kWarps) {
    if (some_ranks + warp < ranks) begins[warp] = lower_bound(indices_of(some_ranks + warp), k, from);
    __syncthreads();
    for (int r = 0; r < kWarps && some_ranks + r < ranks; ++r) {
      const uint32_t* const indices = indices_of(some_ranks + r);
      const T* const values = reinterpret_cast<const T*>(indices + k);
      for (int64_t e = begins[r] + threadIdx.x; e < k && int64_t(indices[e]) < from + some; e += kBlock) {
        float& to = sum[int64_t(indices[e]) - from];
        to = rounded_sum(to, to_float(values[e]));
      }
      __syncthreads();
    }
  }
  for (int i = int(threadIdx.x); i < some; i += kBlock) result[begin + i] = from_float<T>(sum[i]);
}

int64_t groups_of(int64_t count) { return (count + kGroup - 1) / kGroup; }
int64_t sweeps_of(int64_t count) { return std::clamp<int64_t>(groups_of(count) / kBlock, 1, kMostSweeps); }

int64_t workspace_of(const OpView& v, int) {
  const int64_t n = count(v.input(0));
  return (kSteps * kBins + groups_of(n) + 2 * kWarps * sweeps_of(n)) * int64_t(sizeof(uint32_t)) +
         (kFloor + 1) * int64_t(sizeof(Known));
}

Task task_of(const Binding& b, bool momentum, int64_t k) {
  Task t;
  t.accumulated = b.out<float>(1), t.velocity = momentum ? b.out<float>(2) : nullptr;
  t.overflow = b.has_input(2) ? b.in<double>(2) : nullptr;
  t.count = count(b.input(0)), t.groups = groups_of(t.count);
  t.k = uint32_t(std::min(k, t.count));
  t.known = b.workspace<Known>();
  t.bins = reinterpret_cast<uint32_t*>(t.known + kFloor + 1);
  t.above = t.bins + kSteps * kBins, t.same = t.above + kWarps * sweeps_of(t.count);
  t.most = t.same + kWarps * sweeps_of(t.count);
  return t;
}

Launch bind_take(const Binding& b, bool momentum) {
  return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
    using T = decltype(zero);
    const int64_t k = b.attributes().integer("k");
    return [=, t = task_of(b, momentum, k), gradient = b.in<T>(0), list = b.out<uint32_t>(0),
            words = count(b.output(0)) / 4, factor = momentum ? float(b.attributes().real("momentum")) : 0.0f,
            queue = b.queue()] {
      launch(accumulate<T>, dim3(std::max(1u, blocks(t.count, kBlock * kEach))), kBlock, 0, queue, t, gradient, factor,
             list, k, words);
      if (t.k == 0) return;
      const bool only_elements = t.k > t.groups;
      const dim3 sweeps(unsigned(sweeps_of(t.count)));
      for (int step = only_elements ? kDigits : 0; step < kSteps; ++step)
        launch(count_digit, sweeps, kBlock, 0, queue, t, step, only_elements);
      launch(count_kept, sweeps, kBlock, 0, queue, t);
      launch(move_kept<T>, sweeps, kBlock, 0, queue, t, list, reinterpret_cast<T*>(list + k));
    };
  });
}

const Registration kinds[] = {
    {"top_k_take", [](const Binding& b) { return bind_take(b, false); }, workspace_of},
    {"top_k_take_with_momentum", [](const Binding& b) { return bind_take(b, true); }, workspace_of},
    {"top_k_add_up", [](const Binding& b) {
       return with_type(b.output(0).dtype, [&](auto zero) -> Launch {
         using T = decltype(zero);
         const Tensor& result = b.output(0);
         const Split* const share =
             b.attributes().has("axis") ? last_split(result, 0, b.attributes().string("axis")) : nullptr;
         const int64_t n = count(result), row = n / std::max<int64_t>(1, result.shape[0]);
         return [=, lists = b.in<uint8_t>(0), ranks = b.input(0).shape[0], bytes = b.input(0).shape[1],
                 k = b.attributes().integer("k"), first = share ? share->first * row : 0, to = b.out<T>(0),
                 queue = b.queue()] {
           launch(add_up<T>, dim3(blocks(n, kChunk)), kBlock, 0, queue, lists, ranks, bytes, k, first, n, to);
         };
       });
     }}};

}  // namespace
}  // namespace strata::cuda::top_k_kernels
