// The steps of a run for TensorBoard: an event file of scalars beside log.jsonl. The format is TensorFlow's TFRecord
// (each record: its length, a masked CRC-32C of that, its bytes, a masked CRC-32C of these) of Event messages
// (tensorflow/core/util/event.proto).
#pragma once
#include <cstdint>
#include <string>

#include "engine/runtime/log.h"

namespace strata {

class EventFile {
 public:
  // Makes the folder where it is missing, and a file of its own in it. `last_step`: what a resumed run goes on from;
  // TensorBoard drops what files before this one say of later steps. Throws Error (usage) where it cannot.
  EventFile(const std::string& folder, int64_t last_step);
  ~EventFile();
  EventFile(const EventFile&) = delete;
  // One scalar for each finite field but "step", by its name. A full disk loses steps, not the run: says what went
  // wrong with the first that is lost, else nothing.
  std::string write(int64_t step, const StepLog::Fields& fields);
  const std::string& path() const { return path_; }

 private:
  bool append(const std::string& event);
  std::string path_;
  int file_ = -1;
  int64_t end_ = 0, lost_ = 0;  // bytes of whole records; steps
};

}  // namespace strata
