// Sums: rows of a matrix (gradients of biases), squares of a tensor exactly (norms). No atomics: orders are fixed.
#include "cuda/raw.h"
#include "cuda/sum_parts.h"
#include "strata/exact_sum.h"

namespace strata::cuda::reduce_kernels {
namespace {

constexpr int kBlock = 256, kEach = 8;
constexpr int kGroups = 16, kLanes = kBlock / kGroups;  // of a block: columns in groups of kEach, rows in lanes

// Columns in blockIdx.x, rows of part blockIdx.y, into parts (gridDim.y, columns).
template <class T>
STRATA_KERNEL sum_rows(const T* x, float* parts, int64_t rows, int64_t columns) {
  __shared__ float sums[kLanes * kGroups * kEach];
  const int group = int(threadIdx.x) % kGroups, lane = int(threadIdx.x) / kGroups;
  const int64_t i = (int64_t(blockIdx.x) * kGroups + group) * kEach;
  const int64_t begin = rows * blockIdx.y / gridDim.y, end = rows * (blockIdx.y + 1) / gridDim.y;
  float sum[kEach] = {}, v[kEach];
  for (int64_t r = begin + lane; r < end && i < columns; r += kLanes) {
    load(x + r * columns, i, columns, v);
#pragma unroll
    for (int e = 0; e < kEach; ++e) sum[e] += v[e];
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e) sums[(lane * kGroups + group) * kEach + e] = sum[e];
  __syncthreads();
  const int column = int(threadIdx.x);  // one a thread, of the block's kGroups · kEach
  const int64_t at = int64_t(blockIdx.x) * kGroups * kEach + column;
  if (column >= kGroups * kEach || at >= columns) return;
  float total = 0;
  for (int l = 0; l < kLanes; ++l) total += sums[l * kGroups * kEach + column];
  parts[blockIdx.y * columns + at] = total;
}

// At least 64, and enough that narrow matrices, too, are read by every multiprocessor with all the warps it has.
int parts_of(const OpView& v) {
  constexpr int kBlocks = 1056;
  const int across = int(blocks(v.columns(0), kGroups * kEach));
  return int(std::min<int64_t>(std::max(64, kBlocks / across), (v.rows(0) + kLanes - 1) / kLanes));
}

const Registration rows(
    "sum_rows",
    [](const Binding& b) -> Launch {
      return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
        using T = decltype(zero);
        return [=, x = b.in<T>(0), y = b.out<float>(0), rows = b.rows(0), columns = b.columns(0),
                onto = b.accumulates(0), parts = b.workspace<float>(), count = parts_of(b), queue = b.queue()] {
          launch(sum_rows<T>, dim3(blocks(columns, kGroups * kEach), unsigned(count)), kBlock, 0, queue, x, parts, rows,
                 columns);
          launch_sum_parts(parts, count, columns, y, onto, queue);
        };
      });
    },
    [](const OpView& v, int) { return parts_of(v) * v.columns(0) * 4; });

// Sums of squares. A warp takes a unit, at most kUnit elements of a row, in 16-byte loads that are all under way at
// once, and adds them up in f64 in a fixed tree; of a vector, whose rows are its elements, a unit is 32 of them. Units
// are added exactly (strata/exact_sum.h), so that neither their order nor which block has them matters: lane k of a
// warp keeps digit k as an integer. Before, one warp added the sums of all rows and one thread the digits of its lanes:
// 36 us a call on an H200, whatever the size.
constexpr int kUnit = 1024, kSumBlock = 256, kSumBlocks = 264;  // blocks: two a multiprocessor of the largest GPUs
constexpr int kDigits = kExactSum - 1;
constexpr int kSumLanes = 32;  // of the block that adds the blocks' parts

STRATA_DEVICE uint64_t double_bits(double x) {
#ifdef STRATA_EMULATE
  return std::bit_cast<uint64_t>(x);
#else
  return uint64_t(__double_as_longlong(x));
#endif
}
STRATA_DEVICE double power_of_two(int exponent) {
#ifdef STRATA_EMULATE
  return std::bit_cast<double>(uint64_t(1023 + exponent) << 52);
#else
  return __longlong_as_double(int64_t(1023 + exponent) << 52);
#endif
}

