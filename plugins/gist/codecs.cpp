// Shape rules, costs and kernels of the encodings; see codecs.h. The loops are in codec_kernels.h.
#include "plugins/gist/codecs.h"

#include <cmath>

#include "plugins/gist/codec_kernels.h"
#include "strata/convert.h"

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

// Codecs work on f32: what has 16 bits is widened into the workspace, count elements each for x and for numbers kept.
int64_t workspace(const Tensor& x) { return is_half(x.dtype) ? 2 * count_of(x) * 4 : 0; }
const float* widened(const Binding& b, int input, float* to) {
  const DType type = b.input(input).dtype;
  if (!is_half(type)) return b.in<float>(input);
  b.threads().split(count_of(b.input(input)), 4096,
                    [&](int64_t i, int64_t e) { to_f32(type, at(b.in<void>(input), type, i), to + i, e - i); });
  return to;
}
void narrowed(const Binding& b, int output, const float* from) {
  const DType type = b.output(output).dtype;
  if (!is_half(type)) return;
  b.threads().split(count_of(b.output(output)), 4096,
                    [&](int64_t i, int64_t e) { from_f32(type, from + i, at(b.out<void>(output), type, i), e - i); });
}

// The encodings have no faster and slower form: one kernel serves both CPU backends.
std::map<std::string, Kernel, std::less<>> kernels(const Kernel& kernel) {
  return {{"cpu", kernel}, {"reference", kernel}};
}
template <class Encode>
Kernel encoder(Encode encode) {
  return {[=](const Binding& b) -> Launch { return [=] { encode(b, widened(b, 0, b.workspace<float>())); }; },
          [](const OpView& v, int) { return workspace(v.input(0)); }};
}
template <class Decode>
Kernel decoder(Decode decode) {
  return {[=](const Binding& b) -> Launch {
            float* const x = is_half(b.output(0).dtype) ? b.workspace<float>() : b.out<float>(0);
            return [=] {
              decode(b, x);
              narrowed(b, 0, x);
            };
          },
          [](const OpView& v, int) { return workspace(v.output(0)); }};
}

// `kept` gives the outputs for one input.
template <class Encode, class Decode>
void add_pair(const std::string& name, const std::string& summary,
              std::function<std::vector<TensorSpec>(const OpView&)> kept, Encode encode, Decode decode) {
  register_kind({.name = "gist_" + name + "_encode",
                 .summary = "x (…) -> " + summary,
                 .shape = [kept](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() == 1 && v.has_input(0) &&
                               (v.input(0).dtype == DType::f32 || is_half(v.input(0).dtype)),
                           v, "one f32, bf16 or f16 tensor");
                   return kept(v);
                 },
                 .kernels = kernels(encoder(encode))});
  register_kind({.name = "gist_" + name + "_decode",
                 .summary = summary + " -> x (…)",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() >= 1 && v.has_input(0) && v.attributes().has("rank"), v,
                           "what the encoder made, and attributes rank, d0, d1, … and at most dtype");
                   return {{shape_from(v.attributes()), DType(v.attributes().integer("dtype", int64_t(DType::f32)))}};
                 },
                 .kernels = kernels(decoder(decode))});
}

void register_all() {
  add_pair(
      "mask", "one bit an element (u8)",
      [](const OpView& v) -> std::vector<TensorSpec> {
        return {{{bitmap_bytes(count_of(v.input(0)))}, DType::u8}};
      },
      [](const Binding& b, const float* x) { encode_mask(b.threads(), x, count_of(b.input(0)), b.out<uint8_t>(0)); },
      [](const Binding& b, float* x) { decode_mask(b.threads(), b.in<uint8_t>(0), count_of(b.output(0)), x); });
  add_pair(
      "sparse", "bitmap (u8), nonzeros (as x), where each chunk's begin (i32)",
      [](const OpView& v) -> std::vector<TensorSpec> {
        const int64_t count = count_of(v.input(0));
        return {{{bitmap_bytes(count)}, DType::u8},
                {{capacity_of(v)}, v.input(0).dtype},
                {{chunks(count) + 1}, DType::i32}};
      },
      [](const Binding& b, const float* x) {
        const int64_t count = count_of(b.input(0)), capacity = count_of(b.output(1));
        float* const nonzeros = is_half(b.output(1).dtype) ? b.workspace<float>() + count : b.out<float>(1);
        const int64_t found =
            encode_sparse(b.threads(), x, count, b.out<uint8_t>(0), nonzeros, capacity, b.out<int32_t>(2));
        if (found > capacity) throw Error(too_many(b, found), ExitCode::failed);
        narrowed(b, 1, nonzeros);
      },
      [](const Binding& b, float* x) {
        const int64_t count = count_of(b.output(0));
        const float* nonzeros = widened(b, 1, b.workspace<float>() + count);
        decode_sparse(b.threads(), b.in<uint8_t>(0), nonzeros, b.in<int32_t>(2), count, x);
      });
  add_pair(
      "bf16", "bf16 of the same shape",
      [](const OpView& v) -> std::vector<TensorSpec> {
        return {{v.input(0).shape, DType::bf16}};
      },
      [](const Binding& b, const float* x) { encode_bf16(b.threads(), x, count_of(b.input(0)), b.out<uint16_t>(0)); },
      [](const Binding& b, float* x) { decode_bf16(b.threads(), b.in<uint16_t>(0), count_of(b.output(0)), x); });
  add_pair(
      "8bit", "codes (u8) of the same shape, one scale (f32) a block of 256",
      [](const OpView& v) -> std::vector<TensorSpec> {
        return {{v.input(0).shape, DType::u8}, {{blocks(count_of(v.input(0)))}, DType::f32}};
      },
      [](const Binding& b, const float* x) {
        encode_8bit(b.threads(), format_of(b), x, count_of(b.input(0)), b.out<uint8_t>(0), b.out<float>(1));
      },
      [](const Binding& b, float* x) {
        decode_8bit(b.threads(), format_of(b), b.in<uint8_t>(0), b.in<float>(1), count_of(b.output(0)), x);
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
