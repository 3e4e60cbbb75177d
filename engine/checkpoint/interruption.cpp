// Signals noted in a flag; see interruption.h.
#include "engine/checkpoint/interruption.h"

#include <csignal>

#include "strata/error.h"

namespace strata {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};
volatile std::sig_atomic_t noted = 0;
struct sigaction before[3];

void note(int) { noted = 1; }

}  // namespace

Interruptible::Interruptible() {
  noted = 0;
  struct sigaction action {};
  action.sa_handler = note;
  action.sa_flags = int(SA_RESETHAND);  // the second one ends the process
  for (int i = 0; i < 3; ++i) {
    sigaction(kSignals[i], nullptr, &before[i]);
    if (before[i].sa_handler != SIG_IGN) sigaction(kSignals[i], &action, nullptr);  // nohup stays nohup
  }
}

Interruptible::~Interruptible() {
  for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &before[i], nullptr);
}

void stop_if_interrupted() {
  if (noted) throw Error("interrupted; nothing was left half-written.", ExitCode::failed);
}

}  // namespace strata
