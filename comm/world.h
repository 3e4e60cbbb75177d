// All ranks of a run, before there is a mesh: who this is, small texts between all, and groups made of any of them.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "strata/communicator.h"
#include "strata/error.h"

namespace strata {

class World {
 public:
  virtual ~World() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual int local_size() const = 0;  // ranks on this host, which share its processors
  virtual int local_rank() const = 0;  // this one's number among them
  // Whether ranks are threads of one process, of which none can be sure what the others hold.
  virtual bool is_one_process() const { return false; }
  // Everybody's text, by rank. All ranks call it, in the same order as everything else here.
  virtual std::vector<std::string> gather(const std::string& mine) = 0;
  // The same for rank 0 alone, which may read them; the others get nothing and do not wait.
  virtual std::vector<std::string> gather_to_zero(const std::string& mine) = 0;
  // Rank 0's text, for all.
  virtual std::string broadcast(const std::string& text) = 0;
  // A group of these ranks, ascending; called by its members alone. `name` is for messages. `rounds_each`: its sums of
  // 16 bits are rounded after each addition, as those of one rank are, and not once.
  virtual std::unique_ptr<Communicator> group(const std::string& name, const std::vector<int>& members,
                                              bool rounds_each = false) = 0;
  // A file without a name of `bytes` zeros, the same for these ranks, which are of this host: memory that they share
  // once each has mapped it. Called by its members alone, as `group` is; the caller closes it. Throws Error (usage)
  // where some of them are on another host.
  virtual int shared_file(const std::string& name, const std::vector<int>& members, int64_t bytes) = 0;
  // For waits that are not this interface's own: throws what ended another rank, if one has.
  virtual void check() const = 0;
  // Called by ranks that waited for too long: those that do not call it within `seconds`.
  virtual std::vector<int> missing(double seconds) = 0;
  // Ends what others are waiting for, with this text and exit code. From any thread.
  virtual void abort(const std::string& why, ExitCode code = ExitCode::failed) = 0;
};

// One rank alone.
std::unique_ptr<World> single_world();

// Runs `body` once a rank, each on a thread of its own, over groups in shared memory. Rethrows the error of the rank
// that failed first.
void run_local(int size, const std::function<void(World&)>& body, double timeout_seconds = 600);

}  // namespace strata
