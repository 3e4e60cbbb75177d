// Where the tensors of a program are in the storage, and its ops bound to kernels, pointers, groups and queues; once,
// before the first step.
#include <algorithm>
#include <cstring>

#include "engine/runtime/executor_parts.h"
#include "strata/device.h"

namespace strata {

std::string pair_name(std::string_view axis, int from, int to) {
  return std::string(axis) + " " + std::to_string(from) + ">" + std::to_string(to);
}

std::string group_of(const Op& op, const Groups& groups) {
  if (!op.attributes.has("axis")) return "";
  const std::string axis = op.attributes.string("axis");
  const auto along = groups.find(axis);
  if ((op.stream != Stream::send && op.stream != Stream::receive) || along == groups.end()) return axis;
  const int size = along->second->size(), own = along->second->rank();
  const int other = int(((own + op.attributes.integer("offset")) % size + size) % size);
  return op.stream == Stream::send ? pair_name(axis, own, other) : pair_name(axis, other, own);
}

bool exchanges_in_queue(const Groups& groups) {
  return std::any_of(groups.begin(), groups.end(), [](const auto& group) { return group.second->asynchronous(); });
}

// With a copy before, where an addend could not share its output's memory.
Launch Executor::with_addends(Launch launch, const OpView& view, const std::vector<void*>& outputs,
                              Threads& threads) const {
  std::vector<std::tuple<void*, const void*, size_t>> copies;
  for (int o = 0; o < view.outputs(); ++o)
    if (view.accumulates(o) && pointers_[view.addend(o).value] != outputs[size_t(o)])
      copies.push_back({outputs[size_t(o)], pointers_[view.addend(o).value], size_t(view.output(o).bytes())});
  if (copies.empty()) return launch;
  if (in_queue(view.op().stream)) {  // by the device's own kernel of `move`, in the op's queue
    static const OpKind& kind = find_kind("move");
    std::vector<Launch> launches;
    for (int o = 0; o < view.outputs(); ++o)
      if (const TensorId addend = view.addend(o); addend && pointers_[addend.value] != outputs[size_t(o)]) {
        const Op copy{.kind = &kind, .inputs = {addend}, .outputs = {view.op().outputs[size_t(o)]}};
        launches.push_back(kind.kernels.find(backend_)->second.bind(
            Binding(OpView(program_, copy), {pointers_[addend.value]}, {outputs[size_t(o)]}, nullptr, threads, nullptr,
                    device_->queue(view.op().stream))));
      }
    return [launches, launch = std::move(launch)] {
      for (const Launch& copy : launches) copy();
      launch();
    };
  }
  return [copies, &threads, launch = std::move(launch)] {
    for (const auto& [to, from, bytes] : copies)
      threads.split(int64_t(bytes), 1 << 16, [&, to = to, from = from](int64_t begin, int64_t end) {
        std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin, size_t(end - begin));
      });
    launch();
  };
}

void Executor::place_tensors() {
  for (size_t t = 0; t < program_.tensors.size(); ++t) {
    const Tensor& tensor = program_.tensors[t];
    if (tensor.persistent) {
      const Tensor& whole = program_[program_.whole({int32_t(t)})];  // parts may be other programs' own
      pointers_[t] = storage_.persistent(whole.name.text());
      STRATA_CHECK(pointers_[t]);
      if (tensor.part_of && whole.home == Tier::nvme) {
        slots_.push_back(storage_.part_slot(tensor, plan_.persistent_offset.at(int32_t(t)) + tensor.part_offset));
        pointers_[t] = slots_.back().get();
      } else if (tensor.part_of) {
        pointers_[t] = static_cast<std::byte*>(pointers_[t]) + tensor.part_offset;
      }
    } else if (device_ && (tensor.role == Role::data || tensor.step_output)) {
      if (tensor.part_of)  // which came before
        pointers_[t] = static_cast<std::byte*>(pointers_[size_t(tensor.part_of.value)]) + tensor.part_offset;
      else
        pointers_[t] = storage_.shared_memory(tensor.bytes());  // the host writes or reads it
    } else if (plan_.buffer_of[t] >= 0) {
      const Buffer& buffer = plan_.buffers[size_t(plan_.buffer_of[t])];
      if (buffer.tier == Tier::nvme) {
        slots_.push_back(storage_.transient_slot(tensor, buffer.offset));
        pointers_[t] = slots_.back().get();
      } else {
        pointers_[t] = storage_.transient(buffer.tier) + buffer.offset + tensor.part_offset;
      }
    }
  }
}

