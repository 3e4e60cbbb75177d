// Runs a planned program over storage, the same list every step. Each stream of the program is a thread that runs its
// ops in order; waits between streams come from the plan. The step path allocates nothing. Steps may overlap: what is
// left of one on other streams than compute goes on behind the beginning of the next.
#pragma once
#include <array>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/planning/agreement.h"
#include "engine/planning/dependencies.h"
#include "engine/planning/memory_plan.h"
#include "engine/planning/stalls.h"
#include "engine/runtime/storage.h"
#include "engine/runtime/watchdog.h"
#include "strata/communicator.h"
#include "strata/op_kind.h"
#include "strata/threads.h"

namespace strata {

// A value the program watches (a loss, a norm) was not finite; the step stopped before any update.
struct NonFinite : Error {
  explicit NonFinite(const std::string& tensor) : Error(tensor + " is not finite.", ExitCode::failed), tensor(tensor) {}
  std::string tensor;
};

// The groups of ranks that a program's exchanges name: by mesh axis.
using Groups = std::map<std::string, std::unique_ptr<Communicator>, std::less<>>;
// The name of the group of two in which coordinate `from` of an axis sends to `to`. Each way has its own, so that no
// communicator is used by two streams at once.
std::string pair_name(std::string_view axis, int from, int to);
// The name of the group that an exchange uses: its axis, or the pair of a send or receive.
std::string group_of(const Op& op, const Groups& groups);
// Whether exchanges are put into a device's queue: groups of axes are then all asynchronous.
bool exchanges_in_queue(const Groups& groups);

// For how long nothing may move in a step, where exchanges wait for other ranks up to `network_timeout` seconds: a
// little longer, because they know which rank did not come.
inline double patience(double network_timeout) { return network_timeout + 15; }

class Executor {
 public:
  using PartHook = std::function<void(StepPart, bool start)>;

  // `program`, `plan`, `storage` and `threads` must outlive the executor. Binds every op to its kernel for `backend`.
  // `host_threads` serve the host stream; `groups` the exchanges, where the program has any. A step in which no stream
  // gets anything done for `patience` seconds ends with an error that says at which op each stands, or, where that
  // wakes nobody, with the process (Watchdog). A step that runs as one graph of the device is not looked into.
  Executor(const Program& program, const MemoryPlan& plan, Storage& storage, const std::string& backend,
           Threads& threads, int host_threads = 1, const Groups* groups = nullptr,
           double patience = strata::patience(600));
  ~Executor();

  // On an asynchronous device (the storage's) this thread puts ops into the device's queues in the order of the
  // program; after the first step a program that never waits for the host becomes one graph, and of others the ops of
  // the compute stream between two waits do. What is watched is looked at when compute is over, and where it is not
  // finite the step runs to its end, so updates have been made by then.
  //
  // Runs one step and returns when every op is done. The hook is called on this thread before the first and after the
  // last op of each part of the step on the compute stream. Rethrows what a kernel threw, with the op's name.
  // `goes_on`: another step of this executor comes next. Where steps overlap it then returns when all is there that the
  // host looks at between steps and all has been read that it writes (awaited_by_host), and the step before is over;
  // what is left goes on until the end of the next step, or drain(). Until then nobody else may look at the storage's
  // tensors (Storage::hold). A step that fails ends when the one before is over.
  void run(const PartHook& hook = {}, bool goes_on = false);
  // Returns when nothing is left of the last step; rethrows what an op threw meanwhile.
  void drain();
  // Whether steps do, on this device: a step that is one graph has nothing left behind it.
  bool overlaps() const;

  // Runs the ops up to the first one that gives a value that is not finite, and names that tensor; empty if none does.
  // Parameters that are already not finite come first. Updates are not run.
  std::string first_non_finite();

  // Runs one step in the order of the program on this thread, with every buffer filled with NaN bytes from its last use
  // on: a read of released memory shows. For tests.
  void run_poisoned();

  void without_graphs() { graphs_ = false; }  // ops are put into the device's queues one by one in every step
  // When each op ran in the last step (two readings of the clock an op), and what compute waited for. On a device both
  // are known only for steps after trace(), and the program is no graph any more from then on. All spans are there when
  // nothing is left of the step; those of the compute stream at once. The stalls of a step that began behind another
  // are those of one among many, with what comes after it left out, also where it is the last.
  const std::vector<Span>& spans() const { return spans_[parity(last_step())]; }
  // The same of the step before, where it went on behind this one's beginning; else empty.
  std::vector<Span> spans_before() const;
  const Stalls& stalls() const { return stalls_; }
  void trace();  // drains, the first time

