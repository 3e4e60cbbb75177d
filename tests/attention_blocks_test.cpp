// The order in which blocks of attention's kernels go (cuda/kernels/flash_keys.h): each tile of each head once, those
// with most to do first, and where all run at once, in pairs of equal work.
#ifdef STRATA_EMULATED_CUDA
#define STRATA_EMULATE
#include <gtest/gtest.h>

#include <set>

#include "cuda/kernels/flash_keys.h"

namespace strata::cuda::flash {
namespace {

Order::Place place_of(const Order& order, unsigned block) {
  Emulator::get().block_index = dim3(block);
  return order.place();
}

TEST(AttentionBlocks, EachTileOfEachHeadIsOneBlocks) {
  for (const unsigned tiles : {1u, 3u, 16u})
    for (const unsigned heads : {1u, 2u, 5u})
      for (const unsigned batch : {1u, 3u})
        for (const int64_t bytes : {int64_t(1), int64_t(5) << 20, int64_t(1) << 40}) {  // many, three and one at a time
          const Order order(tiles, heads, batch, bytes);
          ASSERT_EQ(order.grid().x, tiles * heads * batch);
          std::set<std::tuple<int, int, int>> seen;
          for (unsigned block = 0; block < order.grid().x; ++block) {
            const auto at = place_of(order, block);
            EXPECT_TRUE(at.tile >= 0 && at.tile < int(tiles) && at.head >= 0 && at.head < int(heads) && at.n >= 0 &&
                        at.n < int(batch));
            seen.insert({at.tile, at.head, at.n});
          }
          EXPECT_EQ(seen.size(), size_t(order.grid().x)) << tiles << " " << heads << " " << batch << " " << bytes;
        }
}

TEST(AttentionBlocks, ThoseWithMostToDoGoFirstOrInPairs) {
  const Order many(16, 2, 3, 1);  // more blocks than the device takes at once
  for (unsigned block = 1; block < many.grid().x; ++block)
    EXPECT_GE(place_of(many, block).tile, place_of(many, block - 1).tile);
  const unsigned places = unsigned(multiprocessors());
  const Order pairs(places, 2, 1, 1);
  for (unsigned block = 0; block < places; ++block)
    EXPECT_EQ(place_of(pairs, block).tile + place_of(pairs, block + places).tile, int(places) - 1);
}

}  // namespace
}  // namespace strata::cuda::flash
#endif
