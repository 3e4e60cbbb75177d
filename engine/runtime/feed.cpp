// Tokens in, loss out; see feed.h.
#include "engine/runtime/feed.h"

#include <algorithm>

#include "strata/random.h"

namespace strata {
namespace {

// A stage of a pipeline, which need not read data: the others do.
bool is_stage(const Program& program) {
  return std::any_of(program.ops.begin(), program.ops.end(),
                     [](const Op& op) { return op.stream == Stream::send || op.stream == Stream::receive; });
}

}  // namespace

double read_scalar(const Program& program, TensorId id, const void* data) {
  return program[id].dtype == DType::f64 ? *static_cast<const double*>(data) : double(*static_cast<const float*>(data));
}

Feed::Feed(const Executor& executor, const BatchShape& batch) : batch_(batch), program_(&executor.program()) {
  const bool may_lack = is_stage(*program_);
  const auto memory = [&](const std::string& name, int64_t m, bool may_lack) -> int32_t* {
    const TensorId id = program_->find(name + "@" + std::to_string(m));
    if (!id && !may_lack) throw Error("the model declares no data tensor \"" + name + "\", which the loader fills.");
    if (!id) return nullptr;
    if (count_ == 0) own_ = GlobalIndex((*program_)[id]), count_ = elements((*program_)[id].shape);
    return static_cast<int32_t*>(executor.pointer(id));
  };
  for (int64_t m = 0; m < batch.microbatches; ++m) {
    tokens_.push_back(memory("tokens", m, may_lack));
    targets_.push_back(memory("targets", m, may_lack));
    document_starts_.push_back(memory("document_starts", m, may_lack || !batch.packed));
  }
  sequences_.resize(3 * size_t(batch.micro_batch * batch.sequence_length));
  for (TensorId loss : program_->losses) losses_.push_back({loss, executor.pointer(loss)});
}

void Feed::put(size_t microbatch, const int32_t* tokens, const int32_t* targets, const int32_t* document_starts) const {
  own_.runs(0, count_, [&](int64_t local, int64_t global, int64_t count) {
    if (int32_t* to = tokens_[microbatch]) std::copy_n(tokens + global, count, to + local);
    if (int32_t* to = targets_[microbatch]) std::copy_n(targets + global, count, to + local);
    if (int32_t* to = document_starts_[microbatch]; to && document_starts)
      std::copy_n(document_starts + global, count, to + local);
    else if (to)
      std::fill_n(to + local, count, 0);
  });
}

void Feed::fill(const Mixture& data, int64_t first_sample) const {
  int32_t *tokens = sequences_.data(), *targets = tokens + sequences_.size() / 3,
          *documents = targets + sequences_.size() / 3;
  for (size_t m = 0; m < tokens_.size(); ++m) {
    for (int64_t b = 0; b < batch_.micro_batch; ++b) {
      const int64_t at = b * batch_.sequence_length;
      data.fill(first_sample + int64_t(m) * batch_.micro_batch + b,
                {tokens + at, targets + at, batch_.packed ? documents + at : nullptr});
    }
    put(m, tokens, targets, batch_.packed ? documents : nullptr);
  }
}

void Feed::fill_random(int64_t vocabulary, uint64_t seed) const {
  int32_t *tokens = sequences_.data(), *targets = tokens + sequences_.size() / 3;
  const int64_t count = batch_.micro_batch * batch_.sequence_length;
  for (size_t m = 0; m < tokens_.size(); ++m) {
    for (int64_t i = 0; i < count; ++i) {
      const auto words = random_block(seed, stream_of("random tokens"), uint64_t(int64_t(m) * count + i));
      tokens[i] = int32_t(words[0] % uint64_t(vocabulary));
      targets[i] = int32_t(words[1] % uint64_t(vocabulary));
    }
    put(m, tokens, targets);
  }
}

std::vector<double> Feed::losses() const {
  std::vector<double> all;
  for (const auto& [id, data] : losses_) all.push_back(read_scalar(*program_, id, data) * weight_);
  return all;
}

double Feed::loss() const {
  double sum = 0;
  for (const auto& [id, data] : losses_) sum += read_scalar(*program_, id, data) * weight_;
  return sum;
}

}  // namespace strata