  void* pointer(TensorId id) const { return pointers_.at(id.value); }
  const Program& program() const { return program_; }
  // What this rank exchanges in a step, for the ranks to compare (planning/agreement.h).
  std::vector<ExchangeStep> exchanges() const;

 private:
  struct Step;  // one bound op
  struct Segment;
  struct Streams;
  void place_tensors();
  const Kernel& kernel_of(const Op& op) const;
  uint64_t* make_faults() const;
  std::vector<void*> inputs_of(int32_t index, size_t parity) const;
  Communicator* group_of(const Op& op) const;
  void hold_scalars();
  bool reads_held(int32_t index) const;
  void bind_op(int32_t index, Threads& compute, uint64_t*& next_fault);
  Launch bind(int32_t index, size_t parity, Threads& compute, uint64_t* fault);
  void put_into_stream(int32_t index);
  std::array<int, 2> make_events(bool timed) const;
  void make_events();
  void start_streams(double patience);
  void run_stream(int stream, int64_t step, const PartHook* hook);
  void begin_step();
  void end_step(bool goes_on);
  void wait_for_awaited();
  void end_threads();
  void end_on_device();
  void end_failed();
  void find_stalls(bool drained);
  int64_t last_step() const;
  int64_t count_before(int stream, int64_t step) const;
  size_t parity(int64_t step) const { return size_t(step % 2); }
  bool is_after_another(int64_t step) const { return after_another_[parity(step)]; }
  bool timed() const { return !spans_[0].empty(); }
  void run_on_device(const PartHook* hook);
  void put_into_queue(int32_t index, Segment* segment);
  Launch with_addends(Launch launch, const OpView& view, const std::vector<void*>& outputs, Threads& threads) const;
  void run_op(int32_t index, int64_t step);
  bool in_queue(Stream stream) const;  // of the device
  bool is_one_graph() const;
  void find_sent();
  void find_segments();
  int event_of(const Wait& wait, int64_t step) const;
  void wait_for_event(int event, int64_t step);
  void wait_for_thread(const Wait& wait);
  void wait_for_queue(const Wait& wait);
  void look_after_groups() const;
  void wait_for_device();
  std::exception_ptr left_on_device() const;
  Waits waits() const;
  void check_progress() const;
  void watch(double patience);
  int64_t progress();
  std::string positions() const;
  VectorClock read_spans(int64_t step);
  double now(int64_t step) const;

  const Program& program_;
  const MemoryPlan& plan_;
  Storage& storage_;
  std::string backend_;
  Device* device_;
  bool graphs_ = true;
  const Groups* groups_;
  bool exchanges_in_queue_;
  std::vector<void*> pointers_;  // by tensor
  // What the host writes before a step and no op changes (tokens, scalars) is copied to the device as the step begins:
  // ops there that read it from the host's memory, every thread anew, would wait for the bus.
  struct Sent {
    TensorId tensor;
    void* to;
  };
  std::vector<Sent> sent_;
  // A number that the host sets before a step, as steps see it whose ops go on behind the beginning of the next: one
  // for each of two steps.
  struct Held {
    const double* from;
    std::array<double, 2> values;
  };
  std::deque<Held> held_;
  std::vector<Held*> held_of_;  // by tensor; none: empty
  std::vector<std::unique_ptr<StorageSlot>> slots_;
  std::vector<Step> steps_;
  std::vector<std::pair<int32_t, int32_t>> part_span_;  // first and last op of each part of the step
  std::unique_ptr<Streams> streams_;
  std::optional<StallFinder> stall_finder_;
  Stalls stalls_;
  std::array<std::vector<Span>, 2> spans_;  // of this step and the one before, by op; empty: nobody asked
  std::array<double, 2> step_began_{};      // … of these
  std::array<double, 2> device_began_{};    // of the device's queue, since the step began
  VectorClock counts_{}, awaited_{};        // ops of each stream; those that the next step waits for
  std::array<bool, 2> after_another_{};     // this step and the one before began before the one before them was over
  bool goes_on_ = false;                    // something is left of the last step
  std::unique_ptr<Watchdog> watchdog_;      // the last, for it looks at the rest
};

}  // namespace strata
