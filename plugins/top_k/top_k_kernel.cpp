// Selection by three histograms of the bits of absolute values, which are in the order of their sizes: of the largest
// of each group of neighbours, then of the elements of those groups that can have any to send. See top_k_kernel.h.
#include "plugins/top_k/top_k_kernel.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "plugins/quantized_exchange/streaming.h"
#include "strata/communicator.h"
#include "strata/convert.h"
#include "strata/simd.h"

namespace strata::top_k {
namespace {

constexpr int kWidths[] = {11, 10, 10};  // of the 31 bits below the sign, from the highest
constexpr int64_t kBins = 1 << 11;
constexpr int64_t kChunk = 1024;
constexpr int64_t kWorthThreads = 1 << 14;  // elements

constexpr int64_t kSpare = 64;   // candidates of a piece, beside its part of them
constexpr int64_t kAhead = 32;   // groups: as long as memory takes to answer
constexpr int64_t kGroup = 128;  // neighbours of which the largest is known; a chunk is some of these

STRATA_INLINE uint32_t size_key(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffffu; }
// For candidates of each of some pieces: there are somewhat more than are sent, and of these no more than groups.
int64_t room_for(int64_t groups, int pieces) { return 2 * groups / pieces + kSpare; }
int64_t groups_of(int64_t count) { return (count + kGroup - 1) / kGroup; }

// Adds a chunk to what is accumulated, by way of the velocity if there is one; `most`: the largest of each group's
// keys.
STRATA_SIMD void accumulate(const float* gradient, int64_t count, float momentum, float* velocity, float* accumulated,
                            uint32_t* most) {
  for (int64_t g = 0; g < count; g += kGroup) {
    const int64_t end = std::min(count, g + kGroup);
    if (velocity)
      for (int64_t i = g; i < end; ++i) accumulated[i] += velocity[i] = momentum * velocity[i] + gradient[i];
    else
      for (int64_t i = g; i < end; ++i) accumulated[i] += gradient[i];
    uint32_t top = 0;
    for (int64_t i = g; i < end; ++i) top = std::max(top, size_key(accumulated[i]));
    *most++ = top;
  }
}

}  // namespace

int64_t kept(int64_t elements, double sparsity) {
  return std::clamp<int64_t>(std::llround((1 - sparsity) * double(elements)), 1, std::max<int64_t>(1, elements));
}

int64_t list_bytes(int64_t k, DType dtype) { return (k * (4 + size_of(dtype)) + 3) / 4 * 4; }

int64_t workspace_bytes(int64_t elements, int threads) {
  const int64_t groups = groups_of(elements);
  return threads * (kBins + 3) * int64_t(sizeof(int64_t)) + (3 * groups + kSpare * threads) * int64_t(sizeof(uint32_t));
}

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
  int64_t* const found = equal + pieces;                // candidates of each piece
  const int64_t groups = groups_of(count), room = room_for(groups, pieces);
  auto* const most = reinterpret_cast<uint32_t*>(found + pieces);  // of each group
  uint32_t* const candidates = most + groups;                      // `room` a piece

