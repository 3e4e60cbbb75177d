// Which scores of attention on tensor cores there are (flash_attention.h): what a block of queries sees of a tile of
// keys, what dropout keeps, and in which order blocks go.
#pragma once
#include <algorithm>

#include "cuda/kernels/flash_tiles.h"

namespace strata::cuda::flash {

// Of the rows of a warp, from `first` on, what they see: masks are looked at in tiles at its borders only.
template <int M>
struct Seen {
  int lowest, highest, border;  // columns that any row sees, and from where on all of them do
  int first, from[M][2];        // the lane's own rows: begin
  STRATA_DEVICE Seen(const Sizes& s, int n, int first) : first(first) {
    const Lane at;
    const auto begin = [&](int row) { return s.begin(n, row < s.time ? row : s.time - 1); };
    highest = first + 16 * M - 1;
    lowest = first < s.time ? begin(first) : highest + 1;
    border = begin(highest);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) from[m][half] = begin(first + 16 * m + at.g + 8 * half);
  }
  int column = 0;
  // The tile that is asked about, of N columns from `from` on.
  template <int N>
  STRATA_DEVICE void look(int from, const int*) {
    column = from;
  }
  template <int N>
  STRATA_DEVICE bool any() const {
    return column <= highest && column + N > lowest;
  }
  template <int N>
  STRATA_DEVICE bool all() const {
    return column + N - 1 <= first && column >= border;
  }
  template <int N>
  STRATA_DEVICE void mask(Scores<M, N>& scores) const {
    const Lane at;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t last = uint32_t(first + 16 * m + at.g + 8 * half - from[m][half]);  // seen: from 0 to it
        const uint32_t mine = uint32_t(column + 2 * at.t - from[m][half]);
#pragma unroll
        for (int c = 0; c < N / 8; ++c)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (mine + uint32_t(8 * c + e) > last) scores[m][c][2 * half + e] = -kInfinity;
      }
  }
};

// Which scores of a tile dropout keeps, a bit each: bit 4 c + i of a lane's [c][i]. A draw of four words is that of
// four keys of a query, which two or four lanes share: each makes the draws of some, all give each other theirs.
// Rows are queries: lanes t and t ^ 1 have columns of the same four, each draws for one of the rows g and g + 8.
template <int N>
STRATA_DEVICE uint32_t kept_of_queries(const Dropped& d, int n, int head, int row, int column) {
  const Lane at;
  const int half = at.t % 2;
  const int64_t index = d.index(n, head, row + at.g + 8 * half) + column + at.t / 2 * 4;
  uint32_t mine = 0, bits = 0;
#pragma unroll 1
  for (int c = 0; c < N / 8; ++c) {
    const Words words = d.words(index + 8 * c);
#pragma unroll
    for (int i = 0; i < 4; ++i) mine |= uint32_t(words.word[i] >= d.threshold) << (4 * c + i);
  }
  const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, mine, 1);
  const uint32_t of_rows[2] = {half == 0 ? mine : other, half == 0 ? other : mine};
  const uint32_t two = 0x33333333u;  // of each four columns those of this lane, for row g and for row g + 8
  bits = (of_rows[0] >> (2 * half) & two) | (of_rows[1] >> (2 * half) & two) << 2;
  return bits;
}
// Rows are keys: lanes of the same g / 4 have keys of the same four, each draws for one of the four results of a tile.
template <int N>
STRATA_DEVICE uint32_t kept_of_keys(const Dropped& d, int n, int head, int query, int row) {
  const Lane at;
  const int i = at.g % 4;
  const int64_t index = d.index(n, head, query + 2 * at.t + i % 2) + row + at.g / 4 * 4 + i / 2 * 8;
  uint32_t mine = 0, bits = 0;
#pragma unroll 1
  for (int c = 0; c < N / 8; ++c) {
    const Words words = d.words(index + 8 * c * d.row);
#pragma unroll
    for (int k = 0; k < 4; ++k) mine |= uint32_t(words.word[k] >= d.threshold) << (4 * c + k);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)  // bit g % 4 of each four of what lane j has is that of [c][j]
    bits |= (__shfl_sync(0xFFFFFFFFu, mine, (at.lane & ~12) | j << 2) >> i & 0x11111111u) << j;
  return bits;
}
template <int M, int N>
STRATA_DEVICE void drop(Scores<M, N>& p, const uint32_t (&kept)[M], float factor) {
  each<M, N>(p, [&](int m, int c, int i) { p[m][c][i] = kept[m] >> (4 * c + i) & 1 ? p[m][c][i] * factor : 0.0f; });
}

