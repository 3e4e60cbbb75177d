// Reduction kernels; see reduce.h. Blocks that fit the first-level cache go through the whole tree at once.
#include "comm/reduce.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "strata/convert.h"
#include "strata/simd.h"
#include "strata/error.h"

namespace strata {
namespace {

constexpr int64_t kBlock = 1024;  // elements that go through the tree together

template <class T>
STRATA_INLINE T combine(T a, T b, Reduction reduction) {
  return reduction == Reduction::sum ? a + b : std::max(a, b);
}

STRATA_SIMD void add_f32(const float* a, const float* b, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
}
STRATA_SIMD void add4_f32(const float* a, const float* b, const float* c, const float* d, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = (a[i] + b[i]) + (c[i] + d[i]);
}

template <class T>
void apply(const T* a, const T* b, T* out, int64_t n, Reduction reduction) {
  if constexpr (std::is_same_v<T, float>)
    if (reduction == Reduction::sum) return add_f32(a, b, out, n);
  for (int64_t i = 0; i < n; ++i) out[i] = combine(a[i], b[i], reduction);
}

template <class T>
const T* tree(const T* const* in, int count, int64_t n, std::vector<T>* levels, int level, Reduction reduction) {
  if (count == 1) return in[0];
  const int split = tree_split(count);
  const T* a = tree(in, split, n, levels, level + 1, reduction);
  // The left result stays in its level's first half while the right one is made.
  T* room = levels[level].data();
  if (a != in[0] || split > 1) {
    std::memcpy(room, a, size_t(n) * sizeof(T));
    a = room;
  }
  const T* b = tree(in + split, count - split, n, levels, level + 1, reduction);
  apply(a, b, room, n, reduction);
  return room;
}

template <class T>
void reduce(std::span<const std::byte* const> in, std::byte* out, int64_t count, Reduction reduction) {
  T* result = reinterpret_cast<T*>(out);
  const auto at = [&](size_t i) { return reinterpret_cast<const T*>(in[i]); };
  if (in.size() == 2) return apply(at(0), at(1), result, count, reduction);
  if constexpr (std::is_same_v<T, float>)
    if (in.size() == 4 && reduction == Reduction::sum) return add4_f32(at(0), at(1), at(2), at(3), result, count);
  thread_local std::vector<T> levels[11];
  for (auto& level : levels) level.resize(kBlock);
  thread_local std::vector<const T*> block;
  block.resize(in.size());
  for (int64_t i = 0; i < count; i += kBlock) {
    for (size_t r = 0; r < in.size(); ++r) block[r] = at(r) + i;
    const int64_t n = std::min(kBlock, count - i);
    std::memmove(result + i, tree(block.data(), int(block.size()), n, levels, 0, reduction), size_t(n) * sizeof(T));
  }
}

// 16 bits: widened, summed in f32 through the whole tree, rounded once.
void reduce_half(DType dtype, std::span<const std::byte* const> in, std::byte* out, int64_t count,
                 Reduction reduction) {
  std::vector<std::vector<float>> wide(in.size(), std::vector<float>(kBlock));
  std::vector<const std::byte*> pointers;
  for (const auto& block : wide) pointers.push_back(reinterpret_cast<const std::byte*>(block.data()));
  std::vector<float> sum(kBlock);
  for (int64_t i = 0; i < count; i += kBlock) {
    const int64_t n = std::min(kBlock, count - i);
    for (size_t r = 0; r < in.size(); ++r) to_f32(dtype, in[r] + i * 2, wide[r].data(), n);
    reduce<float>(pointers, reinterpret_cast<std::byte*>(sum.data()), n, reduction);
    from_f32(dtype, sum.data(), out + i * 2, n);
  }
}

// The same, but what each addition makes is rounded: n elements from `first` on, to `out` as f32.
void add_rounded(DType dtype, std::span<const std::byte* const> in, int64_t first, int64_t n, float* out,
                 Reduction reduction) {
  if (in.size() == 1) return to_f32(dtype, in[0] + first * 2, out, n);
  const size_t split = size_t(tree_split(int(in.size())));
  std::vector<float> right(static_cast<size_t>(n));
  add_rounded(dtype, in.first(split), first, n, out, reduction);
  add_rounded(dtype, in.subspan(split), first, n, right.data(), reduction);
  apply(out, right.data(), out, n, reduction);
  std::vector<uint16_t> rounded(static_cast<size_t>(n));
  from_f32(dtype, out, rounded.data(), n);
  to_f32(dtype, rounded.data(), out, n);
}

void reduce_rounded(DType dtype, std::span<const std::byte* const> in, std::byte* out, int64_t count,
                    Reduction reduction) {
  std::vector<float> sum(kBlock);
  for (int64_t i = 0; i < count; i += kBlock) {
    const int64_t n = std::min(kBlock, count - i);
    add_rounded(dtype, in, i, n, sum.data(), reduction);
    from_f32(dtype, sum.data(), out + i * 2, n);
  }
}

}  // namespace

int tree_split(int count) { return int(std::bit_floor(unsigned(count - 1))); }

void reduce_tree(std::span<const std::byte* const> in, std::byte* out, int64_t bytes, DType dtype, Reduction reduction,
                 bool rounds_each) {
  if (bytes == 0) return;
  if (in.size() == 1) {
    if (in[0] != out) std::memmove(out, in[0], size_t(bytes));
    return;
  }
  const int64_t count = bytes / size_of(dtype);
  switch (dtype) {
    case DType::f32:
      return reduce<float>(in, out, count, reduction);
    case DType::f64:
      return reduce<double>(in, out, count, reduction);
    case DType::i32:
      return reduce<int32_t>(in, out, count, reduction);
    case DType::bf16:
    case DType::f16:
      return rounds_each && in.size() > 2 ? reduce_rounded(dtype, in, out, count, reduction)
                                          : reduce_half(dtype, in, out, count, reduction);
    default:
      throw Error("a reduction over ranks takes f32, f64, bf16, f16 or i32, not " + std::string(name_of(dtype)) + ".",
                  ExitCode::failed);
  }
}

Range share_of(int64_t count, int rank, int size) {
  const int64_t each = count / size, more = count % size;
  const int64_t begin = rank * each + std::min<int64_t>(rank, more);
  return {begin, begin + each + (rank < more)};
}

}  // namespace strata
