// Elementwise kinds (elementwise.h).
#include "cuda/elementwise.h"
#include "cuda/philox.h"
#include "strata/layout.h"

namespace strata::cuda::elementwise_kernels {
namespace {

struct Add {
  STRATA_DEVICE void operator()(const float (&x)[2], float (&y)[1], int64_t) const { y[0] = x[0] + x[1]; }
};
struct Scale {
  const double* factor;
  STRATA_DEVICE void operator()(const float (&x)[1], float (&y)[1], int64_t) const { y[0] = x[0] * float(*factor); }
};
struct Clamp {
  float limit;
  STRATA_DEVICE void operator()(const float (&x)[1], float (&y)[1], int64_t) const {
    y[0] = x[0] < -limit ? -limit : x[0] > limit ? limit : x[0];
  }
};

STRATA_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }
// GELU in its tanh form (arXiv 1606.08415) by the logistic function: tanh(z) = 2σ(2z) - 1.
constexpr float kGelu = 0.7978845608f, kCubic = 0.044715f;
struct Gelu {
  STRATA_DEVICE void operator()(const float (&x)[1], float (&y)[1], int64_t) const {
    y[0] = x[0] * sigmoid(2 * kGelu * (x[0] + kCubic * x[0] * x[0] * x[0]));
  }
};
struct GeluGradient {
  STRATA_DEVICE void operator()(const float (&in)[2], float (&dx)[1], int64_t) const {
    const float x = in[1], s = sigmoid(2 * kGelu * (x + kCubic * x * x * x));
    dx[0] = in[0] * (s + x * s * (1 - s) * (2 * kGelu * (1 + 3 * kCubic * x * x)));
  }
};
// SwiGLU (arXiv 2002.05202): silu(gate)·up.
struct Swiglu {
  STRATA_DEVICE void operator()(const float (&x)[2], float (&y)[1], int64_t) const {
    y[0] = x[0] * sigmoid(x[0]) * x[1];
  }
};
struct SwigluGradient {
  STRATA_DEVICE void operator()(const float (&x)[3], float (&y)[2], int64_t) const {
    const float d = x[0], g = x[1], u = x[2], s = sigmoid(g);
    y[0] = d * u * s * (1 + g * (1 - s));
    y[1] = d * g * s;
  }
};
// x·Φ(x), and gated layers with it or with the tanh form: gelu(gate)·up.
struct ExactForm {
  float value, slope;
  STRATA_DEVICE explicit ExactForm(float x) {
    const float below = 0.5f * erfcf(-x * 0.70710678f);
    value = x * below;
    slope = below + x * 0.39894228f * __expf(-0.5f * x * x);
  }
};
struct TanhForm {
  float value, slope;
  STRATA_DEVICE explicit TanhForm(float x) {
    const float s = sigmoid(2 * kGelu * (x + kCubic * x * x * x));
    value = x * s;
    slope = s + x * s * (1 - s) * (2 * kGelu * (1 + 3 * kCubic * x * x));
  }
};
struct GeluExact {
  STRATA_DEVICE void operator()(const float (&x)[1], float (&y)[1], int64_t) const { y[0] = ExactForm(x[0]).value; }
};
struct GeluExactGradient {
  STRATA_DEVICE void operator()(const float (&in)[2], float (&dx)[1], int64_t) const {
    dx[0] = in[0] * ExactForm(in[1]).slope;
  }
};
template <class Form>
struct Geglu {
  STRATA_DEVICE void operator()(const float (&x)[2], float (&y)[1], int64_t) const { y[0] = Form(x[0]).value * x[1]; }
};
template <class Form>
struct GegluGradient {
  STRATA_DEVICE void operator()(const float (&x)[3], float (&y)[2], int64_t) const {
    const Form of(x[1]);
    y[0] = x[0] * x[2] * of.slope;
    y[1] = x[0] * of.value;
  }
};
struct Multiply {
  float factor;
  STRATA_DEVICE void operator()(const float (&x)[1], float (&y)[1], int64_t) const { y[0] = x[0] * factor; }
};
struct SoftCap {
  float cap;
  STRATA_DEVICE void operator()(const float (&x)[1], float (&y)[1], int64_t) const { y[0] = cap * tanhf(x[0] / cap); }
};
struct SoftCapGradient {
  float cap;
  STRATA_DEVICE void operator()(const float (&x)[2], float (&y)[1], int64_t) const {
    y[0] = x[0] * (1 - x[1] / cap * (x[1] / cap));
  }
};
struct Relu {
  STRATA_DEVICE void operator()(const float (&x)[1], float (&y)[1], int64_t) const { y[0] = x[0] < 0 ? 0.0f : x[0]; }
};
struct ReluGradient {
  STRATA_DEVICE void operator()(const float (&x)[2], float (&y)[1], int64_t) const { y[0] = x[1] > 0 ? x[0] : 0.0f; }
};
struct SquaredRelu {
  STRATA_DEVICE void operator()(const float (&x)[1], float (&y)[1], int64_t) const {
    y[0] = x[0] < 0 ? 0.0f : x[0] * x[0];
  }
};
struct SquaredReluGradient {
  STRATA_DEVICE void operator()(const float (&x)[2], float (&y)[1], int64_t) const { y[0] = x[0] * 2 * sqrtf(x[1]); }
};

// The tensor on one rank, zeros on the others.
struct CountedOnce {
  bool here;
  STRATA_DEVICE void operator()(const float (&x)[1], float (&y)[1], int64_t) const { y[0] = here ? x[0] : 0.0f; }
};
struct RescaledSum {
  STRATA_DEVICE void operator()(const float (&x)[3], float (&y)[1], int64_t) const { y[0] = x[0] * expf(x[1] - x[2]); }
};

// As on the CPU: element `index` keeps its value when word index%4 of block index/4 is at least the threshold. The
// elements of a thread mostly follow each other, so a block's words are made once for four of them.
struct Dropout {
  const double *seed, *step;
  uint64_t stream;
  uint32_t threshold;
  float factor;
  int64_t first;       // of this microbatch
  GlobalIndex global;  // of this rank's part in the tensor of one
  uint64_t block = ~uint64_t{0};  // of which these are the words
  Words words{};
  STRATA_DEVICE void operator()(const float (&x)[1], float (&y)[1], int64_t i) {
    const uint64_t index = uint64_t(first + global(i));
    if (index / 4 != block) {
      block = index / 4;
      words = random_words(uint64_t(*seed), stream ^ (uint64_t(*step) * 0x9E3779B97F4A7C15ull), block);
    }
    y[0] = pick(words, uint32_t(index % 4)) >= threshold ? x[0] * factor : 0.0f;
  }
};

const Registration kinds[] = {
    {"add", [](const Binding& b) { return bind_apply<2, 1>(b, Add{}); }},
    {"scale", [](const Binding& b) { return bind_apply<1, 1>(b, Scale{b.in<double>(1)}); }},
    {"clamp", [](const Binding& b) { return bind_apply<1, 1>(b, Clamp{float(b.attributes().real("limit"))}); }},
    {"gelu", [](const Binding& b) { return bind_apply<1, 1>(b, Gelu{}); }},
    {"gelu_gradient", [](const Binding& b) { return bind_apply<2, 1>(b, GeluGradient{}); }},
    {"swiglu", [](const Binding& b) { return bind_apply<2, 1>(b, Swiglu{}); }},
    {"swiglu_gradient", [](const Binding& b) { return bind_apply<3, 2>(b, SwigluGradient{}); }},
    {"gelu_exact", [](const Binding& b) { return bind_apply<1, 1>(b, GeluExact{}); }},
    {"gelu_exact_gradient", [](const Binding& b) { return bind_apply<2, 1>(b, GeluExactGradient{}); }},
    {"geglu", [](const Binding& b) { return bind_apply<2, 1>(b, Geglu<TanhForm>{}); }},
    {"geglu_gradient", [](const Binding& b) { return bind_apply<3, 2>(b, GegluGradient<TanhForm>{}); }},
    {"geglu_exact", [](const Binding& b) { return bind_apply<2, 1>(b, Geglu<ExactForm>{}); }},
    {"geglu_exact_gradient", [](const Binding& b) { return bind_apply<3, 2>(b, GegluGradient<ExactForm>{}); }},
    {"multiply", [](const Binding& b) { return bind_apply<1, 1>(b, Multiply{float(b.attributes().real("factor"))}); }},
    {"soft_cap", [](const Binding& b) { return bind_apply<1, 1>(b, SoftCap{float(b.attributes().real("cap"))}); }},
    {"soft_cap_gradient",
     [](const Binding& b) { return bind_apply<2, 1>(b, SoftCapGradient{float(b.attributes().real("cap"))}); }},
    {"relu", [](const Binding& b) { return bind_apply<1, 1>(b, Relu{}); }},
    {"relu_gradient", [](const Binding& b) { return bind_apply<2, 1>(b, ReluGradient{}); }},
    {"squared_relu", [](const Binding& b) { return bind_apply<1, 1>(b, SquaredRelu{}); }},
    {"squared_relu_gradient", [](const Binding& b) { return bind_apply<2, 1>(b, SquaredReluGradient{}); }},
    {"counted_once",
     [](const Binding& b) { return bind_apply<1, 1>(b, CountedOnce{b.attributes().integer("coordinate") == 0}); }},
    {"rescaled_sum", [](const Binding& b) { return bind_apply<3, 1>(b, RescaledSum{}); }},
    {"dropout", [](const Binding& b) {
       const double p = b.attributes().real("probability");
       return bind_apply<1, 1>(
           b, Dropout{b.in<double>(1), b.in<double>(2), uint64_t(b.attributes().integer("stream")),
                      uint32_t(p * 4294967296.0), float(1 / (1 - p)),
                      std::max(0, b.op().microbatch) * elements(b.output(0).full_shape()), GlobalIndex(b.output(0))});
     }}};

STRATA_KERNEL multiply(const double* a, const double* b, double* product) { *product = *a * *b; }
const Registration scalars("multiply_scalars", [](const Binding& b) -> Launch {
  return [a = b.in<double>(0), c = b.in<double>(1), out = b.out<double>(0), queue = b.queue()] {
    launch(multiply, dim3(1), 1, 0, queue, a, c, out);
  };
});

STRATA_KERNEL mark_overflow(const double* x, double* mark) { *mark = *x != *x ? *x : 1.0; }
const Registration marks("overflow_mark", [](const Binding& b) -> Launch {
  return [x = b.in<double>(0), out = b.out<double>(0), queue = b.queue()] {
    launch(mark_overflow, dim3(1), 1, 0, queue, x, out);
  };
});

}  // namespace
}  // namespace strata::cuda::elementwise_kernels
