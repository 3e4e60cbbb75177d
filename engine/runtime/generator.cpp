// Next-token sampling; see generator.h.
#include "engine/runtime/generator.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "strata/error.h"
#include "strata/random.h"

namespace strata {

int32_t sample(std::span<const float> logits, const SamplingOptions& options, uint64_t draw) {
  const auto best = std::max_element(logits.begin(), logits.end());
  if (options.temperature <= 0) return int32_t(best - logits.begin());
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto likelier = [&](int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  };
  if (options.top_k > 0 && options.top_k < int64_t(order.size())) {
    std::nth_element(order.begin(), order.begin() + options.top_k, order.end(), likelier);
    order.resize(size_t(options.top_k));
  }
  if (options.top_p < 1) std::sort(order.begin(), order.end(), likelier);
  std::vector<double> weights;
  double sum = 0;
  for (int32_t id : order) weights.push_back(sum += std::exp((double(logits[id]) - *best) / options.temperature));
  if (options.top_p < 1) {
    const auto enough = std::lower_bound(weights.begin(), weights.end(), options.top_p * sum);
    weights.erase(std::min(enough + 1, weights.end()), weights.end());
    sum = weights.back();
  }
  const double at = double(random_block(options.seed, stream_of("generate"), draw)[0]) / 4294967296.0 * sum;
  const auto found = std::upper_bound(weights.begin(), weights.end(), at);
  return order[std::min<size_t>(size_t(found - weights.begin()), weights.size() - 1)];
}

void generate(NextLogits& model, std::vector<std::vector<int32_t>> prompts, const SamplingOptions& options,
              const std::function<void(size_t prompt, int32_t id)>& emit) {
  for (std::vector<int32_t>& prompt : prompts) {
    for (int32_t id : prompt)
      if (id < 0 || id >= model.vocabulary())
        throw Error("the prompt holds token " + std::to_string(id) + ", but the model knows only ids below " +
                    std::to_string(model.vocabulary()) + ".");
    if (prompt.empty()) prompt.push_back(0);
  }
  const size_t vocabulary = size_t(model.vocabulary());
  std::vector<float> logits(prompts.size() * vocabulary);
  std::vector<char> ended(prompts.size(), false);
  for (int64_t i = 0; i < options.tokens; ++i) {
    model.of(prompts, logits.data());
    for (size_t n = 0; n < prompts.size(); ++n) {
      if (ended[n]) continue;
      // Of each prompt a stream of its own: the first one's is that of a prompt alone.
      const int32_t next =
          sample(std::span(logits).subspan(n * vocabulary, vocabulary), options, uint64_t(n) << 40 | uint64_t(i));
      ended[n] = options.ends.contains(next);
      if (ended[n]) continue;
      prompts[n].push_back(next);
      emit(n, next);
    }
    if (std::find(ended.begin(), ended.end(), false) == ended.end()) return;
  }
}

}  // namespace strata
