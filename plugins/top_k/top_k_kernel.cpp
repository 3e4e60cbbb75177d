// Selection by three histograms of the bits of absolute values, which are in the order of their sizes. See
// top_k_kernel.h.
#include "plugins/top_k/top_k_kernel.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "strata/communicator.h"
#include "strata/convert.h"

namespace strata::top_k {
namespace {

constexpr int kWidths[] = {11, 10, 10};  // of the 31 bits below the sign, from the highest
constexpr int64_t kBins = 1 << 11;
constexpr int64_t kChunk = 1024;
constexpr int64_t kWorthThreads = 1 << 14;  // elements

uint32_t size_key(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffffu; }

void accumulate(DType dtype, const void* gradient, Range range, float momentum, float* velocity, float* accumulated) {
  float chunk[kChunk];
  for (int64_t i = range.begin; i < range.end; i += kChunk) {
    const int64_t some = std::min(kChunk, range.end - i);
    to_f32(dtype, at(gradient, dtype, i), chunk, some);
    if (velocity)
      for (int64_t c = 0; c < some; ++c) chunk[c] = velocity[i + c] = momentum * velocity[i + c] + chunk[c];
    for (int64_t c = 0; c < some; ++c) accumulated[i + c] += chunk[c];
  }
}

}  // namespace

int64_t kept(int64_t elements, double sparsity) {
  return std::clamp<int64_t>(std::llround((1 - sparsity) * double(elements)), 1, std::max<int64_t>(1, elements));
}

int64_t list_bytes(int64_t k, DType dtype) { return (k * (4 + size_of(dtype)) + 3) / 4 * 4; }

int64_t workspace_bytes(int threads) { return threads * (kBins + 2) * int64_t(sizeof(int64_t)); }

void take_nothing(int64_t k, DType dtype, std::byte* list) {
  std::memset(list, 0, size_t(list_bytes(k, dtype)));
  std::fill_n(reinterpret_cast<uint32_t*>(list), k, kNone);
}

void take(Threads& threads, DType dtype, const void* gradient, int64_t count, int64_t k, float momentum,
          float* velocity, float* accumulated, void* workspace, std::byte* list) {
  take_nothing(k, dtype, list);
  auto* const indices = reinterpret_cast<uint32_t*>(list);
  void* const values = indices + k;
  k = std::min(k, count);
  if (k == 0) return;
  const int pieces = count < kWorthThreads ? 1 : threads.count();
  const auto each_piece = [&](auto&& body) {
    if (pieces == 1) return body(0);
    threads.parallel(body);
  };
  auto* const bins = static_cast<int64_t*>(workspace);  // of each piece
  int64_t* const larger = bins + pieces * kBins;        // elements of each piece above the smallest that is sent,
  int64_t* const equal = larger + pieces;               // and of its size

  uint32_t smallest = 0;  // its highest bits, as far as they are known
  int shift = 31;
  int64_t left = k;  // to be taken from what begins with these bits
  for (int width : kWidths) {
    const int below = shift - width;
    each_piece([&](int piece) {
      const Range range = share_of(count, piece, pieces);
      if (shift == 31) accumulate(dtype, gradient, range, momentum, velocity, accumulated);
      int64_t* const own = bins + piece * kBins;
      std::fill_n(own, kBins, 0);
      for (int64_t i = range.begin; i < range.end; ++i) {
        const uint32_t key = size_key(accumulated[i]);
        if (key >> shift == smallest) ++own[(key >> below) & ((1u << width) - 1)];
      }
    });
    int64_t bin = int64_t{1} << width;
    for (int64_t here = 0; here < left;) {
      left -= here;
      here = 0;
      --bin;
      for (int piece = 0; piece < pieces; ++piece) here += bins[piece * kBins + bin];
    }
    smallest = smallest << width | uint32_t(bin);
    shift = below;
  }
  each_piece([&](int piece) {
    const Range range = share_of(count, piece, pieces);
    int64_t above = 0, same = 0;
    for (int64_t i = range.begin; i < range.end; ++i) {
      const uint32_t key = size_key(accumulated[i]);
      above += key > smallest, same += key == smallest;
    }
    larger[piece] = above, equal[piece] = same;
  });
  each_piece([&](int piece) {
    int64_t place = 0, same = left;
    for (int before = 0; before < piece; ++before) {
      const int64_t taken = std::min(same, equal[before]);
      place += larger[before] + taken, same -= taken;
    }
    const Range range = share_of(count, piece, pieces);
    for (int64_t i = range.begin; i < range.end; ++i) {
      const uint32_t key = size_key(accumulated[i]);
      if (key < smallest || (key == smallest && same-- <= 0)) continue;
      indices[place] = uint32_t(i);
      from_f32(dtype, accumulated + i, at(values, dtype, place), 1);
      float sent;
      to_f32(dtype, at(values, dtype, place++), &sent, 1);
      accumulated[i] = std::isfinite(sent) ? accumulated[i] - sent : 0;
      if (velocity) velocity[i] = 0;
    }
  });
}

void add_up(Threads& threads, DType dtype, const std::byte* lists, int64_t ranks, int64_t bytes, int64_t k,
            int64_t first, int64_t count, void* result) {
  threads.split(count, kChunk, [&](int64_t begin, int64_t end) {
    float sum[kChunk];
    for (int64_t i = begin; i < end; i += kChunk) {
      const int64_t some = std::min(kChunk, end - i);
      std::fill_n(sum, some, 0.0f);
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const auto* const indices = reinterpret_cast<const uint32_t*>(lists + rank * bytes);
        const void* const values = indices + k;
        for (int64_t e = std::lower_bound(indices, indices + k, first + i) - indices;
             e < k && int64_t{indices[e]} < first + i + some; ++e) {
          float value;
          to_f32(dtype, at(values, dtype, e), &value, 1);
          sum[indices[e] - first - i] += value;
        }
      }
      from_f32(dtype, sum, at(result, dtype, i), some);
    }
  });
}

}  // namespace strata::top_k
