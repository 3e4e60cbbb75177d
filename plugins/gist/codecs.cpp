// Shape rules, costs and kernels of the encodings; see codecs.h. The loops are in codec_kernels.h.
#include "plugins/gist/codecs.h"

#include <cmath>

#include "plugins/gist/codec_kernels.h"

namespace strata::gist {
namespace {

Shape shape_from(const Attributes& attributes) {
  Shape shape;
  for (int64_t d = 0; d < attributes.integer("rank"); ++d) shape.push_back(attributes.integer("d" + std::to_string(d)));
  return shape;
}

int64_t count_of(const Tensor& tensor) { return elements(tensor.shape); }

int64_t capacity_of(const OpView& v) {
  return int64_t(std::ceil(double(count_of(v.input(0))) * v.attributes().real("capacity")));
}

Format format_of(const OpView& v) {
  const std::string name = v.attributes().string("format");
  return name == "e4m3" ? Format::e4m3 : name == "e5m2" ? Format::e5m2 : Format::int8;
}

// The encodings have no faster and slower form: one kernel serves both CPU backends.
template <class Body>
std::map<std::string, Kernel, std::less<>> kernels(Body body) {
  const Kernel kernel{[body](const Binding& b) -> Launch { return [body, b] { body(b); }; }, {}};
  return {{"cpu", kernel}, {"reference", kernel}};
}

// `kept` gives the outputs for one f32 input; `codes` is how many of them the decoder takes.
template <class Encode, class Decode>
void add_pair(const std::string& name, const std::string& summary,
              std::function<std::vector<TensorSpec>(const OpView&)> kept, Encode encode, Decode decode) {
  register_kind({.name = "gist_" + name + "_encode",
                 .summary = "x (…) f32 -> " + summary,
                 .shape = [kept](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() == 1 && v.has_input(0) && v.input(0).dtype == DType::f32, v, "one f32 tensor");
                   return kept(v);
                 },
                 .kernels = kernels(encode)});
  register_kind({.name = "gist_" + name + "_decode",
                 .summary = summary + " -> x (…) f32",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() >= 1 && v.has_input(0) && v.attributes().has("rank"), v,
                           "what the encoder made, and attributes rank, d0, d1, …");
                   return {{shape_from(v.attributes()), DType::f32}};
                 },
                 .kernels = kernels(decode)});
}

void register_all() {
  add_pair(
      "mask", "one bit an element (u8)",
      [](const OpView& v) -> std::vector<TensorSpec> {
        return {{{bitmap_bytes(count_of(v.input(0)))}, DType::u8}};
      },
      [](const Binding& b) { encode_mask(b.threads(), b.in<float>(0), count_of(b.input(0)), b.out<uint8_t>(0)); },
      [](const Binding& b) { decode_mask(b.threads(), b.in<uint8_t>(0), count_of(b.output(0)), b.out<float>(0)); });
  add_pair(
      "sparse", "bitmap (u8), nonzeros (f32), where each chunk's begin (i32)",
      [](const OpView& v) -> std::vector<TensorSpec> {
        const int64_t count = count_of(v.input(0));
        return {{{bitmap_bytes(count)}, DType::u8}, {{capacity_of(v)}, DType::f32}, {{chunks(count) + 1}, DType::i32}};
      },
      [](const Binding& b) {
        const int64_t count = count_of(b.input(0)), capacity = count_of(b.output(1));
        const int64_t found = encode_sparse(b.threads(), b.in<float>(0), count, b.out<uint8_t>(0), b.out<float>(1),
                                            capacity, b.out<int32_t>(2));
        if (found > capacity)
          throw Error(b.input(0).name + " has " + std::to_string(found) + " nonzero elements of " +
                          std::to_string(count) + ", but plugins.gist.capacity has room for " +
                          std::to_string(capacity) + "; raise it and resume from the last checkpoint.",
                      ExitCode::failed);
      },
      [](const Binding& b) {
        decode_sparse(b.threads(), b.in<uint8_t>(0), b.in<float>(1), b.in<int32_t>(2), count_of(b.output(0)),
                      b.out<float>(0));
      });
  add_pair(
      "bf16", "bf16 of the same shape",
      [](const OpView& v) -> std::vector<TensorSpec> {
        return {{v.input(0).shape, DType::bf16}};
      },
      [](const Binding& b) { encode_bf16(b.threads(), b.in<float>(0), count_of(b.input(0)), b.out<uint16_t>(0)); },
      [](const Binding& b) { decode_bf16(b.threads(), b.in<uint16_t>(0), count_of(b.output(0)), b.out<float>(0)); });
  add_pair(
      "8bit", "codes (u8) of the same shape, one scale (f32) a block of 256",
      [](const OpView& v) -> std::vector<TensorSpec> {
        return {{v.input(0).shape, DType::u8}, {{blocks(count_of(v.input(0)))}, DType::f32}};
      },
      [](const Binding& b) {
        encode_8bit(b.threads(), format_of(b), b.in<float>(0), count_of(b.input(0)), b.out<uint8_t>(0),
                    b.out<float>(1));
      },
      [](const Binding& b) {
        decode_8bit(b.threads(), format_of(b), b.in<uint8_t>(0), b.in<float>(1), count_of(b.output(0)),
                    b.out<float>(0));
      });
}

}  // namespace

void register_kinds() {
  static const bool once = (register_all(), true);
  (void)once;
}

Attributes shape_attributes(const Shape& shape) {
  Attributes attributes{{"rank", int64_t(shape.size())}};
  for (size_t d = 0; d < shape.size(); ++d) attributes.set("d" + std::to_string(d), shape[d]);
  return attributes;
}

}  // namespace strata::gist
