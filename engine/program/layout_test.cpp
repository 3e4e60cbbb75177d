// Layouts of any kind: random splits, nested and of any dimension, over random meshes of 1 to 8 ranks. What the ranks
// hold is cut out of whole tensors and put together again, directly and through checkpoints under any other layout.
#include "strata/layout.h"

#include <cstring>
#include <numeric>
#include <random>
#include <set>

#include "comm/world.h"
#include "engine/planning/localize.h"
#include "engine/runtime/saver.h"
#include "strata/communicator.h"
#include "tests/harness.h"
#include "tests/random_cases.h"

namespace strata::layout_test {
namespace {

using test::cases;
using test::draw;
using test::first_seed;
using test::Random;

// Up to three axes, at most eight ranks.
Mesh::Sizes random_mesh(Random& random) {
  Mesh::Sizes sizes;
  int left = 8;
  for (const char* name : {"replicate", "shard", "tensor"}) {
    const int size = int(draw(random, 1, std::min(4, left)));
    sizes.push_back({name, size});
    left /= size;
  }
  return sizes;
}

int ranks_of(const Mesh::Sizes& sizes) {
  int ranks = 1;
  for (const Mesh::Size& size : sizes) ranks *= size.ranks;
  return ranks;
}

// A tensor as coordinate 0 of every axis plans it: each axis splits one dimension or none, in any order.
Tensor random_tensor(Random& random, const Mesh& mesh, Shape shape) {
  Tensor tensor{.name = "t", .shape = {}, .role = Role::parameter, .persistent = true};
  std::vector<const Axis*> axes;
  for (const Axis& axis : mesh.axes()) axes.push_back(&axis);
  std::shuffle(axes.begin(), axes.end(), random);
  for (const Axis* axis : axes) {
    const int dimension = int(draw(random, -1, int64_t(shape.size()) - 1));
    if (dimension < 0) continue;
    int64_t& size = shape[size_t(dimension)];
    tensor.layout.push_back({.dimension = dimension, .axis = axis->name, .full = size});
    size = share_of(size, 0, axis->size).count();
  }
  tensor.shape = std::move(shape);
  return tensor;
}

Shape random_shape(Random& random) {
  Shape shape;
  for (int64_t d = draw(random, 1, 4); d > 0; --d) shape.push_back(draw(random, 1, 9));
  return shape;
}

// The tensor as a rank holds it.
Tensor of_rank(const Tensor& planned, const Mesh& mesh) {
  Program program;
  program.add(planned);
  localize(program, mesh, 1);
  return program.tensors[0];
}

// Index in the whole tensor by the definition: coordinates of the box, moved by its offset.
int64_t by_definition(const Box& box, const Shape& whole, int64_t local) {
  std::vector<int64_t> at(whole.size());
  for (size_t d = whole.size(); d-- > 0; local /= box.extent[d]) at[d] = box.offset[d] + local % box.extent[d];
  int64_t index = 0;
  for (size_t d = 0; d < whole.size(); ++d) index = index * whole[d] + at[d];
  return index;
}

TEST(Layouts, EveryElementIsHeldOnceAndFound) {
  for (uint64_t seed = first_seed(), end = seed + uint64_t(cases(300)); seed < end; ++seed) {
    SCOPED_TRACE("STRATA_SEED=" + std::to_string(seed));
    Random random(seed);
    const Mesh::Sizes sizes = random_mesh(random);
    const Shape shape = random_shape(random);
    const Tensor planned = random_tensor(random, Mesh(0, sizes), shape);
    ASSERT_EQ(planned.full_shape(), shape);
    std::vector<int> holders(size_t(elements(shape)), 0);
    for (int rank = 0; rank < ranks_of(sizes); ++rank) {
      const Tensor tensor = of_rank(planned, Mesh(rank, sizes));
      ASSERT_EQ(tensor.full_shape(), shape);
      const Box box = box_of(tensor);
      const int64_t count = elements(tensor.shape);
      const GlobalIndex global(tensor);
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(global(i), by_definition(box, shape, i));
        ++holders[size_t(global(i))];
      }
      int64_t next = draw(random, 0, count), last = draw(random, next, count);
      global.runs(next, last, [&](int64_t local, int64_t index, int64_t run) {
        ASSERT_EQ(local, next);
        ASSERT_GT(run, 0);
        for (int64_t i = 0; i < run; ++i) ASSERT_EQ(global(local + i), index + i);
        next += run;
      });
      ASSERT_EQ(next, last);
    }
    int copies = ranks_of(sizes);
    for (const Split& split : planned.layout) copies /= Mesh(0, sizes).size(split.axis);
    for (int held : holders) ASSERT_EQ(held, copies);
  }
}

// Pairs of chunks, in any dimension, beside splits of others and with a later one of their own.
TEST(Layouts, PairsOfChunksAreFromTheFrontAndFromTheBack) {
  for (uint64_t seed = first_seed(), end = seed + uint64_t(cases(300)); seed < end; ++seed) {
    SCOPED_TRACE("STRATA_SEED=" + std::to_string(seed));
    Random random(seed);
    const int ranks = int(draw(random, 1, 4)), others = int(draw(random, 1, 3));
    const Mesh::Sizes sizes = {{"sequence", ranks}, {"tensor", others}};
    Shape shape = random_shape(random);
    const int d = int(draw(random, 0, int64_t(shape.size()) - 1)),
              other = int(draw(random, 0, int64_t(shape.size()) - 1));
    const int64_t chunk = draw(random, 1, 4);
    shape[size_t(d)] = 2 * ranks * chunk;
    Tensor planned{.name = "t", .shape = shape};
    Shape own = shape;
    own[size_t(d)] = 2 * chunk;
    planned.layout = {{.dimension = d, .axis = "sequence", .full = shape[size_t(d)], .pair = chunk}};
    planned.layout.push_back({.dimension = other, .axis = "tensor", .full = own[size_t(other)]});
    own[size_t(other)] = share_of(own[size_t(other)], 0, others).count();
    planned.shape = own;
    int64_t inner = 1;
    for (size_t i = size_t(d) + 1; i < shape.size(); ++i) inner *= shape[i];
    std::vector<int> holders(size_t(elements(shape)), 0);
    for (int rank = 0; rank < ranks * others; ++rank) {
      const Mesh mesh(rank, sizes);
      const Tensor tensor = of_rank(planned, mesh);
      const GlobalIndex global(tensor);
      const Indices indices(tensor, d);
      const int64_t count = elements(tensor.shape), c = mesh["sequence"].coordinate;
      int64_t inside = 1;
      for (size_t i = size_t(d) + 1; i < shape.size(); ++i) inside *= tensor.shape[i];
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = global(i) / inner % shape[size_t(d)];
        ASSERT_TRUE(at / chunk == c || at / chunk == 2 * ranks - 1 - c) << at;
        ASSERT_EQ(at, indices(i / inside % tensor.shape[size_t(d)]));
        if (i > 0) {
          ASSERT_GT(global(i), global(i - 1)) << "in the order of the whole tensor";
        }
        ++holders[size_t(global(i))];
      }
      int64_t next = draw(random, 0, count);
      global.runs(next, count, [&](int64_t local, int64_t index, int64_t run) {
        ASSERT_EQ(local, next);
        ASSERT_GT(run, 0);
        for (int64_t i = 0; i < run; ++i) ASSERT_EQ(global(local + i), index + i);
        next += run;
      });
      ASSERT_EQ(next, count);
      int64_t along = 0;
      indices.runs(tensor.shape[size_t(d)], [&](int64_t local, int64_t first, int64_t run) {
        ASSERT_EQ(local, along);
        for (int64_t i = 0; i < run; ++i) ASSERT_EQ(indices(local + i), first + i);
        along += run;
      });
      ASSERT_EQ(along, tensor.shape[size_t(d)]);
    }
    for (int held : holders) ASSERT_EQ(held, 1);
  }
}

