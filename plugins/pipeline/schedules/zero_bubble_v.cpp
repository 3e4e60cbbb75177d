// ZB-V (Qi et al., arXiv 2401.10241, section 6): two chunks a stage in the shape of a V, the first chunk and the last
// on the first stage, so that a microbatch's backward pass begins where its forward pass ends. Where forward pass,
// input gradient and weight gradient take the same there is no bubble (M >= 2 P - 1), and every stage keeps what 1F1B
// keeps on its first: 2 P chunks' activations, P whole stages'. Steps overlap as in ZB-H2 (zero_bubble_h.cpp).
#include <algorithm>

#include "plugins/pipeline/schedules/schedules.h"

namespace strata::pipeline {
namespace {

// A stage's order, of which passes are taken one after the other in each chunk and part.
class OrderInV {
 public:
  OrderInV(const Problem& problem, int stage)
      : stages_(problem.stages),
        stage_(stage),
        wanted_(problem.microbatches),
        microbatches_(std::max(problem.microbatches, 2 * problem.stages - 1)) {}

  std::vector<Pass> make() {
    begin();
    steady();
    end();
    // Fewer microbatches than fill the pipeline: the same order without the others.
    std::erase_if(order_, [&](const Pass& pass) { return pass.microbatch >= wanted_; });
    return std::move(order_);
  }

 private:
  void forward(int chunk) { order_.push_back(forward_pass(chunk, forwards_[chunk]++)); }
  void input(int chunk) { order_.push_back(input_gradient(chunk, inputs_[chunk]++)); }
  void weight(int chunk) { order_.push_back(weight_gradient(chunk, weights_[chunk]++)); }

  // Until the first microbatch has come down the V and up again.
  void begin() {
    for (int i = 0; i < 2 * (stages_ - stage_) - 1; ++i) forward(0);
    for (int i = 0; i < stage_; ++i) forward(1), forward(0);
    for (int i = 0; i < stages_ - stage_; ++i) forward(1), input(1), weight(1);
  }
  void steady() {
    while (forwards_[1] < forwards_[0] || forwards_[0] < microbatches_) {
      if (forwards_[0] < microbatches_) forward(0);
      input(0), weight(0);
      forward(1), input(1), weight(1);
    }
  }
  // Weight gradients wait here, so that input gradients come to the other stages early.
  void end() {
    for (int i = 0; i < stage_; ++i) input(0), input(1);
    for (int i = 0; i < stages_ - stage_; ++i) input(0), weight(0);
    while (weights_[1] < inputs_[1]) weight(1);
    while (weights_[0] < inputs_[0]) weight(0);
  }

  int stages_, stage_, wanted_, microbatches_;
  int forwards_[2] = {0, 0}, inputs_[2] = {0, 0}, weights_[2] = {0, 0};  // done, by chunk
  std::vector<Pass> order_;
};

}  // namespace

Schedule zero_bubble_v(const Problem& problem) {
  require_chunks(problem, "zero_bubble_v", 2);
  Schedule schedule{.stage_of = zigzag(problem.stages, 2)};
  for (int stage = 0; stage < problem.stages; ++stage) schedule.order.push_back(OrderInV(problem, stage).make());
  return schedule;
}

}  // namespace strata::pipeline
