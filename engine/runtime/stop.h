// Asking a run to stop by a signal. No handler runs anywhere: oneDNN computes with its stack pointer inside of buffers
// on the heap, and a signal's frame would overwrite what lies below. The signals are blocked in all threads, and one
// thread that does nothing else takes them. Not for commands that have nothing to finish: signals end those as usual.
#pragma once
#include <atomic>
#include <csignal>
#include <thread>

namespace strata {

// SIGINT, SIGQUIT, SIGTERM; SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU. Schedulers announce the end of a job's time by the last
// three.
sigset_t stop_signals();
// Without those that are ignored as the process starts (nohup). SIGINT and SIGQUIT are among them all the same: shells
// ignore them for what they start in the background.
sigset_t taken_stop_signals();

// Blocks the stop signals in this thread and those that it makes later: to be called before there are any. What comes
// meanwhile waits. Not undone when the run is over, so that a late signal does not turn a saved run into a killed one.
void block_stop_signals();
// Whether one has come since they were blocked and nobody has taken it.
bool stop_signal_waits();
// Gives them their usual meaning again, and ends the process when one has waited.
void unblock_stop_signals();

class StopSignals {
 public:
  // Takes the stop signals until the end of its life; those that are ignored as the process starts (nohup) stay
  // ignored, but SIGINT and SIGQUIT, which shells ignore for what they start in the background. From now on a write to
  // a closed pipe and one beyond a limit on file size are errors of that write and do not end the process.
  // `tells`: says on stderr that the run is stopping.
  explicit StopSignals(bool tells);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;

  // Whether to stop: at the next moment that leaves everything whole. A second SIGINT or SIGQUIT ends the process
  // at once instead, with exit code 128 + its number, as a shell would say it.
  const std::atomic<bool>& asked() const { return asked_; }

  // While it lives the first signal, too, ends the process at once, as does one that has come: for waits that nothing
  // else ends, before there is anything to save.
  class AtOnce {
   public:
    explicit AtOnce(StopSignals& signals);
    ~AtOnce() { signals_.at_once_ = false; }
    AtOnce(const AtOnce&) = delete;

   private:
    StopSignals& signals_;
  };

 private:
  void run();
  void take(int signal);

  bool tells_;
  std::atomic<bool> asked_{false}, at_once_{false};
  std::atomic<int> first_{0};  // the signal that asked
  int keys_ = 0;               // SIGINT and SIGQUIT so far
  int signals_ = -1, wake_ = -1;
  std::thread thread_;
};

}  // namespace strata