  each_piece([&](int piece) {
    const Range own = share_of(groups, piece, pieces);
    float chunk[kChunk];
    for (int64_t i = own.begin * kGroup, end = std::min(count, own.end * kGroup); i < end; i += kChunk) {
      const int64_t some = std::min(kChunk, end - i);
      const auto* from = static_cast<const float*>(at(gradient, dtype, i));
      if (dtype != DType::f32) to_f32(dtype, from, chunk, some), from = chunk;
      accumulate(from, some, momentum, velocity ? velocity + i : nullptr, accumulated + i, most + i / kGroup);
    }
  });
  // The k-th largest of keys, and how many of its size are among the k largest. `visit` gives those of a piece.
  const auto kth_largest = [&](int64_t wanted, auto&& visit) {
    uint32_t smallest = 0;  // its highest bits, as far as they are known
    int shift = 31;
    int64_t left = wanted;  // to be taken from what begins with these bits
    for (int width : kWidths) {
      const int below = shift - width;
      each_piece([&](int piece) {
        int64_t* const own = bins + piece * kBins;
        std::fill_n(own, kBins, 0);
        visit(piece, [&](uint32_t key) {
          if (key >> shift == smallest) ++own[(key >> below) & ((1u << width) - 1)];
        });
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
    return std::pair(smallest, left);
  };
  // Each group has one element of its largest size: so k of them are at least the k-th largest group's, and what is
  // sent is in groups that reach it, which are few where little is sent.
  uint32_t floor = 0;
  if (k <= groups)
    floor = kth_largest(k, [&](int piece, auto&& see) {
              const Range own = share_of(groups, piece, pieces);
              for (int64_t g = own.begin; g < own.end; ++g) see(most[g]);
            }).first;
  const auto each_element = [&](int piece, uint32_t least, auto&& body) {
    const Range own = share_of(groups, piece, pieces);
    for (int64_t g = own.begin; g < own.end; ++g) {
      if (const int64_t next = g + kAhead; next < own.end && most[next] >= least)
        for (int64_t i = 0; i < kGroup; i += 16) __builtin_prefetch(accumulated + next * kGroup + i);
      if (most[g] < least) continue;
      for (int64_t i = g * kGroup, end = std::min(count, i + kGroup); i < end; ++i) body(i, size_key(accumulated[i]));
    }
  };
  // Elements that reach it, of each piece, as far as there is room for them.
  std::atomic<bool> is_whole = true;
  each_piece([&](int piece) {
    int64_t here = 0;
    uint32_t* const own = candidates + piece * room;
    each_element(piece, floor, [&](int64_t i, uint32_t key) {
      if (key >= floor && here++ < room) own[here - 1] = uint32_t(i);
    });
    found[piece] = here;
    if (here > room) is_whole = false;
  });
  const bool listed = is_whole;
  const auto each_candidate = [&](int piece, uint32_t least, auto&& body) {
    if (!listed) return each_element(piece, least, body);
    for (const uint32_t *i = candidates + piece * room, *end = i + found[piece]; i < end; ++i)
      body(int64_t{*i}, size_key(accumulated[*i]));
  };
  const auto [smallest, left] = kth_largest(k, [&](int piece, auto&& see) {
    each_candidate(piece, floor, [&](int64_t, uint32_t key) {
      if (key >= floor) see(key);
    });
  });
  each_piece([&, smallest = smallest](int piece) {
    int64_t above = 0, same = 0;
    each_candidate(piece, smallest, [&](int64_t, uint32_t key) { above += key > smallest, same += key == smallest; });
    larger[piece] = above, equal[piece] = same;
  });
  each_piece([&, smallest = smallest, left = left](int piece) {
    int64_t place = 0, same = left;
    for (int before = 0; before < piece; ++before) {
      const int64_t taken = std::min(same, equal[before]);
      place += larger[before] + taken, same -= taken;
    }
    each_candidate(piece, smallest, [&](int64_t i, uint32_t key) {
      if (key < smallest || (key == smallest && same-- <= 0)) return;
      indices[place] = uint32_t(i);
      from_f32(dtype, accumulated + i, at(values, dtype, place), 1);
      float sent;
      to_f32(dtype, at(values, dtype, place++), &sent, 1);
      accumulated[i] = std::isfinite(sent) ? accumulated[i] - sent : 0;
      if (velocity) velocity[i] = 0;
    });
  });
}

void add_up(Threads& threads, DType dtype, const std::byte* lists, int64_t ranks, int64_t bytes, int64_t k,
            int64_t first, int64_t count, void* result) {
  const bool past = dtype == DType::f32 && 4 * count >= kPastCaches;
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
      if (past)
        store_past_caches(static_cast<float*>(result) + i, sum, some);
      else
        from_f32(dtype, sum, at(result, dtype, i), some);
    }
    if (past) drain_stores();
  });
}

}  // namespace strata::top_k
