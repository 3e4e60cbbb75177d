// Emits the exchanges of gradients: what plugins asked for in stage `exchange` (strata/exchange.h) becomes ops, bucket
// by bucket, of each microbatch or once a step. Knows results and forms; what goes over the wire is the forms' matter.
#pragma once
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "strata/stages.h"

namespace strata {

class GradientExchanges {
 public:
  // `scaled`: gradients carry a loss scale until they are unscaled, in stage `gradients`.
  GradientExchanges(ExchangeStage stage, bool scaled) : stage_(std::move(stage)), scaled_(scaled) {}
  ExchangeStage& stage() { return stage_; }
  void turn_of(const std::string& plugin) { stage_.plugin_ = plugin; }
  const std::vector<std::string>& notes() const { return stage_.notes_; }

  // Once all plugins have said what they want: gradients that are left to each rank (ExchangeStage::leave) are not
  // partial over that axis any more. Throws Error where somebody wants what then cannot be.
  void take_left(std::vector<Gradient>& gradients) const;
  // The axis whose ranks train apart; empty: none.
  std::string apart() const { return stage_.left_.empty() ? "" : stage_.left_.begin()->second.axis; }

  // In the program of one microbatch: what is wanted of each. Throws Error where a form cannot be used so.
  void each_microbatch(Program& single, std::vector<Gradient>& gradients);
  // In the program of a step: the rest, but for forms that need finite values where there is a loss scale. From then on
  // the parameter of a gradient that is wanted in shares is this rank's part.
  void once(GradientStage& stage);
  // What was left, when gradients have been unscaled.
  bool has_late() const;
  void late(GradientStage& stage);
  // UpdateStage::sum_over.
  std::vector<TensorId> sum_over(Builder& build, std::string_view axis, const std::vector<Gradient>& gradients,
                                 const std::vector<TensorId>& tensors, int64_t bytes) const;

 private:
  using Wanted = ExchangeStage::Wanted;
  struct Class;
  struct Turn;
  enum class When { each_microbatch, once, late };
  When when(const std::string& parameter, const std::string& axis, const Wanted& wanted) const;
  void emit(Builder& build, std::vector<Gradient>& gradients, When when, GradientStage* stage);
  void exchange_class(Builder& build, std::vector<Gradient>& gradients, const Class& one, When when,
                      GradientStage* stage);
  void require_tree(const std::string& parameter, const std::vector<std::string>& axes) const;
  void require_one_form(const std::string& parameter, const Wanted& wanted) const;
  bool is_shared_over(const Wanted& wanted, std::string_view axis) const;
  // Which form sums the gradient over that axis, or over the first that has ranks of those that it is made of; kFull
  // for the engine's own.
  static constexpr int kFull = -1;
  int form_of(const std::string& parameter, const std::string& axis) const;
  void exchange(Builder& build, std::vector<Gradient>& gradients, const std::vector<size_t>& list,
                const std::string& group, bool shares, int form, GradientStage* stage);
  std::vector<TensorId> made(int form, GradientBucket& bucket) const;
  static std::vector<TensorId> made_by(const ExchangeForm& form, GradientBucket& bucket);

  ExchangeStage stage_;
  bool scaled_;
  std::set<TensorId> scales_;  // that were multiplied in before an exchange
};

}  // namespace strata
