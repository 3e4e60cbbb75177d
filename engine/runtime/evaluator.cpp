// See evaluator.h.
#include "engine/runtime/evaluator.h"

#include <algorithm>

#include "engine/runtime/load_parameters.h"
#include "strata/error.h"

namespace strata {
namespace {

// A program gives the loss of all of its sequences together; so it has one.
RunPlans plans_for_one_sequence(Session& session) {
  session.data.micro_batch = 1;
  return session.plan_run(Goal::evaluate);
}

}  // namespace

Evaluator::Evaluator(Session& session, const std::string& checkpoint)
    : world_(single_world()),
      packed_(session.data.packed),
      assembly_(session, *world_, plans_for_one_sequence(session)),
      feed_(assembly_.executor_of(0), session.batch(Goal::evaluate)),
      tokens_(size_t(session.data.sequence_length)),
      targets_(tokens_.size()) {
  load_parameters(assembly_.storage, session, checkpoint);
}

double Evaluator::loss(std::span<const int32_t> tokens, int64_t first) {
  const int64_t inputs = int64_t(tokens.size()) - 1;
  STRATA_CHECK(first >= 1 && first <= inputs && inputs <= window());
  // Attention is causal: what follows has no effect. Targets below 0 do not count.
  std::fill(std::copy(tokens.begin(), tokens.end() - 1, tokens_.begin()), tokens_.end(), 0);
  std::fill(targets_.begin(), targets_.end(), -1);
  std::copy(tokens.begin() + first, tokens.end(), targets_.begin() + first - 1);
  return loss(tokens_.data(), targets_.data());
}

double Evaluator::loss(const int32_t* tokens, const int32_t* targets, const int32_t* document_starts) {
  feed_.put(0, tokens, targets, document_starts);
  assembly_.executor_of(0).run();
  return feed_.loss() * double(window());  // it is a mean over all tokens that the program takes
}

}  // namespace strata