// Keys that lie with their queries, in rows of s.width: row and column are the position. What kernels ask of keys:
// where they are, which tiles of them a block of queries looks at, and what of a tile its rows see; and the same for a
// block of keys and tiles of queries.
struct OwnKeys {
  static constexpr bool kApart = false;
  static constexpr int kPlaces = 1;  // ints of shared memory for what is noted of a tile
  Sizes s;
  template <int M>
  using Seen = flash::Seen<M>;

  STRATA_DEVICE int keys() const { return s.time; }
  STRATA_DEVICE int width() const { return s.width; }
  STRATA_DEVICE int key(int group) const { return s.key(group); }
  STRATA_DEVICE int value(int group) const { return s.value(group); }
  template <int M>
  STRATA_DEVICE Seen<M> seen(int n, int first) const {
    return Seen<M>(s, n, first);
  }
  // Tiles for queries [first, first + rows): from the first of them to an end, each after the other.
  STRATA_DEVICE int first_tile(int n, int first, int) const { return s.begin(n, first) / kKeys * kKeys; }
  STRATA_DEVICE int next_tile(int k, int, int) const { return k + kKeys; }
  STRATA_DEVICE int end(int first, int rows) const { return first + rows < s.time ? first + rows : s.time; }
  STRATA_DEVICE void note_keys(int*, int) const {}

  // Queries for keys [first, first + rows), in tiles of N.
  template <int N>
  STRATA_DEVICE int first_query(int first, int) const {
    return first;
  }
  template <int N>
  STRATA_DEVICE int end_of_queries(int n, int first, int rows) const {
    return s.end(n, first + rows - 1, first, N);
  }
  template <int N>
  STRATA_DEVICE void note_queries(int*, int, int) const {}
  // Of 16 M keys from `first` on, which queries of a tile of N see them.
  template <int M, int N>
  struct SeenBy {
    const Sizes& s;
    int n, first, last;
    int query = 0, behind = 0;  // the tile, and what the last of it sees
    STRATA_DEVICE SeenBy(const OwnKeys& own, int n, int first)
        : s(own.s), n(n), first(first), last(first + 16 * M - 1) {}
    // Queries from `time` on are zeros, as their slopes are: nothing comes of them.
    STRATA_DEVICE void look(int tile, const int*) {
      query = tile;
      behind = s.begin(n, tile + N <= s.time ? tile + N - 1 : s.time - 1);
    }
    STRATA_DEVICE bool any() const { return first < s.time && query + N > first && s.begin(n, query) <= last; }
    STRATA_DEVICE bool all() const { return query >= last && behind <= first; }
    STRATA_DEVICE void mask(Scores<M, N>& scores) const {
      const Lane at;
#pragma unroll
      for (int c = 0; c < N / 8; ++c)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = query + 8 * c + 2 * at.t + e, begin = s.begin(n, column < s.time ? column : s.time - 1);
#pragma unroll
          for (int m = 0; m < M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
              if (uint32_t(first + 16 * m + at.g + 8 * half - begin) > uint32_t(column - begin))
                scores[m][c][2 * half + e] = -kInfinity;
        }
    }
  };
};

// The order of blocks, each for a tile of a slice (a head, or a group of heads that share keys, of a sequence): those
// with most to do first, so that the last ones end together; as many slices at a time as a GPU's cache holds the
// tensors of. Where all blocks run at once, in pairs, two a multiprocessor, the one with most to do shares it with that
// with least.
struct Order {
  int tiles, heads, slices, at_once, fold = 0;
  Order(unsigned tiles, unsigned heads, unsigned batch, int64_t slice_bytes)
      : tiles(int(tiles)), heads(int(heads)), slices(int(heads * batch)) {
    constexpr int64_t kCache = 16 << 20;
    at_once = int(std::clamp<int64_t>(kCache / slice_bytes, 1, slices));
    const int blocks = this->tiles * slices, places = multiprocessors();
    if (blocks <= places || blocks > 2 * places) return;
    at_once = slices, fold = places;
  }
  dim3 grid() const { return dim3(unsigned(tiles) * unsigned(slices)); }

  struct Place {
    int tile, head, n;  // tile 0 has most to do
  };
  STRATA_DEVICE Place place() const {
    int block = int(blockIdx.x);
    if (fold > 0 && block >= fold) block = tiles * slices - 1 - (block - fold);
    const int first = block / (tiles * at_once) * at_once, within = block % (tiles * at_once);
    const int width = slices - first < at_once ? slices - first : at_once, slice = first + within % width;
    return {within / width, slice % heads, slice / heads};
  }
};

}  // namespace strata::cuda::flash