// What a value that is not negative has in digit k, in units of it; lane kDigits notes what is not finite.
STRATA_DEVICE void add_digit(uint64_t& sum, double value) {
  const int k = int(threadIdx.x) % 32;
  const uint64_t bits = double_bits(value), mantissa = (bits & 0xFFFFFFFFFFFFFull) | uint64_t{1} << 52;
  const int exponent = int(bits >> 52 & 0x7FF), shift = exponent - 1023 - 52 - (32 * k - 320);  // of the lowest bit
  if (exponent == 0x7FF) {
    if (k == kDigits) sum = 1;
  } else if (k < kDigits && shift > -53 && shift < 32) {
    sum += (shift >= 0 ? mantissa << shift : mantissa >> -shift) & 0xFFFFFFFFu;
  }
}

// `digits` (kExactSum) in shared memory become doubles, with what is above 32 bits passed on.
STRATA_DEVICE void write_sum(uint64_t* digits, double* out) {
  __syncthreads();
  if (threadIdx.x == 0)
    for (int k = 0; k + 1 < kDigits; ++k) {
      digits[k + 1] += digits[k] >> 32;
      digits[k] &= 0xFFFFFFFFu;
    }
  __syncthreads();
  const int k = int(threadIdx.x);
  if (k < kDigits) out[k] = double(digits[k]) * power_of_two(32 * k - 320);
  if (k == kDigits) out[k] = digits[k] > 0 ? double(bits_to_float(0x7FC00000u)) : 0.0;
}

// The digits of this block's warps: the result where there is but one block, or a part of it.
template <int kThreads>
STRATA_DEVICE void write_digits(uint64_t mine, uint64_t* parts, double* out) {
  __shared__ uint64_t digits[kThreads];
  digits[threadIdx.x] = mine;
  __syncthreads();
  uint64_t sum = 0;
  for (int w = 0; w < kThreads / 32 && threadIdx.x < kExactSum; ++w) sum += digits[w * 32 + int(threadIdx.x)];
  __syncthreads();
  if (threadIdx.x < kExactSum) (gridDim.x > 1 ? parts + blockIdx.x * kExactSum : digits)[threadIdx.x] = sum;
  if (gridDim.x == 1) write_sum(digits, out);
}

// The sum of a warp's squares of x[i], i < count, in f64: the same bits wherever x lies.
template <class T>
STRATA_DEVICE double unit_squares(const T* x, int count) {
  constexpr int N = kPack<T>, kLoads = kUnit / 32 / N;
  const int lane = int(threadIdx.x) % 32;
  const bool whole = count % N == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
  Raw<T> v[kLoads];
#pragma unroll
  for (int j = 0; j < kLoads; ++j) v[j] = Raw<T>(x, (j * 32 + lane) * N, count, whole);
  double sum = 0;
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    float squares = 0;
#pragma unroll
    for (int e = 0; e < N; ++e) squares += v[j][e] * v[j][e];
    sum += double(squares);
  }
#pragma unroll
  for (int width = 16; width > 0; width /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, width);
  return sum;
}

template <class T>
STRATA_KERNEL __launch_bounds__(kSumBlock)
    add_squares(const T* x, int64_t rows, int64_t length, uint64_t* parts, double* out) {
  const int64_t of_row = (length + kUnit - 1) / kUnit, step = int64_t(gridDim.x) * (kSumBlock / 32);
  uint64_t mine = 0;
  for (int64_t unit = int64_t(blockIdx.x) * (kSumBlock / 32) + threadIdx.x / 32; unit < rows * of_row; unit += step) {
    const int64_t row = unit / of_row, first = unit % of_row * kUnit, left = length - first;
    add_digit(mine, unit_squares(x + row * length + first, int(left < kUnit ? left : kUnit)));
  }
  write_digits<kSumBlock>(mine, parts, out);
}