TEST(Layouts, CommonElementsAreCopied) {
  for (uint64_t seed = first_seed(), end = seed + uint64_t(cases(300)); seed < end; ++seed) {
    SCOPED_TRACE("STRATA_SEED=" + std::to_string(seed));
    Random random(seed);
    const Shape shape = random_shape(random);
    const auto box = [&] {
      Box b = whole_box(shape);
      for (size_t d = 0; d < shape.size(); ++d) {
        b.offset[d] = draw(random, 0, shape[d]);
        b.extent[d] = draw(random, 0, shape[d] - b.offset[d]);
      }
      return b;
    };
    const Box source = box(), target = box();
    std::vector<int64_t> got(size_t(elements(target.extent)), -1), expected = got;
    std::map<int64_t, int64_t> held;
    for (int64_t i = 0; i < elements(source.extent); ++i) held[by_definition(source, shape, i)] = i;
    for (int64_t i = 0; i < elements(target.extent); ++i)
      if (const auto found = held.find(by_definition(target, shape, i)); found != held.end())
        expected[size_t(i)] = found->second;
    for_common(source, target, [&](int64_t from, int64_t to, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(got[size_t(to + i)], -1);
        got[size_t(to + i)] = from + i;
      }
    });
    ASSERT_EQ(got, expected);
  }
}

