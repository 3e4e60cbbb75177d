// Each promise that the verifier checks (program.h) against a program that breaks it, and the message.
#include <gtest/gtest.h>

#include <functional>

#include "strata/builder.h"
#include "strata/mesh.h"

namespace strata::verifier_test {
namespace {

// A small program that is right: y = gelu(x), z = y + w, then w is updated in place.
struct Example {
  Example() {
    x = build.data("x", {4, 8}, DType::f32);
    w = build.parameter("w", {4, 8}, {});
    y = build.emit("gelu", {x}, {}, "y");
    z = build.emit("add", {y, w}, {}, "z");
    build.emit_all("add", {w, z}, {}, {w});
  }
  Program program;
  Builder build{program};
  TensorId x, w, y, z;
};

// What the verifier says when `break_it` has been at the example; empty: nothing.
std::string verdict(const std::function<void(Example&)>& break_it, const Mesh* mesh = nullptr) {
  Example example;
  break_it(example);
  try {
    verify(example.program, "the test", mesh);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

#define EXPECT_VERDICT(text, ...)                                                                           \
  do {                                                                                                      \
    const std::string said = verdict(__VA_ARGS__);                                                          \
    EXPECT_NE(said.find(text), std::string::npos) << said;                                                  \
    EXPECT_NE(said.find("the program is not well formed after \"the test\": "), std::string::npos) << said; \
  } while (false)

TEST(Verifier, AWellFormedProgramPasses) {
  EXPECT_EQ(verdict([](Example&) {}), "");
}

TEST(Verifier, Tensors) {
  EXPECT_VERDICT("tensor y has shape (4, 0).", [](Example& e) { e.program[e.y].shape = {4, 0}; });
  EXPECT_VERDICT("tensor y has no dimension", [](Example& e) { e.program[e.y].shape = {}; });
  EXPECT_VERDICT("tensor y is a copy of a tensor that does not exist.",
                 [](Example& e) { e.program[e.y].copy_of = {99}; });
}

TEST(Verifier, IdsArityAndAddends) {
  EXPECT_VERDICT("op 0 has no kind.", [](Example& e) { e.program.ops[0].kind = nullptr; });
  EXPECT_VERDICT("op 0 (gelu) writes a tensor that does not exist.",
                 [](Example& e) { e.program.ops[0].outputs[0] = {99}; });
  EXPECT_VERDICT("op 1 (add) reads a tensor that does not exist.",
                 [](Example& e) { e.program.ops[1].inputs[0] = {99}; });
  EXPECT_VERDICT("op 0 (gelu) is told to accumulate an output that its kind cannot.",
                 [](Example& e) { e.program.ops[0].accumulate = 4; });
  const auto product = [](Example& e) -> Op& {
    e.build.emit("linear", {e.y, e.w, {}}, {}, "product");
    e.program.ops.back().accumulate = 1;
    return e.program.ops.back();
  };
  EXPECT_VERDICT("op 3 (linear) lacks an addend.", [&](Example& e) { product(e).inputs.clear(); });
  EXPECT_VERDICT("op 3 (linear) lacks an addend.", [&](Example& e) { product(e).inputs.push_back({}); });
  EXPECT_VERDICT("op 3 (linear) adds y (4, 8) to an output of another shape or type.",
                 [&](Example& e) { product(e).inputs.push_back(e.y); });
}

TEST(Verifier, ShapesAndWhatRulesThrow) {
  EXPECT_VERDICT("op 0 (gelu) writes y, which is f32(4, 4), but its kind gives f32(4, 8).", [](Example& e) {
    e.program[e.y].shape = {4, 4};
  });
  EXPECT_VERDICT("op 0 (gelu) has 2 outputs, its kind gives 1.",
                 [](Example& e) { e.program.ops[0].outputs.push_back(e.z); });
  EXPECT_VERDICT("op 1 (add) breaks its shape rule: op \"add\" expects",
                 [](Example& e) { e.program.ops[1].inputs.pop_back(); });
  // An input left out where the rule does not expect it: no Error, but an exception of the library.
  static const OpKind& careless = register_kind({.name = "test_careless", .summary = "", .shape = [](const OpView& v) {
                                                   return std::vector<TensorSpec>{{v.input(0).shape, DType::f32}};
                                                 }});
  EXPECT_VERDICT("op 0 (test_careless) breaks its shape rule: ", [](Example& e) {
    e.program.ops[0].kind = &careless;
    e.program.ops[0].inputs = {TensorId{}};
  });
  static const OpKind& odd = register_kind(
      {.name = "test_odd", .summary = "", .shape = [](const OpView&) -> std::vector<TensorSpec> { throw 7; }});
  EXPECT_VERDICT("op 0 (test_odd) breaks its shape rule: something that is no exception.",
                 [](Example& e) { e.program.ops[0].kind = &odd; });
}

TEST(Verifier, WrittenOnceAndBeforeItIsRead) {
  EXPECT_VERDICT("op 0 (add) reads y before anything has written it.",
                 [](Example& e) { std::swap(e.program.ops[0], e.program.ops[1]); });
  EXPECT_VERDICT("op 3 (gelu) writes y a second time.", [](Example& e) { e.build.emit_all("gelu", {e.z}, {}, {e.y}); });
  EXPECT_VERDICT("op 3 (add) updates y in place, which lives within the step.", [](Example& e) {
    e.build.emit_all("add", {e.y, e.z}, {}, {e.y});
  });
  EXPECT_VERDICT("op 3 (gelu) writes x, which only the data loader may.",
                 [](Example& e) { e.build.emit_all("gelu", {e.z}, {}, {e.x}); });
  EXPECT_VERDICT("op 3 (gelu) writes part a second time.", [](Example& e) {
    e.build.emit_all("gelu", {e.z}, {}, {e.program.add_part(e.y, "part", {4, 8}, 0)});
  });
  // In pieces: each once, or one in place of another, and all of them before the whole is read.
  const auto pieces = [](Example& e, int64_t second, bool in_place) {
    const TensorId whole = e.program.add({.name = "whole", .shape = {4, 8}});
    const TensorId read = e.program.add_part(e.z, "read", {2, 8}, 0), a = e.program.add_part(whole, "a", {2, 8}, 0),
                   b = e.program.add_part(whole, "b", {2, 8}, second);
    e.build.emit_all("gelu", {read}, {}, {a});
    e.build.emit_all("gelu", {in_place ? a : read}, {}, {b});
    if (!in_place) e.build.emit("gelu", {whole});
  };
  EXPECT_EQ(verdict([&](Example& e) { pieces(e, 64, false); }), "");
  EXPECT_EQ(verdict([&](Example& e) { pieces(e, 0, true); }), "");
  EXPECT_VERDICT("op 4 (gelu) writes b, of which something is there already.",
                 [&](Example& e) { pieces(e, 32, false); });
  EXPECT_VERDICT("op 4 (gelu) reads whole before anything has written it.", [&](Example& e) {
    pieces(e, 64, false);
    e.program.ops.erase(e.program.ops.begin() + 4);  // what writes the second half
  });
  static const OpKind& two = register_kind({.name = "test_two", .summary = "", .shape = [](const OpView& v) {
                                              return std::vector<TensorSpec>(2, {v.input(0).shape, v.input(0).dtype});
                                            }});
  EXPECT_VERDICT("op 0 (test_two) writes y twice.", [](Example& e) {
    e.program.ops[0].kind = &two;
    e.program.ops[0].outputs = {e.y, e.y};
  });
  EXPECT_VERDICT("nothing writes the loss.", [](Example& e) { e.program.losses = {{99}}; });
  // A copy of a persistent tensor on another tier is updated in place as that is.
  EXPECT_EQ(verdict([](Example& e) {
              const TensorId copy = e.build.emit("gelu", {e.w}, {}, "copy");
              e.program[copy].copy_of = e.w;
              e.build.emit_all("add", {copy, e.z}, {}, {copy});
            }),
            "");
}

TEST(Verifier, PartsLieWithinTheirWhole) {
  const auto part = [](Example& e, const Shape& shape, int64_t offset) -> Tensor& {
    return e.program[e.program.add_part(e.w, "part", shape, offset)];
  };
  EXPECT_EQ(verdict([&](Example& e) { part(e, {2, 8}, 64); }), "");
  EXPECT_VERDICT("tensor part is a part of w of 128 bytes, from byte 96 to 160, which is not within it.",
                 [&](Example& e) {
                   part(e, {2, 8}, 96);
                 });
  EXPECT_VERDICT("from byte -32 to 32", [&](Example& e) { part(e, {2, 8}, -32); });
  EXPECT_VERDICT("tensor part is a part of w, but of another type.", [&](Example& e) {
    part(e, {2, 8}, 0).dtype = DType::bf16;
  });
  EXPECT_VERDICT("tensor part is a part of w, but does not live where and as long as that does.", [&](Example& e) {
    part(e, {2, 8}, 0).persistent = false;
  });
  EXPECT_VERDICT("does not live where", [&](Example& e) { part(e, {2, 8}, 0).home = Tier::host; });
  EXPECT_VERDICT("tensor part is a part of a tensor that does not exist.", [&](Example& e) {
    part(e, {2, 8}, 0).part_of = {99};
  });
  EXPECT_VERDICT("tensor inner is a part of part, which is a part itself.", [&](Example& e) {
    part(e, {2, 8}, 0);
    e.program.add_part(e.program.find("part"), "inner", {1, 8}, 0);
  });
}

TEST(Verifier, LayoutsAreSharesOfTheMesh) {
  const Mesh mesh(1, {{"replicate", 1}, {"shard", 3}});  // rank 1 of three: of 10 rows 4, 3 and 3
  const auto split = [](Split split) {
    return [split](Example& e) { e.program[e.program.add({.name = "s", .shape = {3, 2}})].layout = {split}; };
  };
  EXPECT_EQ(verdict(split({0, "data", 10, 4}), &mesh), "");
  EXPECT_VERDICT("tensor s is split along dimension 2 over axis \"data\", but has shape (3, 2).",
                 split({2, "data", 10, 4}));
  EXPECT_VERDICT("over axis \"\", which is no axis of its own.", split({0, "", 10, 4}));
  EXPECT_VERDICT("of 10, and holds 3 from 8 on, which is not within it.", split({0, "data", 10, 8}));
  EXPECT_VERDICT("of 10, and holds 3 from 0 on, but rank 1 of 3 has 3 from 4 on.", split({0, "data", 10, 0}), &mesh);
  EXPECT_VERDICT("of 12, and holds 3 from 4 on, but rank 1 of 3 has 4 from 4 on.", split({0, "data", 12, 4}), &mesh);
  // Splits of splits: 10 rows over three ranks, then this one's three over two.
  const auto nested = [](int64_t full, int64_t first) {
    return [=](Example& e) {
      e.program[e.program.add({.name = "s", .shape = {1, 2}})].layout = {{0, "data", 10, 4}, {0, "inner", full, first}};
    };
  };
  const Mesh grid(3, {{"replicate", 1}, {"shard", 3}, {"inner", 2}});
  EXPECT_EQ(verdict(nested(3, 2), &grid), "");
  EXPECT_VERDICT("dimension 0 over axis \"inner\" of 4, but what was split before left 3.", nested(4, 2), &grid);
  EXPECT_VERDICT("over axis \"inner\" of 9, but what was split before left at most 6.", nested(9, 2));
  EXPECT_VERDICT("which is no axis of its own.", [](Example& e) {
    e.program[e.program.add({.name = "s", .shape = {3, 2}})].layout = {{0, "data", 10, 4}, {1, "data", 6, 0}};
  });
}

TEST(Verifier, Streams) {
  const Mesh two(0, {{"replicate", 1}, {"shard", 2}});
  const auto reduce = [](Example& e) -> Op& {
    e.build.emit("all_reduce", {e.z}, {{"axis", "data"}, {"reduction", "sum"}});
    return e.program.ops.back();
  };
  EXPECT_EQ(verdict([&](Example& e) { reduce(e); }, &two), "");
  EXPECT_VERDICT("op 3 (all_reduce) is an exchange, but on the stream host; exchanges never leave theirs.",
                 [&](Example& e) { reduce(e).stream = Stream::host; });
  EXPECT_VERDICT("op 3 (all_reduce) is an exchange, but on the stream compute",
                 [&](Example& e) { reduce(e).stream = Stream::compute; });
  EXPECT_VERDICT("op 0 (gelu) is on a stream of exchanges, but is none.",
                 [](Example& e) { e.program.ops[0].stream = Stream::exchange; });
  EXPECT_VERDICT("is an exchange of tensors on the tier host; they are on the device.",
                 [&](Example& e) { reduce(e).tier = Tier::host; });
  EXPECT_VERDICT("is an exchange, but no attribute \"axis\" names the ranks.", [&](Example& e) {
    reduce(e).attributes = {{"reduction", "sum"}};
  });
  const Mesh one;
  EXPECT_VERDICT(
      "is an exchange over axis \"data\", which has one rank here.", [&](Example& e) { reduce(e); }, &one);
  EXPECT_VERDICT("op 0 (gelu) is on the stream to_host, which is for moves alone.",
                 [](Example& e) { e.program.ops[0].stream = Stream::to_host; });
  EXPECT_VERDICT("op 0 (gelu) is on the host's stream, but its operands are on the tier device.",
                 [](Example& e) { e.program.ops[0].stream = Stream::host; });
  EXPECT_EQ(verdict([](Example& e) {
              e.program.one_memory = true;
              e.program.ops[0].stream = Stream::host;
            }),
            "");
  EXPECT_VERDICT("op 1 (add) uses w, which is on the NVMe tier, where only moves reach.",
                 [](Example& e) { e.program[e.w].home = Tier::nvme; });
  const auto move = [](Stream stream, Tier from, Tier to) {
    return [=](Example& e) {
      e.build.stream = stream;
      const TensorId source = e.program.add({.name = "source", .shape = {4}, .home = from, .persistent = true});
      e.program[e.build.emit("move", {source})].home = to;
    };
  };
  EXPECT_EQ(verdict(move(Stream::read, Tier::nvme, Tier::device)), "");
  EXPECT_EQ(verdict(move(Stream::write, Tier::host, Tier::nvme)), "");
  EXPECT_EQ(verdict(move(Stream::to_device, Tier::host, Tier::device)), "");
  EXPECT_EQ(verdict(move(Stream::to_host, Tier::device, Tier::host)), "");
  EXPECT_VERDICT("moves from the tier device to host on the stream to_device.",
                 move(Stream::to_device, Tier::device, Tier::host));
  EXPECT_VERDICT("on the stream read.", move(Stream::read, Tier::host, Tier::device));
}

TEST(Verifier, RestingForms) {
  const auto with_form = [](const std::function<void(Example&, RestingForm&)>& change, bool of_parameter = false) {
    return [=](Example& e) {
      RestingForm form{.name = "again", .rest = {}, .restore = {e.program.ops[0]}};
      change(e, form);
      e.program.forms[(of_parameter ? e.w : e.y).value].push_back(form);
    };
  };
  EXPECT_EQ(verdict(with_form([](Example&, RestingForm&) {})), "");
  EXPECT_VERDICT("resting form \"again\" of y: restore op 0 has no kind.",
                 with_form([](Example&, RestingForm& form) { form.restore[0].kind = nullptr; }));
  EXPECT_VERDICT("resting form \"again\" of y: restore op 0 (gelu) breaks its shape rule",
                 with_form([](Example&, RestingForm& form) { form.restore[0].inputs.clear(); }));
  EXPECT_VERDICT("resting form \"again\" of y: restore op 0 (gelu) reads never, which nothing writes.",
                 with_form([](Example& e, RestingForm& form) {
                   form.restore[0].inputs = {e.program.add({.name = "never", .shape = {4, 8}})};
                 }));
  EXPECT_VERDICT("resting form \"again\" of y: nothing that restores it writes it.",
                 with_form([](Example& e, RestingForm& form) { form.restore[0].outputs = {e.z}; }));
  EXPECT_VERDICT("tensor w has a resting form \"again\", but only whole tensors that live within the step do.",
                 with_form([](Example&, RestingForm&) {}, true));
  EXPECT_VERDICT("a resting form \"again\" is of a tensor that does not exist.",
                 [](Example& e) { e.program.forms[99].push_back({.name = "again", .restore = {e.program.ops[0]}}); });
}

}  // namespace
}  // namespace strata::verifier_test
