// Ctrl-C in commands that write files: they stop at the next piece, remove what is unfinished and say so. A second
// signal ends the process at once. Training has its own way: it finishes the step and saves.
#pragma once

namespace strata {

// While one lives, SIGINT, SIGTERM and SIGHUP are noted.
class Interruptible {
 public:
  Interruptible();
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
};

// Throws Error (failed) after a noted signal.
void stop_if_interrupted();

}  // namespace strata