// Every rank of one mesh saves its part; every rank of another loads its own.
TEST(Layouts, CheckpointsGiveBackEveryElement) {
  for (uint64_t seed = first_seed(), end = seed + uint64_t(cases(40)); seed < end; ++seed) {
    SCOPED_TRACE("STRATA_SEED=" + std::to_string(seed));
    Random random(seed);
    const test::TemporaryFolder folder;
    const Shape shape = random_shape(random);
    std::vector<float> values(size_t(elements(shape)));
    std::iota(values.begin(), values.end(), 1.0f);
    const auto cut = [&](const Tensor& tensor) {
      const GlobalIndex global(tensor);
      std::vector<float> mine(size_t(elements(tensor.shape)));
      for (size_t i = 0; i < mine.size(); ++i) mine[i] = values[size_t(global(int64_t(i)))];
      return mine;
    };
    const Mesh::Sizes from = random_mesh(random), to = random_mesh(random);
    const Tensor saved = random_tensor(random, Mesh(0, from), shape),
                 loaded = random_tensor(random, Mesh(0, to), shape);
    CheckpointStore store(folder.path(), 1);
    run_local(ranks_of(from), [&](World& world) {
      const Mesh mesh(world.rank(), from);
      const Tensor tensor = of_rank(saved, mesh);
      const std::vector<float> mine = cut(tensor);
      std::vector<TensorRecord> records;
      if (writes(tensor, mesh))
        records.push_back(
            {"t", Role::parameter, DType::f32, tensor.shape, TensorBytes(mine.data()), box_of(tensor).offset, shape});
      CheckpointStore mine_too(folder.path(), 1);
      mine_too.save({.step = 1}, records, &world);
    });
    const Checkpoint checkpoint(*store.latest());
    for (int rank = 0; rank < ranks_of(to); ++rank) {
      const Tensor tensor = of_rank(loaded, Mesh(rank, to));
      std::vector<float> mine(size_t(elements(tensor.shape)), -1);
      read_into(checkpoint, tensor, mine.data(), 0, elements(tensor.shape));
      ASSERT_EQ(mine, cut(tensor));
      // The same a few elements at a time, and any run of them by itself.
      std::fill(mine.begin(), mine.end(), -1.0f);
      for (int64_t at = 0, count = 0; at < elements(tensor.shape); at += count) {
        count = draw(random, 1, elements(tensor.shape) - at);
        read_into(checkpoint, tensor, mine.data() + at, at, count);
      }
      ASSERT_EQ(mine, cut(tensor));
      const int64_t first = draw(random, 0, elements(tensor.shape)),
                    count = draw(random, 0, elements(tensor.shape) - first);
      std::vector<float> some(size_t(count) + 1, -1);
      read_into(checkpoint, tensor, some.data(), first, count);
      std::vector<float> expected(mine.begin() + first, mine.begin() + first + count);
      expected.push_back(-1);
      ASSERT_EQ(some, expected);
    }
  }
}

TEST(Mesh, AxesAndTheirRanks) {
  const Mesh mesh(11, {{"pipeline", 2}, {"replicate", 2}, {"shard", 2}, {"tensor", 2}});
  EXPECT_EQ(mesh.size(), 16);
  EXPECT_EQ(mesh["pipeline"].members, (std::vector<int>{3, 11}));
  EXPECT_EQ(mesh["replicate"].members, (std::vector<int>{11, 15})) << "11 = 1·8 + 0·4 + 1·2 + 1";
  EXPECT_EQ(mesh["shard"].members, (std::vector<int>{9, 11}));
  EXPECT_EQ(mesh["tensor"].members, (std::vector<int>{10, 11}));
  EXPECT_EQ(mesh["data"].members, (std::vector<int>{9, 11, 13, 15}));
  EXPECT_EQ(mesh["data"].coordinate, 1);
  EXPECT_EQ(mesh["nobody"].size, 1);
  EXPECT_EQ(mesh.planner().rank(), 0) << "all have one program";
  EXPECT_EQ(mesh.planner()["data"].members, (std::vector<int>{0, 2, 4, 6}));
  EXPECT_EQ(mesh.programs().size, 1);
}

