// What optimizers share: one op for each parameter, which updates it and its states in place. An optimizer says what
// its states are and how one tensor is updated; what each such op has beside them is here: the gradient's pending scale
// and what it means when it is NaN, the step's learning rate, weight decay, the streams that round states.
// UpdateStage::append (stages.h) emits the ops.
#pragma once
#include <functional>
#include <string>

#include "strata/layout.h"
#include "strata/stages.h"

namespace strata {

// An update op as its rules see it. Inputs: the parameter, its gradient, the f64 {1} scalars step and learning-rate
// factor, [the gradient's scale] and [the seed], then the states in the optimizer's order, of which some may be left
// out. Outputs, all in place: the parameter, then the states that are there.
class UpdateView : public OpView {
 public:
  enum Input { kParameter, kGradient, kStep, kFactor, kScale, kSeed, kFirstState };
  explicit UpdateView(const OpView& view) : OpView(view) {}
  const Tensor& parameter() const { return input(kParameter); }
  const Tensor& gradient() const { return input(kGradient); }
  int states() const { return inputs() - kFirstState; }  // those left out too
  bool has_state(int i) const { return has_input(kFirstState + i); }
  const Tensor& state(int i) const { return input(kFirstState + i); }
  // State i has that shape and type.
  bool state_is(int i, const Shape& shape, DType dtype) const {
    return has_state(i) && state(i).shape == shape && state(i).dtype == dtype;
  }
};

// What an update reads anew in every step. Plain data with pointers to the op's scalars, so that kernels of a device
// take it by value; the functions are for where those can be read.
struct UpdateScalars {
  const double *step_number, *schedule, *scale, *seed_number;     // the last two may be null
  double learning_rate, weight_decay;                             // as configured
  double own_factor;                                              // the parameter's own, of its learning rate
  STRATA_EVERYWHERE double step() const { return *step_number; }  // from 1
  // Of this step and parameter: by what the learning rate is multiplied, and what it then is.
  STRATA_EVERYWHERE double factor() const { return *schedule * own_factor; }
  STRATA_EVERYWHERE double rate() const { return learning_rate * factor(); }
  STRATA_EVERYWHERE double gradient_scale() const { return scale ? *scale : 1.0; }
  // The step overflowed: an update changes nothing.
  STRATA_EVERYWHERE bool skips() const { return gradient_scale() != gradient_scale(); }
  // For stochastic rounding, where a state asks for it.
  STRATA_EVERYWHERE uint64_t seed() const { return uint64_t(*seed_number); }
  STRATA_EVERYWHERE uint64_t in_step(uint64_t stream) const {
    return stream ^ uint64_t(step()) * 0x9E3779B97F4A7C15ull;
  }
};
// Of any op with the attributes learning_rate and weight_decay whose inputs step, factor, [scale] and, where it has
// more, [seed] begin at `first`.
UpdateScalars update_scalars(const Binding& binding, int first);

// An update op bound to memory: what its kernel is made from, once.
class Update : public UpdateView {
 public:
  explicit Update(const Binding& binding)
      : UpdateView(binding), binding_(binding), scalars_(update_scalars(binding, kStep)) {}
  const UpdateScalars& scalars() const { return scalars_; }
  using UpdateView::gradient;
  using UpdateView::parameter;
  using UpdateView::state;
  template <class T>
  T* parameter() const {
    return binding_.out<T>(0);
  }
  template <class T>
  const T* gradient() const {
    return binding_.in<T>(kGradient);
  }
  // Null for a state left out.
  template <class T>
  T* state(int i) const {
    return has_state(i) ? binding_.out<T>(output_of(i)) : nullptr;
  }
  int64_t count() const { return elements(parameter().shape); }
  // The stream of random numbers that rounds state i, the same wherever it is updated; see UpdateScalars::in_step.
  uint64_t stream(int i) const;
  template <class T = void>
  T* workspace() const {
    return binding_.workspace<T>();
  }
  Threads& threads() const { return binding_.threads(); }
  void* queue() const { return binding_.queue(); }

 private:
  int output_of(int state) const;
  Binding binding_;
  UpdateScalars scalars_;
};

struct UpdateKernel {
  // Runs once. What it returns runs in every step that does not skip its updates, and must not allocate.
  std::function<Launch(const Update&)> bind;
  std::function<int64_t(const UpdateView&, int threads)> workspace{};  // bytes; empty: none
};

// The op kind of an optimizer.
struct UpdateKind {
  std::string name;
  std::string states;  // in words: "m and v of the parameter's shape"
  // Whether the states are what the kernels expect; parameter and scalars are right, and the gradient is of the
  // parameter's shape and type. Empty: all are there, of the parameter's shape and type.
  std::function<bool(const UpdateView&)> fits{};
  bool half_gradients = false;                       // the gradient may have 16 bits beside an f32 parameter
  bool elementwise = false;  // element i of parameter and states follows from element i of all, wherever it is
  double flops = 10;                                 // of one element
  std::function<double(const UpdateView&)> bytes{};  // empty: all are read once, and all but the gradient written
  UpdateKernel cpu;                                  // for f32 parameters
  UpdateKernel reference;                            // for f32 and f64 parameters, no tensor of 16 bits
};
// As register_kind (op_kind.h). Kernels for other backends are registered as any kind's, and ask UpdateScalars::skips
// themselves.
const OpKind& register_update(UpdateKind kind);
// Whether rows may be updated apart: UpdateKind::elementwise of a kind that register_update made.
bool is_elementwise_update(const OpKind& kind);

// One of two by the parameter's type: how a template becomes a kernel of the reference backend.
inline std::function<Launch(const Update&)> by_type(Launch (*f32)(const Update&), Launch (*f64)(const Update&)) {
  return [f32, f64](const Update& update) { return (update.parameter().dtype == DType::f64 ? f64 : f32)(update); };
}

}  // namespace strata