const Kernel& Executor::kernel_of(const Op& op) const {
  const auto kernel = op.kind->kernels.find(backend_of(op, backend_));
  STRATA_CHECK(kernel != op.kind->kernels.end());
  return kernel->second;
}

// Places for what kernels that cannot throw leave, one for each of them; null when there are none.
uint64_t* Executor::make_faults() const {
  const auto may_fault = [&](const Op& op) { return in_queue(op.stream) && kernel_of(op).fault; };
  const int64_t faults = std::count_if(program_.ops.begin(), program_.ops.end(), may_fault);
  return faults > 0 ? reinterpret_cast<uint64_t*>(storage_.shared_memory(faults * 8)) : nullptr;
}

std::vector<void*> Executor::inputs_of(int32_t index, size_t parity) const {
  const Op& op = program_.ops[size_t(index)];
  std::vector<void*> inputs;
  for (TensorId id : op.inputs) inputs.push_back(id ? pointers_[size_t(id.value)] : nullptr);
  for (const Sent& sent : sent_)
    for (size_t k = 0; k < inputs.size() && in_queue(op.stream); ++k)
      if (op.inputs[k] == sent.tensor) inputs[k] = sent.to;
  if (reads_held(index))
    for (size_t k = 0; k < inputs.size(); ++k)
      if (Held* const held = op.inputs[k] ? held_of_[size_t(op.inputs[k].value)] : nullptr)
        inputs[k] = &held->values[parity];
  return inputs;
}

// What the host sets before a step is read in its place by ops that are over when it sets the next step's.
void Executor::hold_scalars() {
  if (awaited_ == counts_) return;
  held_of_.assign(program_.tensors.size(), nullptr);
  const std::vector<bool> is_set = set_by_host(program_);
  for (size_t t = 0; t < is_set.size(); ++t)
    if (is_set[t]) held_of_[t] = &held_.emplace_back(Held{static_cast<const double*>(pointers_[t]), {}});
}

bool Executor::reads_held(int32_t index) const {
  const Op& op = program_.ops[size_t(index)];
  return !held_of_.empty() && steps_[size_t(index)].position >= awaited_[size_t(op.stream)] &&
         std::any_of(op.inputs.begin(), op.inputs.end(), [&](TensorId id) { return id && held_of_[size_t(id.value)]; });
}

// Null where there is none: a kernel that asks for it says so.
Communicator* Executor::group_of(const Op& op) const {
  if (!is_exchange(op.stream) || !groups_) return nullptr;
  const auto found = groups_->find(strata::group_of(op, *groups_));
  return found == groups_->end() ? nullptr : found->second.get();
}

void Executor::bind_op(int32_t index, Threads& compute, uint64_t*& next_fault) {
  Step& step = steps_[size_t(index)];
  if (in_queue(step.stream) && kernel_of(program_.ops[size_t(index)]).fault) step.fault = next_fault++;
  step.launch = bind(index, 0, compute, const_cast<uint64_t*>(step.fault));
  if (reads_held(index)) step.odd = bind(index, 1, compute, nullptr);
}

Launch Executor::bind(int32_t index, size_t parity, Threads& compute, uint64_t* fault) {
  const Op& op = program_.ops[size_t(index)];
  const OpView view(program_, op);
  std::vector<void*> outputs;
  for (TensorId id : op.outputs) outputs.push_back(pointers_[size_t(id.value)]);
  const Kernel& kernel = kernel_of(op);
  Threads& threads = op.stream == Stream::compute ? compute
                     : op.stream == Stream::host  ? *streams_->host
                                                  : streams_->alone;
  const int32_t w = plan_.workspace_of[size_t(index)];
  std::byte* const workspace =
      w < 0 ? nullptr : storage_.transient(plan_.buffers[size_t(w)].tier) + plan_.buffers[size_t(w)].offset;
  if (kernel.workspace)
    STRATA_CHECK(kernel.workspace(view, threads.count()) <= (w < 0 ? 0 : plan_.buffers[size_t(w)].bytes));
  void* const queue = !device_ ? nullptr : in_queue(op.stream) ? device_->queue(op.stream) : device_->queue();
  try {
    Launch launch = with_addends(
        kernel.bind(Binding(view, inputs_of(index, parity), outputs, workspace, threads, group_of(op), queue, fault)),
        view, outputs, threads);
    if (op.purpose != Purpose::again) return launch;
    const double* const again = static_cast<const double*>(pointers_[size_t(program_.again_if.value)]);
    return [again, launch = std::move(launch)] {
      if (*again != 0) launch();
    };
  } catch (const Error& error) {
    throw Error("op " + std::to_string(index) + " (" + op.kind->name + "): " + error.what(), error.code());
  }
}

}  // namespace strata
