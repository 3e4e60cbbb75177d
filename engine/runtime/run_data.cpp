// See run_data.h.
#include "engine/runtime/run_data.h"

#include <fmt/format.h>

#include <cmath>

namespace strata {
namespace {

std::vector<DataSource> sources_for(const Session& session, Goal goal) {
  if (goal == Goal::train) return session.data.sources;
  return {{.name = "", .files = session.data.validation}};
}

// A loss of tokens that mean something else would say nothing. Throws Error with both files.
void require_tokenizer_of_training(const Session& session) {
  std::vector<std::string> files;
  for (const DataSource& source : session.data.sources)
    files.insert(files.end(), source.files.begin(), source.files.end());
  files.insert(files.end(), session.data.validation.begin(), session.data.validation.end());
  tokenizer_of(files);
}

}  // namespace

RunData::RunData(const Session& session, Goal goal, int64_t vocabulary)
    : session_(session),
      batch_(session.batch(goal)),
      mixture_(sources_for(session, goal), {.vocabulary = vocabulary,
                                            .sequence_length = session.data.sequence_length,
                                            .shuffle = goal == Goal::train && session.data.shuffle,
                                            .packed = session.data.packed,
                                            .seed = goal == Goal::train ? uint64_t(session.run.seed) : 0}) {
  if (goal != Goal::train) require_tokenizer_of_training(session);
  if (goal != Goal::train || batch_.weighted || !mixture_.masked()) return;
  throw Error("a loss mask appeared beside the files of data.train after the run was planned; start again.");
}

void RunData::load(int64_t samples, Feed& feed, StepContext& step) const {
  const int64_t here = batch_.micro_batch * batch_.microbatches;
  feed.fill(mixture_, samples + session_.mesh[kDataAxis].coordinate * here);
  if (!batch_.weighted) return;
  int64_t counted = 0;
  for (int64_t i = 0; i < batch_.sequences(); ++i) counted += mixture_.counted(samples + i);
  // Losses are made with 1 / all of the step's targets.
  const double all = double(batch_.sequences() * batch_.sequence_length), weight = counted ? all / double(counted) : 0;
  step.set_scalar(kLossWeight, weight);
  feed.weigh(weight);
}

void RunData::set_steps(Session& session) const {
  if (session.run.epochs == 0) return;
  const double steps =
      std::ceil(session.run.epochs * double(mixture_.of(0).sequences()) / double(session.data.global_batch));
  session.run.steps = std::max<int64_t>(1, int64_t(steps));
}

std::string RunData::describe(int64_t steps) const {
  std::string text;
  for (size_t s = 0; s < mixture_.sources().size(); ++s) {
    const Sampler& sampler = mixture_.of(s);
    const int64_t batch = session_.data.global_batch,
                  taken = mixture_.taken(s, std::min(steps, INT64_MAX / batch) * batch);
    const double epochs = double(taken) / double(sampler.sequences());
    text += fmt::format("{}data{}: {} sequences of {} tokens", text.empty() ? "" : "\n",
                        mixture_.sources()[s].name.empty() ? "" : " " + mixture_.sources()[s].name, sampler.sequences(),
                        session_.data.sequence_length);
    if (session_.data.packed)
      text += fmt::format(", {:.1f}% padding", 100 * double(sampler.padding()) /
                                                   double(sampler.sequences() * session_.data.sequence_length));
    text += fmt::format("; {} steps take {}: {:.3g} epochs", steps, taken, epochs);
    if (epochs > 1) text += fmt::format(", so each is seen up to {:.0f} times", std::ceil(epochs));
  }
  return text;
}

}  // namespace strata
