// Tokens in, loss out; see feed.h.
#include "engine/runtime/feed.h"

#include "strata/random.h"

namespace strata {
namespace {

int32_t* pointer(const Executor& executor, const Program& program, const std::string& name) {
  const TensorId id = program.find(name);
  if (!id)
    throw Error("the model declares no data tensor \"" + name.substr(0, name.find('@')) +
                "\", which the loader fills.");
  return static_cast<int32_t*>(executor.pointer(id));
}

}  // namespace

double read_scalar(const Program& program, TensorId id, const void* data) {
  return program[id].dtype == DType::f64 ? *static_cast<const double*>(data) : double(*static_cast<const float*>(data));
}

Feed::Feed(const Executor& executor, const BatchShape& batch) : batch_(batch), program_(&executor.program()) {
  for (int64_t m = 0; m < batch.microbatches; ++m) {
    tokens_.push_back(pointer(executor, *program_, "tokens@" + std::to_string(m)));
    targets_.push_back(pointer(executor, *program_, "targets@" + std::to_string(m)));
  }
  for (TensorId loss : program_->losses) losses_.push_back({loss, executor.pointer(loss)});
}

void Feed::fill(const Sampler& sampler, int64_t first_sample) const {
  for (size_t m = 0; m < tokens_.size(); ++m)
    for (int64_t b = 0; b < batch_.micro_batch; ++b) {
      const int64_t at = b * batch_.sequence_length;
      sampler.fill(first_sample + int64_t(m) * batch_.micro_batch + b, tokens_[m] + at, targets_[m] + at);
    }
}

void Feed::fill_random(int64_t vocabulary, uint64_t seed) const {
  const int64_t count = batch_.micro_batch * batch_.sequence_length;
  for (size_t m = 0; m < tokens_.size(); ++m)
    for (int64_t i = 0; i < count; ++i) {
      const auto words = random_block(seed, stream_of("random tokens"), uint64_t(int64_t(m) * count + i));
      tokens_[m][i] = int32_t(words[0] % uint64_t(vocabulary));
      targets_[m][i] = int32_t(words[1] % uint64_t(vocabulary));
    }
}

std::vector<double> Feed::losses() const {
  std::vector<double> all;
  for (const auto& [id, data] : losses_) all.push_back(read_scalar(*program_, id, data));
  return all;
}

double Feed::loss() const {
  double sum = 0;
  for (const auto& [id, data] : losses_) sum += read_scalar(*program_, id, data);
  return sum;
}

}  // namespace strata
