// A thread on signalfd(2); see stop.h.
#include "engine/runtime/stop.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

#include "strata/error.h"
#include "strata/threads.h"

namespace strata {
namespace {

[[noreturn]] void end_at_once(int signal) {
  std::fprintf(stderr, "strata: ended at once by SIG%s; the newest checkpoint is as it was.\n", sigabbrev_np(signal));
  _exit(128 + signal);
}

bool ignored(int signal) {
  struct sigaction action {};
  return sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

[[noreturn]] void refuse(const char* what) {
  throw Error(std::string(what) + ": " + std::strerror(errno) + ".", ExitCode::failed);
}

}  // namespace

sigset_t stop_signals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (int signal : {SIGINT, SIGQUIT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU}) sigaddset(&signals, signal);
  return signals;
}

sigset_t taken_stop_signals() {
  sigset_t taken = stop_signals();
  for (int signal : {SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU})
    if (ignored(signal)) sigdelset(&taken, signal);
  return taken;
}

void block_stop_signals() {
  const sigset_t signals = stop_signals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

bool stop_signal_waits() {
  const sigset_t taken = taken_stop_signals();
  sigset_t waiting;
  sigpending(&waiting);
  for (int signal = 1; signal < SIGRTMIN; ++signal)
    if (sigismember(&taken, signal) == 1 && sigismember(&waiting, signal) == 1) return true;
  return false;
}

void unblock_stop_signals() {
  const sigset_t signals = stop_signals();
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
}

StopSignals::StopSignals(bool tells) : tells_(tells) {
  block_stop_signals();
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  const sigset_t taken = taken_stop_signals();
  signals_ = signalfd(-1, &taken, SFD_CLOEXEC);
  if (signals_ < 0) refuse("cannot take signals (signalfd)");
  wake_ = eventfd(0, EFD_CLOEXEC);
  if (wake_ < 0) {
    close(signals_);
    refuse("cannot take signals (eventfd)");
  }
  try {
    thread_ = start_thread("signals", [this] { run(); });
  } catch (...) {
    close(signals_);
    close(wake_);
    throw;
  }
}

StopSignals::~StopSignals() {
  const uint64_t one = 1;
  (void)!write(wake_, &one, sizeof one);
  thread_.join();
  close(wake_);
  close(signals_);
}

void StopSignals::run() {
  for (;;) {
    pollfd polls[2] = {{signals_, POLLIN, 0}, {wake_, POLLIN, 0}};
    if (poll(polls, 2, -1) < 0) continue;
    if (polls[1].revents) return;
    signalfd_siginfo info;
    if (read(signals_, &info, sizeof info) == sizeof info) take(int(info.ssi_signo));
  }
}

void StopSignals::take(int signal) {
  const bool key = signal == SIGINT || signal == SIGQUIT;
  keys_ += key;
  first_ = signal;
  const bool again = asked_.exchange(true);
  if (at_once_ || (key && keys_ > 1)) end_at_once(signal);
  if (tells_ && !again)
    std::fprintf(stderr, "%sstrata: SIG%s: stops after the step it is in and saves; a second Ctrl-C ends at once.\n",
                 isatty(STDERR_FILENO) ? "\r\033[K" : "", sigabbrev_np(signal));
}

StopSignals::AtOnce::AtOnce(StopSignals& signals) : signals_(signals) {
  signals_.at_once_ = true;
  if (signals_.asked_) end_at_once(signals_.first_);
}

}  // namespace strata