// What is no expert's is shared among the ranks of two axes as if they were one, in the order of all data ranks: so a
// sum over them is a branch of the tree of one rank.
TEST(Mesh, ShardAndExpertAreOneAxisToo) {
  const Mesh mesh(13, {{"replicate", 2}, {"shard", 2}, {"expert", 2}, {"tensor", 2}});
  EXPECT_EQ(mesh["shard_expert"].members, (std::vector<int>{9, 11, 13, 15})) << "13 = 1·8 + 1·4 + 0·2 + 1";
  EXPECT_EQ(mesh["shard_expert"].coordinate, 2);
  EXPECT_EQ(mesh.parts_of("shard_expert"), (std::vector<std::string_view>{"shard", "expert"}));
  for (const char* axis : {"shard", "expert", "data", "shard_expert"}) {
    EXPECT_TRUE(mesh.meet("shard_expert", axis)) << axis;
    EXPECT_TRUE(mesh.meet(axis, "shard_expert")) << axis;
  }
  EXPECT_FALSE(mesh.meet("shard_expert", "replicate"));
  EXPECT_FALSE(mesh.meet("tensor", "shard_expert"));
  const auto has_group = [](const Mesh& of) {
    const std::vector<Axis> groups = of.groups();
    return std::any_of(groups.begin(), groups.end(), [](const Axis& axis) { return axis.name == kShardExpertAxis; });
  };
  EXPECT_TRUE(has_group(mesh));
  EXPECT_FALSE(has_group(Mesh(0, {{"replicate", 2}, {"shard", 2}, {"expert", 1}}))) << "it is shard";
  EXPECT_EQ(Mesh(1, {{"shard", 1}, {"expert", 2}})["shard_expert"].members, (std::vector<int>{0, 1}));
}

TEST(Mesh, RanksPlanAsTheFirstThatHasTheirProgram) {
  const Mesh::Sizes sizes{{"pipeline", 2, true}, {"shard", 2}, {"odd", 3, true}, {"tensor", 2}};
  for (int rank = 0; rank < 24; ++rank) {
    const Mesh mesh(rank, sizes);
    EXPECT_EQ(mesh.programs().size, 6);
    EXPECT_EQ(mesh.programs().coordinate, mesh["pipeline"].coordinate * 3 + mesh["odd"].coordinate);
    EXPECT_EQ(mesh.programs().members[size_t(mesh.programs().coordinate)], rank);
    EXPECT_EQ(mesh.planner().rank(), mesh["pipeline"].coordinate * 12 + mesh["odd"].coordinate * 2);
    EXPECT_EQ(mesh.planner().programs().coordinate, mesh.programs().coordinate);
    EXPECT_EQ(mesh.planner(4).rank(), 14) << "pipeline 1, odd 1";
    EXPECT_EQ(mesh.counts(), mesh["tensor"].coordinate == 0) << "others have losses of their own, or none";
  }
}

TEST(Mesh, WhoSumsTakesItsOwnAxes) {
  const Mesh mesh(0, {{"replicate", 2}, {"shard", 2}, {"tensor", 2}}), flat(0, {{"replicate", 1}, {"shard", 4}});
  std::vector<std::string> partial = {"tensor", "replicate", "shard"};
  EXPECT_EQ(take_data_axes(mesh, partial), "data");
  EXPECT_EQ(partial, std::vector<std::string>{"tensor"});
  partial = {"replicate", "tensor"};
  EXPECT_EQ(take_data_axes(mesh, partial), "replicate");
  EXPECT_EQ(partial, std::vector<std::string>{"tensor"});
  EXPECT_EQ(take_data_axes(mesh, partial), "");
  partial = {"shard"};
  EXPECT_EQ(take_data_axes(flat, partial), "data");
}

}  // namespace
}  // namespace strata::layout_test
