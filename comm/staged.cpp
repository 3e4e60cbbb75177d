// Exchanges of device memory through pinned staging; see staged.h. Sums are the inner group's: chunks change no bit.
#include "comm/staged.h"

namespace strata {
namespace {

constexpr int64_t kChunk = 4 << 20;  // bytes of a rank's part that are staged at once

class Staged final : public Communicator {
 public:
  Staged(std::unique_ptr<Communicator> inner, Device& device)
      : inner_(std::move(inner)),
        device_(device),
        memory_(static_cast<std::byte*>(device.allocate(Tier::host, kChunk * inner_->size()))) {}
  ~Staged() override { device_.release(Tier::host, memory_); }

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  void copy_bytes(void* to, const void* from, int64_t bytes) override { device_.copy(to, from, bytes); }
  void copy_rows(void* to, int64_t to_step, const void* from, int64_t from_step, int64_t bytes, int64_t rows) override {
    if (bytes > 0 && rows > 0) device_.copy_rows(to, to_step, from, from_step, bytes, rows);
  }

  void all_reduce(const Pieces& data, DType dtype, Reduction reduction) override {
    const int64_t room = kChunk * size();
    for (int64_t at = 0; at < data.bytes(); at += room) {
      const Pieces some = data.part(at, std::min(data.bytes(), at + room));
      load(some, memory_);
      inner_->all_reduce({{memory_, some.bytes()}}, dtype, reduction);
      store(some, memory_);
    }
    count();
  }
  void reduce_scatter(const std::vector<Pieces>& parts, const Pieces& result, DType dtype,
                      Reduction reduction) override {
    for (int64_t at = 0; at < longest(parts); at += kChunk) {
      std::vector<Pieces> staged;
      for (int r = 0; r < size(); ++r) {
        const Pieces some = parts[size_t(r)].part(at, at + kChunk);
        load(some, window(r));
        staged.push_back({{window(r), some.bytes()}});
      }
      inner_->reduce_scatter(staged, staged[size_t(rank())], dtype, reduction);
      store(result.part(at, at + kChunk), window(rank()));
    }
    count();
  }
  void all_gather(const std::vector<Pieces>& parts) override {
    for (int64_t at = 0; at < longest(parts); at += kChunk) {
      std::vector<Pieces> staged;
      for (int r = 0; r < size(); ++r) staged.push_back({{window(r), parts[size_t(r)].part(at, at + kChunk).bytes()}});
      load(parts[size_t(rank())].part(at, at + kChunk), window(rank()));
      inner_->all_gather(staged);
      for (int r = 0; r < size(); ++r)
        if (r != rank()) store(parts[size_t(r)].part(at, at + kChunk), window(r));
    }
    count();
  }
  void broadcast(const Pieces& data, int root) override {
    for (int64_t at = 0; at < data.bytes(); at += kChunk) {
      const Pieces some = data.part(at, at + kChunk);
      if (rank() == root) load(some, memory_);
      inner_->broadcast({{memory_, some.bytes()}}, root);
      if (rank() != root) store(some, memory_);
    }
    count();
  }
  // A pair at a time with windows of half the size, for as many rounds as the largest pair anywhere takes.
  void all_to_all(const std::vector<Pieces>& send, const std::vector<Pieces>& receive) override {
    constexpr int64_t kHalf = kChunk / 2;
    int32_t rounds = int32_t((std::max(longest(send), longest(receive)) + kHalf - 1) / kHalf);
    inner_->all_reduce({{reinterpret_cast<std::byte*>(&rounds), sizeof rounds}}, DType::i32, Reduction::max);
    for (int64_t at = 0; at < rounds * kHalf; at += kHalf) {
      std::vector<Pieces> out, in;
      for (int r = 0; r < size(); ++r) {
        const Pieces some = send[size_t(r)].part(at, at + kHalf);
        load(some, window(r));
        out.push_back({{window(r), some.bytes()}});
        in.push_back({{window(r) + kHalf, receive[size_t(r)].part(at, at + kHalf).bytes()}});
      }
      inner_->all_to_all(out, in);
      for (int r = 0; r < size(); ++r) store(receive[size_t(r)].part(at, at + kHalf), window(r) + kHalf);
    }
    count();
  }
  void send(const Pieces& data, int to) override {
    for (int64_t at = 0; at < data.bytes(); at += kChunk) {
      const Pieces some = data.part(at, at + kChunk);
      load(some, memory_);
      inner_->send({{memory_, some.bytes()}}, to);
    }
    count();
  }
  void receive(const Pieces& data, int from) override {
    for (int64_t at = 0; at < data.bytes(); at += kChunk) {
      const Pieces some = data.part(at, at + kChunk);
      inner_->receive({{memory_, some.bytes()}}, from);
      store(some, memory_);
    }
    count();
  }
  void barrier() override { inner_->barrier(); }

 private:
  std::byte* window(int rank) { return memory_ + rank * kChunk; }
  void count() { bytes_sent_ = inner_->bytes_sent(); }
  static int64_t longest(const std::vector<Pieces>& parts) {
    int64_t result = 0;
    for (const Pieces& part : parts) result = std::max(result, part.bytes());
    return result;
  }
  void load(const Pieces& from, std::byte* to) {
    from.over(0, from.bytes(), [&](std::byte* data, int64_t n, int64_t at) { device_.copy(to + at, data, n); });
  }
  void store(const Pieces& to, const std::byte* from) {
    to.over(0, to.bytes(), [&](std::byte* data, int64_t n, int64_t at) { device_.copy(data, from + at, n); });
  }

  std::unique_ptr<Communicator> inner_;
  Device& device_;
  std::byte* memory_;
};

}  // namespace

std::unique_ptr<Communicator> staged_communicator(std::unique_ptr<Communicator> inner, Device& device) {
  return std::make_unique<Staged>(std::move(inner), device);
}

}  // namespace strata
