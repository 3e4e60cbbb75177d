// Shared values and names: copies are one until one of them changes, and names read as if they had been written out.
#include "strata/shared.h"

#include <gtest/gtest.h>

#include <sstream>

#include "strata/program.h"

namespace strata::shared_test {
namespace {

TEST(Shared, CopiesAreOneUntilOneChanges) {
  SharedVector<int64_t> first{4, 8}, second = first;
  EXPECT_TRUE(first.is_same(second));
  second.push_back(2);
  EXPECT_EQ(first, (Shape{4, 8}));
  EXPECT_EQ(second, (Shape{4, 8, 2}));
  EXPECT_FALSE(first.is_same(second));
  second = Shape{4, 8};
  EXPECT_FALSE(first.is_same(second));
  EXPECT_EQ(first, second);
  SharedVector<int64_t> moved = std::move(first);
  EXPECT_EQ(moved.at(1), 8);
  EXPECT_EQ(first.size(), 0u);  // as if never given a value
  moved = moved;
  EXPECT_EQ(moved.back(), 8);
  first = moved;
  moved = {};
  EXPECT_EQ(first.front(), 4);
  EXPECT_TRUE(moved.empty());
  EXPECT_TRUE(SharedVector<int64_t>(Shape{}).is_same({}));
}

TEST(Shared, LivesAsLongAsACopy) {
  auto watched = std::make_shared<int>(3);
  const std::weak_ptr<int> alive = watched;
  Shared<std::shared_ptr<int>> first(std::move(watched));
  {
    const Shared<std::shared_ptr<int>> second = first;
    first = {};
    EXPECT_EQ(**second, 3);
  }
  EXPECT_TRUE(alive.expired());
}

TEST(Shared, AttributesOfACopyAreItsOwn) {
  const Op op{.attributes = {{"axis", "data"}, {"rows", int64_t{4}}}};
  Op copy = op;
  EXPECT_TRUE(copy.attributes.is_same(op.attributes));
  copy.attributes.set("rows", int64_t{5});
  EXPECT_EQ(op.attributes.integer("rows"), 4);
  EXPECT_EQ(copy.attributes.integer("rows"), 5);
  EXPECT_EQ(copy.attributes.string("axis"), "data");
}

TEST(Name, ReadsAsIfWrittenOut) {
  const Name plain = "block.3.weight", third = plain.of_microbatch(3), copy = third.of_copy(17);
  EXPECT_EQ(third, "block.3.weight@3");
  EXPECT_EQ(copy, "block.3.weight@3#17");
  EXPECT_EQ(copy.of_copy(18), "block.3.weight@3#17#18");
  EXPECT_EQ(copy.of_microbatch(0), "block.3.weight@3#17@0");
  EXPECT_EQ(plain.of_copy(5).of_microbatch(1), "block.3.weight#5@1");
  EXPECT_EQ(Name("block.3.weight@3"), third);
  EXPECT_EQ(third, std::string("block.3.weight@3"));
  EXPECT_FALSE(third == "block.3.weight");
  EXPECT_FALSE(third == "block.3.weight@33");
  EXPECT_FALSE(third == plain);
  EXPECT_EQ("<" + third + ">", "<block.3.weight@3>");
  EXPECT_EQ((std::ostringstream() << copy).str(), copy.text());
  EXPECT_TRUE(Name().empty());
  EXPECT_FALSE(third.empty());
}

TEST(Name, SaysWhetherItIsOfAMicrobatch) {
  const Name plain = "weight";
  for (const Name& name : {plain.of_microbatch(0), Name("weight@12"), plain.of_copy(3).of_microbatch(2)})
    EXPECT_TRUE(name.is_of_microbatch()) << name;
  for (const Name& name : {Name(), plain, Name("weight@"), Name("a@b"), Name("12"), Name("weight@3.part"),
                           plain.of_microbatch(3).of_copy(4)})
    EXPECT_FALSE(name.is_of_microbatch()) << name;
}

TEST(Name, OfEveryTensorIsItsOwnAndFindsIt) {
  Program program;
  const Name weight = "weight";
  const auto add = [&](Name name, TensorId copy_of = {}) {
    return program.add({.name = std::move(name), .shape = {2}, .copy_of = copy_of});
  };
  const std::vector<TensorId> ids{add(weight),     add(weight),      add(weight.of_microbatch(1)),
                                  add("weight@1"), add(weight, {0}), add({})};
  const std::vector<std::string> names{"weight", "weight#1", "weight@1#2", "weight@1#3", "weight#4", "t5"};
  for (size_t i = 0; i < ids.size(); ++i) {
    EXPECT_EQ(program[ids[i]].name, names[i]);
    EXPECT_EQ(program.find(names[i]), ids[i]) << names[i];
  }
  EXPECT_FALSE(program.find("weight@1"));
  EXPECT_FALSE(program.find("other"));
}

}  // namespace
}  // namespace strata::shared_test
