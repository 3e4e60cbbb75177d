// What each stage of a pipeline does, in order: the passes of a schedule, and the sends and receives that follow from
// them. And the check that this is right: nothing here runs anything or knows seconds.
#pragma once
#include <string>
#include <vector>

#include "strata/pipeline_schedule.h"

namespace strata::pipeline {

// A pass, or an exchange with the stage `peer`: a send of what `pass` makes, a receive of what `pass` needs.
struct Action {
  enum class Kind : uint8_t { run, send, receive };
  Kind kind = Kind::run;
  Pass pass{};  // the chunk is the stage's own; the microbatch counts over all steps
  int peer = -1;
  int step = 0;
};

// What goes from stage to stage: the output of a chunk, or the gradient of an input, named by the chunk that needs it.
struct Message {
  bool gradient = false;
  int chunk = 0;  // global
  int microbatch = 0;
  bool operator==(const Message&) const = default;
};
std::string text(const Message& message);

double seconds(const ChunkCost& cost, const Pass& pass);

// All stages together.
struct Actions {
  std::vector<int> stage_of;                 // by global chunk
  std::vector<std::vector<int>> own_chunks;  // by stage and own chunk: the global one
  int microbatches = 0;                      // of all steps
  int left = 0;                              // of those: may be unfinished at the end, as they began in the last step
  std::vector<std::vector<Action>> by_stage;

  int stages() const { return int(by_stage.size()); }
  int chunks() const { return int(stage_of.size()); }
  int chunk(int stage, const Pass& pass) const { return own_chunks[size_t(stage)][size_t(pass.chunk)]; }
  // For lists by message.
  size_t index(const Message& message) const {
    return size_t((message.gradient ? chunks() : 0) + message.chunk) * size_t(microbatches) +
           size_t(message.microbatch);
  }
  // What a pass makes for another stage, or needs of one. Chunk -1: nothing.
  Message made(int stage, const Pass& pass) const;
  Message needed(int stage, const Pass& pass) const;
  std::string text(int stage, const Action& action) const;
};

// Of `steps` steps in a row. Throws Error unless the schedule's passes are what they should be: of chunks that the
// stage holds, each once and after those of its stage that it needs.
//   A send comes right after the pass that makes it, and what a pass of the next step needs is sent at the start of
//   that
// step: so what is sent in a step is received in it. A stage receives in the order in which all stages together send
// what it receives (step by step, by the clock, sends taking no time, of two at once the lower stage's first), each
// before the first of its passes that ends later than that. So if passes alone can run (no two wait for each other),
// all of it can, in this order, even where a send waits for its receiver and a stage does one thing at a time: take the
// pass of the earliest step that ends first of those that have not run. All that its stage receives before it has been
// made and received; what it makes is what its receiver has next. A plan may therefore let any op wait for any before
// it, as one does whose memory it takes over. Only where two stages send each other something as a step begins a
// receive must not wait for a send since the last pass: there a plan keeps memory so that it need not.
Actions actions_of(const Problem& problem, const Schedule& schedule, int steps = 1);

// Under the strictest meaning of send: a send ends when its receive has; a stage's sends begin one after the other,
// each when all passes before it in the list have ended; its receives likewise; both beside the passes. Throws Error
// where stages would not send what others receive, or where passes and exchanges would wait for each other in a circle,
// which the message shows.
void require_no_deadlock(const Actions& actions);

// Of a step with flush, what each stage can run before all have ended the step before, so that what all of them sum
// then (a norm) is waited for by nobody: its first `passes`, forward passes all, and the first `receives` of what it
// receives, which are what other stages send in theirs. P - 1 - p passes on stage p, where the order has them: so many
// go by until the last stage ends, which is as much later as its first pass is.
struct Ahead {
  size_t passes = 0, receives = 0;
};
std::vector<Ahead> passes_ahead(const Actions& actions);

// Of the actions of two steps those of `steps`: the second is repeated, as the program of a step is.
Actions repeated(const Actions& two, int steps);

}  // namespace strata::pipeline
