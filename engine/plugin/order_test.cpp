// Order of plugins from their capabilities, and what is refused; messages are compared whole.
#include "engine/plugin/order.h"

#include <gtest/gtest.h>

#include <memory>

#include "engine/plugin/testing.h"

namespace strata::order_test {
namespace {

using test::message_of;

class Fake final : public Plugin {
 public:
  explicit Fake(Capabilities capabilities) : capabilities_(std::move(capabilities)) {}
  Capabilities capabilities() const override { return capabilities_; }

 private:
  Capabilities capabilities_;
};

class Order : public ::testing::Test {
 protected:
  void add(const std::string& name, Capabilities capabilities) {
    plugins_.push_back(std::make_unique<Fake>(std::move(capabilities)));
    named_.push_back({name, plugins_.back().get()});
  }
  std::string order() {
    std::string names;
    for (const NamedPlugin& named : in_order(named_)) names += (names.empty() ? "" : " ") + named.name;
    return names;
  }
  std::string message() {
    return message_of([&] { order(); });
  }
  std::vector<std::unique_ptr<Fake>> plugins_;
  std::vector<NamedPlugin> named_;
};

TEST_F(Order, WithoutRequirementsAsInTheFile) {
  add("c", {});
  add("a", {});
  add("b", {});
  EXPECT_EQ(order(), "c a b");
}

TEST_F(Order, ProvidersRunFirstTheRestStays) {
  add("late", {{}, {"x", "y"}, {}});
  add("free", {});
  add("y1", {{"y"}, {"x"}, {}});
  add("x1", {{"x"}, {}, {}});
  add("x2", {{"x"}, {}, {}});
  EXPECT_EQ(order(), "free x1 x2 y1 late");
}

TEST_F(Order, OnesOwnCapabilityIsNoCircle) {
  add("a", {{"x"}, {"x"}, {}});
  EXPECT_EQ(order(), "a");
}

TEST_F(Order, Missing) {
  add("a", {{}, {"shards"}, {}});
  EXPECT_EQ(message(), "plugin \"a\" requires \"shards\", which no enabled plugin provides.");
}

TEST_F(Order, Conflict) {
  add("a", {{}, {}, {{"shards", "both would cut it; leave one out"}}});
  add("b", {{"shards"}, {}, {}});
  EXPECT_EQ(
      message(),
      "plugins \"a\" and \"b\" cannot work together: the first conflicts with \"shards\", which the second provides, "
      "because both would cut it; leave one out.");
}

std::vector<std::string> lines(const std::vector<Refusal>& refusals) {
  std::vector<std::string> all;
  for (const Refusal& refusal : refusals) {
    all.push_back(refusal.reason.substr(0, refusal.reason.find_first_of(":,")));
    for (const std::string& one : refusal.cases) all.push_back("- " + one);
  }
  return all;
}

TEST_F(Order, RefusalsAreAListOfWhatWouldBeRefused) {
  add("a", {{"optimizer"}, {}, {{"shards", "both would cut it"}, {"splits over x", "it is whole"}}});
  add("b", {{"shards", "model"}, {}, {}});
  add("c", {{"optimizer"}, {}, {{"optimizer", "of one's own says nothing"}}});
  add("d", {{"splits over x", "apart"}, {}, {{"apart", "each in its own way"}}});
  add("e", {{"apart"}, {}, {{"apart", "each in its own way"}, {"splits over x", "it is whole"}}});
  EXPECT_EQ(lines(refusals(named_)),
            (std::vector<std::string>{
                "two plugins for one thing", "- a or c: a run has one optimizer", "- a with b: both would cut it",
                "- c with a: of one's own says nothing", "- d with e: each in its own way",
                "one plugin needs whole what another divides among ranks", "- a, e with d: it is whole"}));
}

TEST_F(Order, WhatTheRunProvidesIsInConflict) {
  add("a", {{}, {}, {{"reproducible sums over tensor", "products are divided"}}});
  EXPECT_EQ(order(), "a");
  const auto with = [&](bool reproducible, const std::vector<std::string>& axes) {
    return message_of([&] { in_order(named_, provided_by_run(reproducible, axes)); });
  };
  EXPECT_EQ(with(false, {"tensor"}), "(no error)");
  EXPECT_EQ(with(true, {"data"}), "(no error)");
  EXPECT_EQ(with(true, {"data", "tensor"}),
            "plugin \"a\" cannot work with run.reproducible and mesh.tensor above 1, because products are divided.");
}

TEST_F(Order, RefusalsNameWhatTheRunProvidesFormsAndModes) {
  add("a", {{"form of gradients"}, {}, {{"reproducible sums", "it rounds"}}});
  add("b", {{"form of gradients"}, {}, {}});
  add("c", {{}, {}, {{"reproducible sums over tensor", "it divides"}}});
  add("b (late = true)", {{}, {}, {{"reproducible sums", "it is late"}}});
  const std::vector<NamedPlugin> modes{named_.back()};
  named_.pop_back();
  EXPECT_EQ(lines(refusals(named_, modes)),
            (std::vector<std::string>{
                "two plugins for one thing", "- a or b: a gradient crosses between ranks in one form",
                "run.reproducible promises the bits of one rank", "- a: it rounds", "- b (late = true): it is late",
                "run.reproducible promises the bits of one rank", "- c with mesh.tensor above 1: it divides"}));
}

TEST_F(Order, OnesOwnConflictMeansTheOthers) {
  add("a", {{"x"}, {}, {{"x", "it is so"}}});
  EXPECT_EQ(order(), "a");
}

TEST_F(Order, CircleNamesItsMembersOnly) {
  add("start", {{"s"}, {}, {}});
  add("a", {{"x"}, {"y", "s"}, {}});
  add("b", {{"y"}, {"x"}, {}});
  add("waits", {{"w"}, {"x"}, {}});
  add("waits_too", {{}, {"w"}, {}});
  EXPECT_EQ(message(), "the requirements of the plugins \"a\", \"b\" go in a circle, so none of them can run first.");
}

TEST_F(Order, ExactlyOne) {
  const auto check = [&] { return message_of([&] { require_exactly_one(named_, "optimizer", "enable one"); }); };
  EXPECT_EQ(check(), "no enabled plugin provides the optimizer; enable one.");
  add("a", {{"optimizer"}, {}, {}});
  EXPECT_EQ(check(), "(no error)");
  add("b", {{"optimizer"}, {}, {}});
  EXPECT_EQ(check(), "the plugins \"a\", \"b\" each provide the optimizer; enable only one of them.");
}

}  // namespace
}  // namespace strata::order_test
