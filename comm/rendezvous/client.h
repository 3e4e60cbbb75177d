// A rank's side of the rendezvous: joins, then a thread that talks with rank 0 while others wait for what it brings.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/rendezvous.h"
#include "comm/rendezvous/connection.h"

namespace strata {

class RendezvousClient {
 public:
  RendezvousClient(const RendezvousOptions& options, std::function<void(const std::string&)> ended);
  ~RendezvousClient() { stop(); }

  std::vector<std::string> collect(const std::string& key, const std::vector<int>& members, const std::string& text,
                                   Answer answer, double seconds);
  std::vector<int> missing(double seconds);
  void fail(const std::string& why) { post(FrameType::failed, why); }
  std::string local_address() const;

 private:
  struct Texts {
    std::vector<std::string> texts;
    std::vector<uint64_t> late;  // members that did not come; empty: all did
  };

  void join();
  void post(FrameType type, const std::string& payload);
  void stop();
  void run();
  void talk();
  void take(std::unique_lock<std::mutex>& lock, const Frame& frame);
  void over(std::unique_lock<std::mutex>& lock, const std::string& why);

  const RendezvousOptions options_;
  std::function<void(const std::string&)> ended_;
  std::unique_ptr<Connection> connection_;
  int wake_ = -1;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, Texts> texts_;
  std::map<uint64_t, std::vector<int>> missing_;
  uint64_t inquiries_ = 0;
  bool welcome_ = false, over_ = false;
  std::optional<ExitCode> cancelled_;
  std::string why_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace strata
