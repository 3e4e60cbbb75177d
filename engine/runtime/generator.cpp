// Next-token sampling on the logits program; see generator.h.
#include "engine/runtime/generator.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "engine/runtime/load_parameters.h"
#include "strata/convert.h"
#include "strata/random.h"

namespace strata {
namespace {

// One draw from softmax(logits / temperature) over the top k.
int32_t draw(const float* logits, int64_t vocabulary, const SamplingOptions& options, uint64_t index) {
  const auto best = std::max_element(logits, logits + vocabulary);
  if (options.temperature <= 0) return int32_t(best - logits);
  std::vector<int32_t> order(vocabulary);
  std::iota(order.begin(), order.end(), 0);
  if (options.top_k > 0 && options.top_k < vocabulary) {
    std::nth_element(order.begin(), order.begin() + options.top_k, order.end(),
                     [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
    order.resize(size_t(options.top_k));
  }
  std::vector<double> weights;
  double sum = 0;
  for (int32_t id : order) weights.push_back(sum += std::exp((double(logits[id]) - *best) / options.temperature));
  const double at = double(random_block(options.seed, stream_of("generate"), index)[0]) / 4294967296.0 * sum;
  const auto found = std::upper_bound(weights.begin(), weights.end(), at);
  return order[std::min<size_t>(size_t(found - weights.begin()), order.size() - 1)];
}

}  // namespace

Generator::Generator(const Session& session, const std::string& checkpoint)
    : world_(single_world()),
      assembly_(session, *world_, session.plan_run(Goal::logits)),
      window_(session.data.sequence_length) {
  load_parameters(assembly_.storage, session, checkpoint);
}

std::vector<float> Generator::logits(const std::vector<int32_t>& tokens) {
  STRATA_CHECK(int64_t(tokens.size()) <= window_);
  const TensorId logits = assembly_.plans.main().built.logits;
  Executor& executor = assembly_.executor_of(0);
  auto* input = static_cast<int32_t*>(executor.pointer(assembly_.program().find("tokens@0")));
  std::fill(std::copy(tokens.begin(), tokens.end(), input), input + window_,
            0);  // attention is causal: what follows has no effect
  executor.run();
  std::vector<float> values(tokens.size() * size_t(vocabulary()));
  to_f32(assembly_.program()[logits].dtype, executor.pointer(logits), values.data(), int64_t(values.size()));
  return values;
}

void Generator::generate(std::vector<int32_t> tokens, const SamplingOptions& options,
                         const std::function<void(int32_t)>& emit) {
  for (int32_t id : tokens)
    if (id < 0 || id >= vocabulary())
      throw Error("the prompt holds token " + std::to_string(id) + ", but the model knows only ids below " +
                  std::to_string(vocabulary()) + ".");
  if (tokens.empty()) tokens.push_back(0);
  for (int64_t i = 0; i < options.tokens; ++i) {
    const auto from = tokens.end() - std::min<int64_t>(window_, int64_t(tokens.size()));
    const std::vector<float> all = logits({from, tokens.end()});
    const int32_t next = draw(all.data() + all.size() - size_t(vocabulary()), vocabulary(), options, uint64_t(i));
    tokens.push_back(next);
    emit(next);
  }
}

}  // namespace strata
