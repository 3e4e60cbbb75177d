// send, receive: a tensor from one rank of a mesh axis to another, `offset` coordinates on (around the end of the
// axis). Each has a stream of its own, and each pair of ranks a group for each way, so that one cannot block the other.
// What a send returns is a token, one byte that says nothing: ops that read it come after. Through tokens the two are
// differentiable: with a gradient for a send's token (any token will do), the gradient of what was sent is received
// from there; and a receive that is given a token sends the gradient of what it received back.
// `crossing`, a number that both may have, tells what is sent from what else goes the same way (agreement.h).
#include "engine/ops/registration.h"
#include "strata/communicator.h"

namespace strata {
namespace {

const TensorSpec kToken{{1}, DType::u8};

std::string shape_text(const Shape& shape) {
  std::string text;
  for (int64_t size : shape) text += (text.empty() ? "" : "x") + std::to_string(size);
  return text;
}
// Sizes as the attribute gives them ("4x256"); empty where it is no shape.
Shape shape_of(const std::string& text) {
  Shape shape;
  size_t at = 0;
  while (at < text.size()) {
    size_t end = std::min(text.find('x', at), text.size());
    if (end == at || end - at > 15 || text.find_first_not_of("0123456789", at) < end) return {};
    shape.push_back(std::stoll(text.substr(at, end - at)));
    at = end + 1;
  }
  return shape;
}

DType dtype_named(const OpView& v) {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16, DType::i32, DType::u8})
    if (v.attributes().string("dtype") == name_of(dtype)) return dtype;
  throw Error("op \"receive\" has dtype \"" + v.attributes().string("dtype") + "\", which is no type.");
}

Attributes between(const OpView& v) {
  Attributes both{{"axis", v.attributes().string("axis")}, {"offset", v.attributes().integer("offset")}};
  if (v.attributes().has("crossing")) both.set("crossing", v.attributes().integer("crossing"));
  return both;
}

void require_offset(const OpView& v) {
  require(v.attributes().has("axis") && v.attributes().has("offset") && v.attributes().integer("offset") != 0, v,
          "attributes axis and offset, which is not 0");
}

void add_kind(OpKind kind, const Kernel& kernel) {
  kind.exchange = kind.half = true;
  kind.kernels = {{"cpu", kernel}, {"reference", kernel}};
  register_kind(std::move(kind));
}

void register_send() {
  OpKind kind{.name = "send", .summary = "x (…) -> a token; x is received `offset` coordinates on"};
  kind.shape = [](const OpView& v) -> std::vector<TensorSpec> {
    require_offset(v);
    require(v.inputs() == 1 && v.has_input(0), v, "one tensor");
    return {kToken};
  };
  kind.layout = [](const OpView&) { return std::vector<Layout>(1); };
  kind.gradient = [](Differentiation& d) {
    const OpView& v = d.forward();
    const Tensor sent = v.input(0);
    Attributes attributes = between(v);
    attributes.set("shape", shape_text(sent.shape));
    attributes.set("dtype", std::string(name_of(sent.dtype)));
    const TensorId gradient = d.build().emit("receive", {d.output_gradient(0)}, attributes);
    d.build().program()[gradient].layout = sent.layout;
    d.set(0, gradient);
  };
  kind.cost = [](const OpView& v) {
    return Cost{.flops = 0, .bytes = double(v.input(0).bytes()), .wire = double(v.input(0).bytes())};
  };
  add_kind(std::move(kind), {[](const Binding& b) -> Launch {
             const Pieces data{{const_cast<std::byte*>(b.in<std::byte>(0)), b.input(0).bytes()}};
             return [data, &group = b.group(), token = b.out<std::byte>(0), from = b.in<std::byte>(0)] {
               group.send(data, 1 - group.rank());
               group.copy_bytes(token, from, 1);
             };
           }});
}

void register_receive() {
  OpKind kind{.name = "receive",
              .summary = "[token] -> a tensor of `shape` and `dtype` that was sent `offset` coordinates on"};
  // The shape that the attribute names is the first rank's along every axis that splits the result.
  kind.shape = [](const OpView& v) -> std::vector<TensorSpec> {
    require_offset(v);
    require(v.inputs() <= 1, v, "at most a token");
    Shape shape = shape_of(v.attributes().string("shape"));
    require(!shape.empty(), v, "a shape as sizes with an x between them");
    if (v.outputs() == 1 && v.output(0).shape.size() == shape.size())
      for (const Split& split : v.output(0).layout)
        shape[size_t(split.dimension)] = v.output(0).shape[size_t(split.dimension)];
    return {{shape, dtype_named(v)}};
  };
  kind.gradient = [](Differentiation& d) {
    d.set(0, d.build().emit("send", {d.output_gradient(0)}, between(d.forward())));
  };
  kind.cost = [](const OpView& v) {
    return Cost{.flops = 0, .bytes = double(v.output(0).bytes()), .wire = double(v.output(0).bytes())};
  };
  add_kind(std::move(kind), {[](const Binding& b) -> Launch {
             const Pieces data{{b.out<std::byte>(0), b.output(0).bytes()}};
             return [data, &group = b.group()] { group.receive(data, 1 - group.rank()); };
           }});
}

const AtLoad send_registered([] {
  register_send();
  register_receive();
});

}  // namespace
}  // namespace strata
