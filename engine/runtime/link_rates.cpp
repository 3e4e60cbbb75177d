// Groups under a stopwatch; see link_rates.h.
#include "engine/runtime/link_rates.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>

#include "base/clock.h"
#include "comm/process_world.h"
#include "strata/json.h"

namespace strata {
namespace {

// Seconds until the last rank is done, when all begin at once.
double seconds_of_all(Communicator& group, const std::function<void()>& exchange) {
  group.barrier();
  const double began = seconds_now();
  exchange();
  double seconds = seconds_now() - began;
  group.all_reduce({{reinterpret_cast<std::byte*>(&seconds), 8}}, DType::f64, Reduction::max);
  return seconds;
}

// Sends texts of one process to another.
void send(int file, const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    const ssize_t sent = write(file, text.data() + at, text.size() - at);
    if (sent <= 0) return;
    at += size_t(sent);
  }
}

std::string receive(int file, double seconds) {
  std::string text;
  const double began = seconds_now();
  for (char buffer[4096];;) {
    const double left = seconds - (seconds_now() - began);
    pollfd ready{file, POLLIN, 0};
    if (left <= 0 || poll(&ready, 1, int(left * 1000) + 1) < 0) return "";
    if (ready.revents == 0) continue;
    const ssize_t count = read(file, buffer, sizeof buffer);
    if (count <= 0) return text;
    text.append(buffer, size_t(count));
  }
}

// A socket of this host that listens at a port of its own; -1: none.
int listen_here(int& port) {
  const int file = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  if (file < 0) return -1;
  if (bind(file, reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(file, 64) != 0 ||
      getsockname(file, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    close(file);
    return -1;
  }
  port = ntohs(address.sin_port);
  return file;
}

void run_rank(int rank, int ranks, const std::string& provider, const std::string& token, int listening, int port,
              int out, double seconds) {
  NetworkOptions network;
  network.provider = provider;
  network.timeout_seconds = seconds;
  RendezvousOptions rendezvous;
  rendezvous.rank = rank, rendezvous.size = ranks, rendezvous.port = port;
  rendezvous.token = token, rendezvous.version = "1";
  rendezvous.listening = rank == 0 ? listening : -1;
  rendezvous.join_seconds = seconds;
  const auto world = process_world(rendezvous, network, ranks);
  std::vector<int> all(static_cast<size_t>(ranks));
  std::iota(all.begin(), all.end(), 0);
  const auto group = world->group("rates", all);
  const Samples samples = measure_link(*group);
  if (rank != 0) return;
  Rates rates;
  rates.links["link"].samples = samples;
  send(out, to_json(rates).dump());
}

}  // namespace

Samples measure_link(Communicator& group) {
  constexpr int64_t kSizes[] = {1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 25};
  constexpr double kLong = 0.1;
  constexpr int64_t kTelling = 1 << 20;  // of less, a slow link's latency is most of the time
  const int ranks = group.size();
  const double handed_on = double(ranks - 1) / ranks;
  Samples samples;
  std::vector<float> data(size_t(kSizes[4] / 4) + size_t(ranks) * 16, 1.f), other(data.size());
  std::array<bool, 3> over{};
  for (int64_t size : kSizes) {
    const int64_t part = size / ranks / 64 * 64 + 64;
    auto* base = reinterpret_cast<std::byte*>(data.data());
    std::vector<Pieces> parts;
    for (int r = 0; r < ranks; ++r) parts.push_back({{base + r * part, part}});
    const Pieces own{{reinterpret_cast<std::byte*>(other.data()), part}};
    const double bytes = double(part * ranks);
    const std::function<void()> exchanges[] = {[&] {
                                                 group.all_reduce({{base, part * ranks}}, DType::f32, Reduction::max);
                                               },  // values stay what they are
                                               [&] { group.reduce_scatter(parts, own, DType::f32, Reduction::max); },
                                               [&] { group.all_gather(parts); }};
    for (int e = 0; e < 3; ++e) {
      if (over[size_t(e)]) continue;
      double best = seconds_of_all(group, exchanges[e]);
      const int tries = best > kLong / 4 ? 1 : 4;
      for (int i = 0; i < tries; ++i) best = std::min(best, seconds_of_all(group, exchanges[e]));
      samples[kMeasuredExchanges[e]].push_back({0, bytes * handed_on * (e == 0 ? 2 : 1), best});
      over[size_t(e)] = best > kLong && size >= kTelling;
    }
  }
  samples["gather_rows"] = samples["all_gather"];
  return samples;
}

std::optional<Samples> measure_link_apart(int ranks, const std::string& provider, double seconds) {
  int port = 0, ends[2];
  const int listening = listen_here(port);
  if (listening < 0) return {};
  if (pipe(ends) != 0) {
    close(listening);
    return {};
  }
  std::random_device random;  // what no other process knows
  std::string token;
  for (int i = 0; i < 4; ++i) token += std::to_string(random()) + ".";
  std::vector<pid_t> children;
  const pid_t parent = getpid();
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    if (child < 0) break;
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(1);
      close(ends[0]);
      try {
        run_rank(rank, ranks, provider, token, listening, port, ends[1], seconds);
      } catch (const std::exception&) {  // the caller says that it assumes
        _exit(1);
      }
      _exit(0);
    }
    children.push_back(child);
  }
  close(listening);
  close(ends[1]);
  const std::string text = int(children.size()) == ranks ? receive(ends[0], seconds) : "";
  close(ends[0]);
  for (pid_t child : children) {
    if (text.empty()) kill(child, SIGKILL);  // not waited for yet: still this child's number
    while (waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  try {
    if (!text.empty()) return rates_from(Json::parse(text, "rates")).links.at("link").samples;
  } catch (const std::exception&) {
  }
  return {};
}

}  // namespace strata
