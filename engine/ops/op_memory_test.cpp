// What kernels promise about memory and threads, for every kind that promises it: outputs that may share an input's
// memory give the same bits when they do, accumulating outputs add to their addend, results do not depend on the
// number of threads, and nothing is written outside of outputs and workspace. Values are op_test.cpp's business.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <set>

#include "strata/exact_sum.h"
#include "strata/builder.h"

namespace strata::op_memory_test {
namespace {

// `limit` > 0: token ids below it. dtype f64 with shape {1}: a scalar of value 3.
struct Input {
  Shape shape;
  int64_t limit = 0;
  DType dtype = DType::f32;
};

struct Case {
  std::string kind;
  std::vector<Input> inputs;
  Attributes attributes;
  bool any_threads = true;  // the same bits for any number of threads
};

constexpr int64_t kGuard = 64;
constexpr unsigned char kGuardByte = 0xA5, kUnwritten = 0xFF;  // 0xFF… is a NaN in every float type

// Aligned memory with guard bytes on both sides.
class Guarded {
 public:
  explicit Guarded(int64_t bytes)
      : bytes_(bytes),
        padded_((bytes + 2 * kGuard + 63) / 64 * 64),
        base_(static_cast<unsigned char*>(std::aligned_alloc(64, size_t(padded_))), std::free) {
    if (!base_) throw std::bad_alloc();
    std::memset(base_.get(), kGuardByte, size_t(padded_));
    std::memset(data(), kUnwritten, size_t(bytes_));
  }
  unsigned char* data() const { return base_.get() + kGuard; }
  int64_t bytes() const { return bytes_; }
  bool intact() const {
    for (int64_t i = 0; i < kGuard; ++i)
      if (base_.get()[i] != kGuardByte) return false;
    for (int64_t i = kGuard + bytes_; i < padded_; ++i)
      if (base_.get()[i] != kGuardByte) return false;
    return true;
  }

 private:
  int64_t bytes_, padded_;
  std::unique_ptr<unsigned char, void (*)(void*)> base_;
};

using Bytes = std::vector<unsigned char>;

class Subject {
 public:
  Subject(const Case& c, const std::string& backend, std::mt19937& random) : backend_(backend) {
    Builder build(program_);
    build.microbatch = 1;
    std::vector<TensorId> ids;
    for (const Input& in : c.inputs) ids.push_back(build.data("in", in.shape, in.limit > 0 ? DType::i32 : in.dtype));
    outputs_ = build.emit_all(c.kind, ids, c.attributes);
    for (size_t i = 0; i < ids.size(); ++i)
      values_.push_back(random_values(program_[ids[i]], c.inputs[i].limit, random));
  }

  const Op& op() const { return program_.ops.back(); }
  OpView view() const { return OpView(program_, op()); }

  // Runs the op; output o uses the memory of input share[o] where that is not -1, and holds addends[o] at the start
  // where `mask` says so. Returns the outputs.
  std::vector<Bytes> run(int threads, std::vector<int> share = {}, uint32_t mask = 0,
                         const std::vector<Bytes>& addends = {}) {
    Op op = this->op();
    op.accumulate = mask;
    for (size_t o = 0; o < outputs_.size(); ++o)
      if (mask >> o & 1) op.inputs.push_back(outputs_[o]);
    const OpView view(program_, op);
    Threads team(threads);
    std::vector<std::unique_ptr<Guarded>> memory;
    const auto allocate = [&](int64_t bytes) { return memory.emplace_back(new Guarded(bytes)).get(); };
    std::vector<void*> in, out;
    for (const Bytes& values : values_) {
      in.push_back(allocate(int64_t(values.size()))->data());
      std::memcpy(in.back(), values.data(), values.size());
    }
    for (size_t o = 0; o < outputs_.size(); ++o) {
      const int64_t bytes = program_[outputs_[o]].bytes();
      out.push_back(o < share.size() && share[o] >= 0 ? in[size_t(share[o])] : allocate(bytes)->data());
      if (mask >> o & 1) {
        std::memcpy(out.back(), addends[o].data(), size_t(bytes));
        in.push_back(out.back());
      }
    }
    const Kernel& kernel = op.kind->kernels.at(backend_);
    const int64_t workspace = kernel.workspace ? kernel.workspace(view, threads) : 0;
    void* scratch = workspace > 0 ? allocate(workspace)->data() : nullptr;
    kernel.bind(Binding(view, in, out, scratch, team))();
    for (const auto& piece : memory) EXPECT_TRUE(piece->intact()) << "wrote outside of its memory";
    std::vector<Bytes> results;
    for (size_t o = 0; o < outputs_.size(); ++o) {
      const auto* bytes = static_cast<unsigned char*>(out[o]);
      results.emplace_back(bytes, bytes + program_[outputs_[o]].bytes());
    }
    return results;
  }

