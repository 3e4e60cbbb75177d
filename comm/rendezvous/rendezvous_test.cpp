// The rendezvous under attack: strangers of every kind, ranks that are stopped, killed or slow, jobs that meet at one
// port. Everybody ends in time, says who was to blame, and a job that nobody disturbs from within is not disturbed.
#include "comm/rendezvous.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <numeric>
#include <random>
#include <thread>

#include "comm/rendezvous/client.h"
#include "comm/rendezvous/connection.h"
#include "comm/rendezvous/proof.h"
#include "comm/rendezvous/server.h"

namespace strata::rendezvous_test {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// A socket of this host at a port that is free; `listens`: one that others can connect to.
int own_socket(int& port, bool listens) {
  const int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  EXPECT_EQ(bind(s, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(listens ? listen(s, 1024) : 0, 0);
  EXPECT_EQ(getsockname(s, reinterpret_cast<sockaddr*>(&address), &length), 0);
  port = ntohs(address.sin_port);
  return s;
}

int connected(int port) {
  const int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(uint16_t(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(s, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return s;
  close(s);
  return -1;
}

// Until the other side closes; what it sent, at most some KiB of it.
std::string all_that_comes(int s) {
  std::string all;
  char buffer[4096];
  for (ssize_t n; (n = recv(s, buffer, sizeof buffer, 0)) > 0;)
    if (all.size() < 65536) all.append(buffer, size_t(n));
  return all;
}

// A job: where rank 0 listens and what its ranks know.
struct Job {
  int port = 0, listening = own_socket(port, true), size;
  explicit Job(int size) : size(size) {}
  RendezvousOptions options(int rank) const {
    return {.rank = rank,
            .size = size,
            .port = port,
            .token = "job",
            .secret = "only we know",
            .version = "1",
            .listening = rank == 0 ? listening : -1,
            .join_seconds = 60,
            .silence_seconds = 20};
  }
};

std::vector<int> everybody(int size) {
  std::vector<int> list(static_cast<size_t>(size));
  std::iota(list.begin(), list.end(), 0);
  return list;
}

std::vector<std::string> all_of(Rendezvous& meeting, const std::string& key, int size, const std::string& text) {
  return meeting.collect(key, everybody(size), text, Answer::all, 60);
}

// The outcome of a rank on a thread of its own: what it throws.
std::string outcome(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// Runs every rank of a job on a thread; what each of them throws.
std::vector<std::string> run_threads(const Job& job, const std::function<void(Rendezvous&, int)>& body) {
  std::vector<std::string> outcomes(size_t(job.size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < job.size; ++rank)
    threads.emplace_back([&, rank] {
      outcomes[size_t(rank)] = outcome([&] {
        Rendezvous meeting(job.options(rank), [](const std::string&) {});
        body(meeting, rank);
      });
    });
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

TEST(Frames, ComeWholeFromAnyPieces) {
  std::mt19937 random(1);
  for (int repeat = 0; repeat < 200; ++repeat) {
    std::string bytes;
    std::vector<std::string> payloads;
    for (int i = 0; i < 5; ++i) {
      payloads.push_back(std::string(random() % 3 ? random() % 3000 : 0, char('a' + i)));
      bytes += *pack(FrameType(1 + random() % kFrameTypes), payloads.back());
    }
    FrameReader reader;
    std::vector<std::string> got;
    for (size_t at = 0; at < bytes.size();) {
      const size_t piece = 1 + random() % (random() % 2 ? 7 : 5000);
      ASSERT_TRUE(reader.add(std::string_view(bytes).substr(at, piece)));
      at += piece;
      for (Frame frame; reader.next(frame);) got.push_back(frame.payload);
    }
    EXPECT_EQ(got, payloads);
  }
}

TEST(Frames, WhatIsNoneIsRefused) {
  Frame frame;
  for (const std::string& bytes :
       {std::string("GET / HTTP/1.1\r\nHost: here\r\n\r\n"), std::string(64, 0), std::string(64, '\xff'),
        *pack(FrameType(0)), *pack(FrameType(kFrameTypes + 1)), *pack(FrameType::hello, std::string(4097, 'x'))}) {
    FrameReader reader;
    EXPECT_FALSE(reader.add(bytes));
    EXPECT_FALSE(reader.add("more"));
    EXPECT_FALSE(reader.next(frame));
  }
}

TEST(Frames, FieldsThatAreMissingOrTooLongAreNoticed) {
  const std::string payload = FieldWriter().number(7).text("word").payload();
  FieldReader right(payload);
  EXPECT_EQ(right.number(), 7u);
  EXPECT_EQ(right.text(), "word");
  EXPECT_TRUE(right.complete());
  for (size_t bytes = 0; bytes < payload.size(); ++bytes) {
    FieldReader cut(std::string_view(payload).substr(0, bytes));
    cut.number();
    cut.text();
    EXPECT_FALSE(cut.complete()) << bytes;
  }
  FieldReader early(payload);
  early.number();
  EXPECT_FALSE(early.complete());
}

TEST(Proof, HoldsForOneSecretOneSideAndOneClaim) {
  const Claim claim{
      .rank_nonce = make_nonce(), .zero_nonce = make_nonce(), .rank = 1, .size = 2, .version = "1", .job = "j"};
  const std::string proof = prove("secret", Side::rank, claim);
  EXPECT_TRUE(proves("secret", Side::rank, claim, proof));
  EXPECT_FALSE(proves("secret", Side::zero, claim, proof));
  EXPECT_FALSE(proves("secre", Side::rank, claim, proof));
  EXPECT_FALSE(proves("secret", Side::rank, claim, proof.substr(0, 31)));
  EXPECT_FALSE(proves("secret", Side::rank, claim, ""));
  std::vector<Claim> others(6, claim);
  others[0].rank_nonce = make_nonce();
  others[1].zero_nonce = make_nonce();
  others[2].rank = 0;
  others[3].size = 3;
  others[4].version = "1j", others[4].job = "";
  others[5].job = "k";
  for (const Claim& other : others) EXPECT_FALSE(proves("secret", Side::rank, other, proof));
}

// Rank 0's answers, round after round, with and without waiting.
TEST(Rendezvous, CollectsTexts) {
  const Job job(5);
  const auto outcomes = run_threads(job, [&](Rendezvous& meeting, int rank) {
    for (int i = 0; i < 20; ++i) {
      const std::string number = std::to_string(i);
      const auto all = all_of(meeting, "all " + number, 5, number + " of " + std::to_string(rank));
      ASSERT_EQ(all.size(), 5u);
      for (int r = 0; r < 5; ++r) EXPECT_EQ(all[size_t(r)], number + " of " + std::to_string(r));
      const auto first = meeting.collect("first " + number, everybody(5), rank == 0 ? number : "",
                                         rank == 0 ? Answer::none : Answer::first, 0);
      EXPECT_EQ(first, rank == 0 ? std::vector<std::string>{} : std::vector<std::string>{number});
      const auto some = meeting.collect("zero " + number, everybody(5), std::to_string(rank),
                                        rank == 0 ? Answer::all : Answer::none, 0);
      EXPECT_EQ(some.size(), rank == 0 ? 5u : 0u);
      if (rank % 2 == 1) {
        const auto odd = meeting.collect("odd " + number, {1, 3}, std::to_string(rank), Answer::all, 60);
        EXPECT_EQ(odd, (std::vector<std::string>{"1", "3"}));
      }
    }
    EXPECT_EQ(meeting.missing(60), std::vector<int>{});
  });
  for (const std::string& text : outcomes) EXPECT_EQ(text, "");
}

// Longer than a frame could be before, and than a socket takes at once.
TEST(Rendezvous, TextsAreOfAnySize) {
  const size_t large = kSanitized ? size_t(3) << 20 : size_t(260) << 20;
  const Job job(2);
  const auto outcomes = run_threads(job, [&](Rendezvous& meeting, int rank) {
    const auto all = meeting.collect("large", everybody(2), rank == 1 ? std::string(large, 'x') : "",
                                     rank == 0 ? Answer::all : Answer::none, 0);
    EXPECT_TRUE(rank == 1 || (all[0].empty() && all[1] == std::string(large, 'x')));
    all_of(meeting, "end", 2, "");
  });
  for (const std::string& text : outcomes) EXPECT_EQ(text, "");
}

TEST(Rendezvous, WhoDoesNotComeInTimeIsNamed) {
  const Job job(3);
  std::atomic<int> told = 0;
  const auto outcomes = run_threads(job, [&](Rendezvous& meeting, int rank) {
    if (rank != 1) {
      // The other of the two may be slower than that, on a busy machine.
      const std::vector<int> missing = meeting.missing(0.2);
      EXPECT_EQ(std::count(missing.begin(), missing.end(), 1), 1);
      EXPECT_EQ(std::count(missing.begin(), missing.end(), rank), 0);
      const std::string text = outcome([&] { meeting.collect("k", everybody(3), "", Answer::all, 0.2); });
      EXPECT_TRUE(text.find("(k): rank 1 did not come within") != std::string::npos ||
                  text.find("(k): ranks 0, 1 did not come within") != std::string::npos ||
                  text.find("(k): ranks 1, 2 did not come within") != std::string::npos)
          << text;
      ++told;
    }
    while (told < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  for (const std::string& text : outcomes) EXPECT_EQ(text, "");
}

// Without a limit of time, a rank that has left is not waited for.
TEST(Rendezvous, WhoHasLeftIsNotWaitedFor) {
  for (const bool first_waits : {false, true}) {
    const Job job(3);
    std::atomic<int> waiting = 0;
    const auto outcomes = run_threads(job, [&](Rendezvous& meeting, int rank) {
      if (rank == 2) {
        while (first_waits && waiting < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return;
      }
      ++waiting;
      meeting.collect("k", everybody(3), "", Answer::all, 0);
    });
    EXPECT_EQ(outcomes[2], "");
    for (int rank : {0, 1}) EXPECT_EQ(outcomes[size_t(rank)], "rank 2 has ended while others wait for it.");
  }
}

// ---- strangers on rank 0's port ----

// Sends until the other side has had enough of it; how many bytes went out.
int64_t send_for_ever(int s, const std::string& bytes, int64_t most) {
  int64_t sent = 0;
  while (sent < most) {
    pollfd one{s, POLLOUT, 0};
    if (poll(&one, 1, 30'000) <= 0) break;
    const ssize_t n = send(s, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno != EAGAIN) break;
    sent += std::max<ssize_t>(0, n);
  }
  return sent;
}

std::string hello(int rank, const std::string& nonce = make_nonce()) {
  return *pack(FrameType::hello, FieldWriter().text(kProtocol).number(uint64_t(rank)).text(nonce).payload());
}

// Every kind of stranger, for as long as rank 1 is not there; then the job goes on as if there had been none.
TEST(Strangers, CostLittleAndDelayNothing) {
  const Job job(2);
  std::thread zero([&] {
    EXPECT_EQ(outcome([&] {
                Rendezvous meeting(job.options(0), [](const std::string&) {});
                EXPECT_EQ(all_of(meeting, "k", 2, "zero")[1], "one");
              }),
              "");
  });
  constexpr int64_t kMost = 64 << 20;
  std::string endless = *pack(FrameType::hello, std::string(4000, 'x'));
  std::string longer = endless;
  longer[8] = longer[9] = longer[10] = longer[11] = '\x7f';  // its length
  for (const std::string& bytes : {std::string(1 << 20, 'x'), endless, longer, *pack(FrameType::alive),
                                   hello(1) + *pack(FrameType::collect, std::string(4000, 'x')), hello(1) + hello(1),
                                   std::string("GET / HTTP/1.0\r\n\r\n"), *pack(FrameType::failed, "a lie")}) {
    const int s = connected(job.port);
    EXPECT_LT(send_for_ever(s, bytes, kMost), kMost);
    close(s);
  }
  // Words that a stranger may get are no more than these.
  const int curious = connected(job.port);
  const std::string question =
      hello(1) + *pack(FrameType::proof, FieldWriter().text(std::string(32, 'p')).number(2).text("1").payload());
  EXPECT_EQ(send(curious, question.data(), question.size(), MSG_NOSIGNAL), ssize_t(question.size()));
  const std::string words = all_that_comes(curious);
  close(curious);
  FrameReader reader;
  EXPECT_TRUE(reader.add(words));
  Frame frame;
  ASSERT_TRUE(reader.next(frame));
  EXPECT_EQ(frame.type, FrameType::challenge);
  ASSERT_TRUE(reader.next(frame));
  EXPECT_EQ(frame.type, FrameType::refused);
  EXPECT_FALSE(reader.next(frame));
  // Silent ones, half-open ones, ones that send a byte and wait; and far more than rank 0 keeps.
  std::vector<int> silent;
  for (int i = 0; i < (kSanitized ? 300 : 600); ++i) {
    silent.push_back(connected(job.port));
    if (silent.back() < 0) break;
    if (i % 3 == 1) shutdown(silent.back(), SHUT_WR);
    if (i % 3 == 2) (void)!send(silent.back(), "S", 1, MSG_NOSIGNAL);
  }
  EXPECT_EQ(outcome([&] {
              Rendezvous meeting(job.options(1), [](const std::string&) {});
              EXPECT_EQ(all_of(meeting, "k", 2, "one")[0], "zero");
            }),
            "");
  zero.join();
  for (int s : silent) close(s);
}

// Whether rank 0 closes a connection while nobody says anything.
bool is_closed(int s) {
  pollfd one{s, POLLIN, 0};
  char byte;
  return poll(&one, 1, 60'000) == 1 && recv(s, &byte, 1, 0) <= 0;
}

TEST(Strangers, HaveSomeTimeToIntroduceThemselves) {
  const Job job(2);
  std::thread zero([&] {
    EXPECT_EQ(outcome([&] {
                RendezvousOptions options = job.options(0);
                options.join_seconds = 300, options.introduction_seconds = 0.2;
                Rendezvous meeting(options, [](const std::string&) {});
                all_of(meeting, "k", 2, "");
              }),
              "");
  });
  const std::string begun = hello(1);
  for (const std::string& bytes : {std::string(), begun.substr(0, 3), begun}) {
    const int s = connected(job.port);
    EXPECT_EQ(send(s, bytes.data(), bytes.size(), MSG_NOSIGNAL), ssize_t(bytes.size()));
    if (bytes == begun) {  // the challenge, which is not answered
      char words[4096];
      (void)!recv(s, words, sizeof words, 0);
    }
    EXPECT_TRUE(is_closed(s)) << bytes.size();
    close(s);
  }
  EXPECT_EQ(outcome([&] {
              Rendezvous meeting(job.options(1), [](const std::string&) {});
              all_of(meeting, "k", 2, "");
            }),
            "");
  zero.join();
}

TEST(Strangers, AreSoManyAtATime) {
  const Job job(2);
  std::thread zero([&] {
    EXPECT_EQ(outcome([&] {
                RendezvousOptions options = job.options(0);
                options.join_seconds = 300, options.introduction_seconds = 300;
                Rendezvous meeting(options, [](const std::string&) {});
                all_of(meeting, "k", 2, "");
              }),
              "");
  });
  constexpr size_t kMost = 256 + 2;  // and one for each rank
  std::vector<int> silent;
  for (size_t i = 0; i < kMost + 50; ++i) silent.push_back(connected(job.port));
  for (size_t i = 0; i < 50; ++i) EXPECT_TRUE(is_closed(silent[i])) << i;  // the oldest make room
  EXPECT_EQ(outcome([&] {
              Rendezvous meeting(job.options(1), [](const std::string&) {});
              all_of(meeting, "k", 2, "");
            }),
            "");
  zero.join();
  for (int s : silent) close(s);
}

TEST(Strangers, AreToldWhyTheyAreRefused) {
  const Job job(2);
  const auto refused = [&](const std::function<void(RendezvousOptions&)>& change) {
    return outcome([&] {
      RendezvousOptions options = job.options(1);
      change(options);
      Rendezvous meeting(options, [](const std::string&) {});
    });
  };
  std::thread zero([&] {
    EXPECT_EQ(outcome([&] {
                Rendezvous meeting(job.options(0), [](const std::string&) {});
                all_of(meeting, "k", 2, "");
              }),
              "");
  });
  EXPECT_NE(refused([](RendezvousOptions& o) { o.secret = "guessed"; }).find("knows another secret"),
            std::string::npos);
  EXPECT_NE(refused([](RendezvousOptions& o) { o.token = "another job"; }).find("belongs to another job"),
            std::string::npos);
  EXPECT_NE(refused([](RendezvousOptions& o) { o.secret = ""; }).find("belongs to another job"), std::string::npos);
  {
    Rendezvous one(job.options(1), [](const std::string&) {});
    EXPECT_NE(refused([](RendezvousOptions&) {}).find("two processes say that they are rank 1"), std::string::npos);
    EXPECT_EQ(outcome([&] { all_of(one, "k", 2, ""); }), "");
  }
  zero.join();
}

// ---- strangers where rank 0 should be ----

TEST(Strangers, WhereRank0ShouldBe) {
  const auto meets = [](const std::function<void(int listening)>& stranger, double seconds = 1) {
    Job job(2);
    std::thread thread([&] { stranger(job.listening); });
    RendezvousOptions options = job.options(1);
    options.join_seconds = seconds;
    const std::string text = outcome([&] { Rendezvous meeting(options, [](const std::string&) {}); });
    shutdown(job.listening, SHUT_RDWR);
    thread.join();
    close(job.listening);
    return text;
  };
  const auto answers = [](const std::string& words) {
    return [words](int listening) {
      for (int s; (s = accept(listening, nullptr, nullptr)) >= 0; close(s)) {
        send(s, words.data(), words.size(), MSG_NOSIGNAL);
        all_that_comes(s);
      }
    };
  };
  EXPECT_NE(meets([](int) {}).find("does not answer as rank 0 of this job"), std::string::npos);
  // Whether its time is over while it waits for an answer, or while it tries again, is a matter of speed.
  const auto not_there = [](const std::string& text) {
    return text.find("cannot reach rank 0") != std::string::npos ||
           text.find("does not answer as rank 0") != std::string::npos;
  };
  EXPECT_TRUE(not_there(meets([](int listening) {
    for (int s; (s = accept(listening, nullptr, nullptr)) >= 0;) close(s);
  })));
  EXPECT_TRUE(not_there(meets(answers("HTTP/1.0 400 Bad Request\r\n\r\n"))));
  const std::string challenge = *pack(FrameType::challenge, FieldWriter().text(make_nonce()).payload());
  EXPECT_NE(meets(answers(challenge)).find("does not answer as rank 0"), std::string::npos);
  for (const std::string& words :
       {challenge + *pack(FrameType::accepted, FieldWriter().text(std::string(32, 'p')).payload()),
        challenge + *pack(FrameType::accepted), *pack(FrameType::accepted), *pack(FrameType::welcome),
        challenge + *pack(FrameType::cancelled, FieldWriter().number(2).text("a lie").payload()),
        *pack(FrameType::challenge), *pack(FrameType::refused, FieldWriter().number(77).payload())})
    EXPECT_NE(meets(answers(words), 60).find("does not prove that it is rank 0"), std::string::npos);
  // One that sends back what it gets proves nothing.
  const auto echo = [](int listening) {
    for (int s; (s = accept(listening, nullptr, nullptr)) >= 0; close(s)) {
      char buffer[4096];
      for (ssize_t n; (n = recv(s, buffer, sizeof buffer, 0)) > 0;) send(s, buffer, size_t(n), MSG_NOSIGNAL);
    }
  };
  EXPECT_NE(meets(echo, 60).find("does not prove that it is rank 0"), std::string::npos);
}

// ---- processes ----

struct Ended {
  int code = -1;  // or -signal
  std::string text;
};

// One process a rank. `meanwhile` may hit them.
std::vector<Ended> run_processes(const Job& job, const std::function<void(RendezvousOptions, std::string&)>& body,
                                 const std::function<void(const std::vector<pid_t>&)>& meanwhile) {
  std::vector<pid_t> pids;
  std::vector<int> ends;
  for (int rank = 0; rank < job.size; ++rank) {
    int pipes[2];
    EXPECT_EQ(pipe(pipes), 0);
    const pid_t pid = fork();
    if (pid == 0) {
      for (int end : ends) close(end);
      if (rank != 0) close(job.listening);
      std::string text;
      int code = 0;
      try {
        body(job.options(rank), text);
      } catch (const Error& error) {
        code = int(error.code());
        text = error.what();
      }
      (void)!write(pipes[1], text.data(), text.size());
      _exit(code);
    }
    close(pipes[1]);
    pids.push_back(pid);
    ends.push_back(pipes[0]);
  }
  close(job.listening);
  meanwhile(pids);
  std::vector<Ended> ended;
  for (size_t i = 0; i < pids.size(); ++i) {
    int status = 0;
    waitpid(pids[i], &status, 0);
    Ended one{.code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), .text = ""};
    char buffer[4096];
    for (ssize_t n; (n = read(ends[i], buffer, sizeof buffer)) > 0;) one.text.append(buffer, size_t(n));
    close(ends[i]);
    ended.push_back(one);
  }
  return ended;
}

// Stopped before it has taken anybody, and after some have come: the others end, and say that it is rank 0.
TEST(RanksUnderAttack, DoNotWaitForAStoppedRank0) {
  for (const bool some_came : {false, true}) {
    Job job(3);
    const auto ended = run_processes(
        job,
        [&](RendezvousOptions options, std::string&) {
          options.join_seconds = some_came ? (options.rank == 0 ? 120 : 10) : 2;
          options.silence_seconds = 5;
          if (options.rank == 0 && !some_came) raise(SIGSTOP);
          if (options.rank == 2 && some_came) std::this_thread::sleep_for(std::chrono::minutes(5));  // never comes
          Rendezvous meeting(options, [](const std::string&) {});
        },
        [&](const std::vector<pid_t>& pids) {
          int status;
          if (!some_came) {
            waitpid(pids[0], &status, WUNTRACED);
          } else {  // by then rank 1 has come, or is about to: it ends either way
            std::this_thread::sleep_for(std::chrono::seconds(1));
            kill(pids[0], SIGSTOP);
            kill(pids[2], SIGKILL);
          }
          for (int rank : {1, 2}) {
            siginfo_t info;
            waitid(P_PID, id_t(pids[size_t(rank)]), &info, WEXITED | WNOWAIT);
          }
          kill(pids[0], SIGKILL);
        });
    EXPECT_EQ(ended[0].code, -SIGKILL);
    const std::string& text = ended[1].text;
    EXPECT_TRUE(text.find("does not answer as rank 0 of this job") != std::string::npos ||
                (some_came && text.find("rank 0 is gone") != std::string::npos))
        << text;
  }
}

TEST(RanksUnderAttack, TooFewOpenFilesAreAMessage) {
  Job job(300);
  const auto with_limit = [&](rlim_t files) {
    const pid_t pid = fork();
    if (pid == 0) {
      const rlimit limit{files, files};
      setrlimit(RLIMIT_NOFILE, &limit);
      const std::string text = outcome([&] {
        RendezvousOptions options = job.options(0);
        options.join_seconds = 0.1;
        Rendezvous meeting(options, [](const std::string&) {});
      });
      _exit(text.find("needs ") != std::string::npos && text.find("ulimit -n") != std::string::npos ? 1 : 2);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    return WEXITSTATUS(status);
  };
  EXPECT_EQ(with_limit(200), 1);
  EXPECT_EQ(with_limit(1000), 2);
}

// Random schedules: ranks that come late, are stopped, killed, fail or leave, and strangers meanwhile. STRATA_ATTACKS
// sets their number; the seed of each is in what is printed.
TEST(RanksUnderAttack, EndUnderAnySchedule) {
  const char* const wanted = std::getenv("STRATA_ATTACKS");
  const int cases = wanted ? std::atoi(wanted) : kSanitized ? 4 : 12;
  for (int seed = 1; seed <= cases; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(static_cast<unsigned>(seed));
    const int size = 2 + int(random() % 5), victim = int(random() % size_t(size));
    enum Fate { none, killed, stopped, paused, fails, leaves, late, fates };
    const Fate fate = Fate(random() % fates);
    const int delay = int(random() % 400), rounds = 1 + int(random() % 40);
    std::vector<int> waits;
    for (int r = 0; r < size; ++r) waits.push_back(int(random() % 200));
    const unsigned strangers = unsigned(random());
    Job job(size);
    std::atomic<bool> over = false;
    std::thread noise;
    const auto ended = run_processes(
        job,
        [&](RendezvousOptions options, std::string&) {
          // What is waited for to its end is short; the rest leaves time to a busy machine.
          options.join_seconds = fate == killed || fate == stopped ? 15 : 60;
          options.silence_seconds = fate == stopped ? 5 : 20;
          usleep(useconds_t(waits[size_t(options.rank)]) * 1000);
          if (fate == late && options.rank == victim) sleep(1);
          Rendezvous meeting(options, [](const std::string&) {});
          try {
            for (int i = 0; i < rounds || fate == killed || fate == stopped; ++i) {
              if (fate == fails && options.rank == victim && i == rounds / 2) throw Error("own fault.");
              if (fate == leaves && options.rank == victim && i == rounds / 2) return;
              const auto all = meeting.collect(std::to_string(i), everybody(size), std::to_string(options.rank),
                                               Answer::all, i % 2 ? 0 : 60);
              for (int r = 0; r < size; ++r)
                if (all[size_t(r)] != std::to_string(r)) throw Error("mixed up");
              usleep(5000);
            }
          } catch (const Error& error) {
            meeting.fail(error.what());
            throw;
          }
        },
        [&](const std::vector<pid_t>& pids) {
          noise = std::thread([&] {
            std::mt19937 own(strangers);
            std::vector<int> sockets;
            while (!over && own() % 200 != 0) {
              const int s = connected(job.port);
              if (s < 0) break;
              sockets.push_back(s);
              std::string words(own() % 2000, char(own()));
              if (own() % 2) words = hello(int(own() % 8)) + (own() % 2 ? words : *pack(FrameType::proof, words));
              (void)!send(s, words.data(), words.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
              if (own() % 2) shutdown(s, int(own() % 3));
              if (own() % 3 == 0) close(s), sockets.pop_back();
              usleep(own() % 10000);
            }
            for (int s : sockets) close(s);
          });
          usleep(useconds_t(delay) * 1000);
          const pid_t hit = pids[size_t(victim)];
          if (fate == killed) kill(hit, SIGKILL);
          if (fate == stopped) kill(hit, SIGSTOP);
          if (fate == paused) {
            kill(hit, SIGSTOP);
            usleep(300'000);
            kill(hit, SIGCONT);
          }
          for (size_t r = 0; r < pids.size(); ++r)
            if (int(r) != victim) {
              siginfo_t info;
              waitid(P_PID, id_t(pids[r]), &info, WEXITED | WNOWAIT);
            }
          if (fate == stopped) kill(hit, SIGKILL);
        });
    over = true;
    noise.join();
    for (int r = 0; r < size; ++r) {
      const Ended& one = ended[size_t(r)];
      const std::string name = "rank " + std::to_string(victim);
      if (fate == none || fate == paused || fate == late) {
        EXPECT_EQ(one.code, 0) << r << " fate " << fate << ": " << one.text;
      } else if (r == victim && (fate == killed || fate == stopped)) {
        EXPECT_EQ(one.code, -SIGKILL);
      } else if (r == victim && fate == leaves) {
        EXPECT_EQ(one.code, 0) << one.text;
      } else {
        EXPECT_TRUE(one.code == 1 || one.code == 2) << r << " fate " << fate << " code " << one.code;
        EXPECT_TRUE(one.text.find(name) != std::string::npos || one.text.find("own fault") != std::string::npos ||
                    (victim == 0 && one.text.find("rank 0") != std::string::npos))
            << r << " fate " << fate << ": " << one.text;
      }
    }
  }
}

}  // namespace
}  // namespace strata::rendezvous_test