// A warp looks at each of 32 elements in turn, which takes long: a block has as many warps as it can.
constexpr int kVectorBlock = 1024;
template <class T>
STRATA_KERNEL __launch_bounds__(kVectorBlock)
    add_vector_squares(const T* x, int64_t count, uint64_t* parts, double* out) {
  uint64_t mine = 0;
  for (int64_t first = int64_t(blockIdx.x) * kVectorBlock + threadIdx.x / 32 * 32; first < count;
       first += int64_t(gridDim.x) * kVectorBlock) {
    const int64_t i = first + threadIdx.x % 32;
    const double value = i < count ? double(to_float(x[i])) : 0.0;
    for (int lane = 0; lane < 32; ++lane) add_digit(mine, __shfl_sync(0xFFFFFFFFu, value * value, lane));
  }
  write_digits<kVectorBlock>(mine, parts, out);
}

STRATA_KERNEL add_digits(const uint64_t* parts, int count, double* out) {
  __shared__ uint64_t digits[kSumLanes * kExactSum];
  uint64_t sum = 0;
  for (int p = int(threadIdx.x); p < count * kExactSum; p += kSumLanes * kExactSum) sum += parts[p];
  digits[threadIdx.x] = sum;
  __syncthreads();
  sum = 0;
  for (int p = 0; p < kSumLanes && threadIdx.x < kExactSum; ++p) sum += digits[p * kExactSum + int(threadIdx.x)];
  __syncthreads();
  if (threadIdx.x < kExactSum) digits[threadIdx.x] = sum;
  write_sum(digits, out);
}

// What is summed as rows: of a vector single elements. A few units are one block's, which needs no second kernel.
struct Rows {
  bool vector;
  int64_t count, length;
  explicit Rows(const Tensor& x)
      : vector(x.shape.size() == 1),
        count(x.shape.empty() ? 1 : x.shape[0]),
        length(elements(x.shape) / std::max<int64_t>(1, count)) {}
  unsigned blocks() const {
    const int64_t units = vector ? (count + 31) / 32 : count * ((length + kUnit - 1) / kUnit),
                  warps = (vector ? kVectorBlock : kSumBlock) / 32;
    return units <= 4 * warps ? 1 : unsigned(std::min<int64_t>(kSumBlocks, (units + warps - 1) / warps));
  }
};

const Registration squares(
    "sum_of_squares",
    [](const Binding& b) -> Launch {
      return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
        using T = decltype(zero);
        return [=, x = b.in<T>(0), out = b.out<double>(0), rows = Rows(b.input(0)), parts = b.workspace<uint64_t>(),
                queue = b.queue()] {
          const unsigned blocks = rows.blocks();
          if (rows.vector)
            launch(add_vector_squares<T>, dim3(blocks), kVectorBlock, 0, queue, x, rows.count, parts, out);
          else
            launch(add_squares<T>, dim3(blocks), kSumBlock, 0, queue, x, rows.count, rows.length, parts, out);
          if (blocks > 1) launch(add_digits, dim3(1), kSumLanes * kExactSum, 0, queue, parts, int(blocks), out);
        };
      });
    },
    [](const OpView& v, int) {
      const unsigned blocks = Rows(v.input(0)).blocks();
      return blocks > 1 ? int64_t(blocks) * kExactSum * 8 : 0;
    });

constexpr int kMostSums = 256;
struct Sums {
  const double* from[kMostSums];
};
STRATA_KERNEL add_sums(Sums sums, int count, double* out, bool first) {
  const int k = int(threadIdx.x);
  double sum = first ? 0 : out[k];
  for (int i = 0; i < count; ++i) sum += sums.from[i][k];
  out[k] = sum;
}
STRATA_KERNEL carry_sum(double* out) { carry(out); }

const Registration sums("add_sums", [](const Binding& b) -> Launch {
  std::vector<std::pair<Sums, int>> groups;
  for (int i = 0; i < b.inputs(); ++i) {
    if (i % kMostSums == 0) groups.push_back({});
    groups.back().first.from[groups.back().second++] = b.in<double>(i);
  }
  return [=, out = b.out<double>(0), queue = b.queue()] {
    for (size_t g = 0; g < groups.size(); ++g) {
      launch(add_sums, dim3(1), kExactSum, 0, queue, groups[g].first, groups[g].second, out, g == 0);
      launch(carry_sum, dim3(1), 1, 0, queue, out);
    }
  };
});

}  // namespace
}  // namespace strata::cuda::reduce_kernels