  std::vector<Bytes> random_like_outputs(std::mt19937& random) const {
    std::vector<Bytes> values;
    for (TensorId id : outputs_) values.push_back(random_values(program_[id], 0, random));
    return values;
  }

  const std::vector<TensorId>& outputs() const { return outputs_; }
  const Program& program() const { return program_; }

 private:
  static Bytes random_values(const Tensor& tensor, int64_t limit, std::mt19937& random) {
    std::normal_distribution<double> normal;
    Bytes bytes(size_t(tensor.bytes()));
    for (int64_t i = 0; i < elements(tensor.shape); ++i) {
      const float value = float(normal(random));
      const int32_t token = limit > 0 ? int32_t(random() % uint64_t(limit)) : 0;
      const double scalar = 3;
      if (tensor.dtype == DType::i32)
        std::memcpy(bytes.data() + i * 4, &token, 4);
      else if (tensor.dtype == DType::f64)
        std::memcpy(bytes.data() + i * 8, &scalar, 8);
      else
        std::memcpy(bytes.data() + i * 4, &value, 4);
    }
    return bytes;
  }

  std::string backend_;
  Program program_;
  std::vector<TensorId> outputs_;
  std::vector<Bytes> values_;
};

std::vector<float> floats(const Bytes& bytes) {
  std::vector<float> values(bytes.size() / 4);
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

void check_in_place(Subject& subject, const std::vector<Bytes>& plain) {
  const auto& pairs = subject.op().kind->in_place;
  std::vector<std::vector<int>> ways;
  const size_t outputs = subject.outputs().size();
  for (const auto& [output, input] : pairs) {
    ways.emplace_back(outputs, -1);
    ways.back()[size_t(output)] = input;
  }
  // As many at once as the planner may choose.
  std::vector<int> all(outputs, -1);
  std::set<int> taken;
  for (const auto& [output, input] : pairs)
    if (all[size_t(output)] < 0 && taken.insert(input).second) all[size_t(output)] = input;
  ways.push_back(all);
  for (const auto& way : ways) EXPECT_EQ(subject.run(2, way), plain) << "sharing " << testing::PrintToString(way);
}

void check_accumulation(Subject& subject, const std::vector<Bytes>& plain, std::mt19937& random) {
  const auto addends = subject.random_like_outputs(random);
  const uint32_t can = subject.op().kind->accumulates;
  for (uint32_t mask = 1; mask <= can; ++mask) {
    if (mask & ~can) continue;
    const auto sums = subject.run(2, {}, mask, addends);
    for (size_t o = 0; o < sums.size(); ++o) {
      const auto got = floats(sums[o]), want = floats(plain[o]), addend = floats(addends[o]);
      // The addend may enter a sum of up to 5000 terms of size 1 at its start or at its end: 2^-24 a term at worst
      // near sums of 100.
      for (size_t i = 0; i < got.size(); ++i)
        ASSERT_NEAR(got[i], want[i] + (mask >> o & 1 ? addend[i] : 0), 2e-5 * (10 + std::abs(want[i])))
            << "mask " << mask << " output " << o << " element " << i;
    }
  }
}

std::vector<Case> cases(std::mt19937& random) {
  const auto pick = [&](std::initializer_list<int64_t> values) { return *(values.begin() + random() % values.size()); };
  const int64_t batch = pick({1, 3}), time = pick({1, 5, 33}), columns = pick({1, 2, 15, 16, 17, 31, 33, 130, 1000});
  const int64_t vocabulary = pick({1, 7, 50}), groups = pick({1, 2}), per_group = pick({1, 3});
  const int64_t size = 2 * pick({1, 8, 15});
  const Shape x{batch, time, columns}, w{columns}, long_vector{pick({1, 4095, 4097, 70001})};
  const Shape qkv{batch, time, groups * (per_group + 2) * size};
  const int64_t rows = batch * time;
  const Input scalar{{1}, 0, DType::f64}, exact_sum{{kExactSum}, 0, DType::f64};
  const Attributes epsilon{{"epsilon", 1e-5}};
  Attributes rotary{{"head_size", size}, {"queries_per_group", per_group}, {"base", 1e4}, {"inverse", int64_t{0}}};
  return {
      {"add", {{long_vector}, {long_vector}}, {}},
      {"scale", {{long_vector}, scalar}, {}},
      {"clamp", {{long_vector}}, {{"limit", 0.5}}},
      {"gelu", {{long_vector}}, {}},
      {"gelu_gradient", {{long_vector}, {long_vector}}, {}},
      {"swiglu", {{long_vector}, {long_vector}}, {}},
      {"swiglu_gradient", {{long_vector}, {long_vector}, {long_vector}}, {}},
      {"layer_norm", {{x}, {w}, {w}}, epsilon},
      // Column sums of the norms' gradients are added up thread by thread.
      {"layer_norm_gradient", {{x}, {x}, {w}, {{rows, 2}}}, {}, false},
      {"rms_norm", {{x}, {w}}, epsilon},
      {"rms_norm_gradient", {{x}, {x}, {w}, {{rows, 1}}}, {}, false},
      {"rotary", {{qkv}}, rotary},
      {"embedding", {{{batch, time}, vocabulary}, {{vocabulary, columns}}, {{time + 1, columns}}}, {}},
      {"embedding_gradient", {{x}, {{batch, time}, vocabulary}}, {{"rows", vocabulary}}},
      {"position_gradient", {{x}}, {{"rows", time + 2}}},
      {"dropout", {{long_vector}, scalar, scalar}, {{"probability", 0.4}, {"stream", int64_t{-5}}}},
      {"sum_rows", {{x}}, {}},
      {"sum_of_squares", {{long_vector}}, {}},
      {"add_sums", {exact_sum, exact_sum}, {}},
  };
}

TEST(OpMemory, SharingAccumulationThreadsAndBounds) {
  const uint32_t base = std::random_device{}();
  for (uint32_t i = 0; i < 10; ++i) {
    std::mt19937 random(base + i);
    for (const Case& c : cases(random))
      for (const char* backend : {"cpu", "reference"}) {
        SCOPED_TRACE(c.kind + " on " + backend + ", first input " + text(c.inputs[0].shape) + ", seed " +
                     std::to_string(base + i));
        Subject subject(c, backend, random);
        const auto plain = subject.run(2);
        for (size_t o = 0; o < plain.size(); ++o) {
          if (subject.program()[subject.outputs()[o]].dtype != DType::f32) continue;
          for (float value : floats(plain[o]))
            ASSERT_FALSE(std::isnan(value)) << "output " << o << " is not written whole";
        }
        EXPECT_EQ(subject.run(2), plain) << "two runs differ";
        if (c.any_threads) {
          EXPECT_EQ(subject.run(1), plain) << "one thread";
          EXPECT_EQ(subject.run(3), plain) << "three threads";
        }
        check_in_place(subject, plain);
        check_accumulation(subject, plain, random);
        if (HasFailure()) return;
      }
  }
}

// A loss that becomes NaN must be seen, so no kernel may turn NaN into a number.
TEST(OpMemory, NaNStaysNaN) {
  for (const std::string kind : {"add", "clamp", "gelu", "gelu_gradient", "swiglu", "swiglu_gradient"})
    for (const char* backend : {"cpu", "reference"})
      for (int64_t n : {1, 16, 40}) {
        Program program;
        Builder build(program);
        const int inputs = kind == "clamp" || kind == "gelu" ? 1 : kind == "swiglu_gradient" ? 3 : 2;
        std::vector<TensorId> ids;
        std::vector<void*> pointers;
        std::vector<float> values(size_t(n), NAN), result(size_t(n), 0), second(size_t(n), 0);
        for (int i = 0; i < inputs; ++i) {
          ids.push_back(build.data("x", {n}, DType::f32));
          pointers.push_back(values.data());
        }
        build.emit_all(kind, ids, {{"limit", 1.0}});
        Threads threads(1);
        const OpView view(program, program.ops.back());
        std::vector<void*> outputs{result.data()};
        if (view.outputs() == 2) outputs.push_back(second.data());
        view.op().kind->kernels.at(backend).bind(Binding(view, pointers, outputs, nullptr, threads))();
        for (float value : result) EXPECT_TRUE(std::isnan(value)) << kind << " on " << backend << " of " << n;
      }
}

}  // namespace
}  // namespace strata::op_memory_test
