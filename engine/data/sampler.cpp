// Stateless shuffling; see sampler.h.
#include "engine/data/sampler.h"

#include <algorithm>
#include <bit>

#include "strata/error.h"
#include "strata/random.h"

namespace strata {

// Four would do for large sizes, but below a hundred sequences some places would be likelier than others.
constexpr uint32_t kRounds = 8;

int64_t permuted(int64_t index, int64_t size, uint64_t seed, uint64_t epoch) {
  STRATA_CHECK(0 <= index && index < size);
  const int half = std::max(1, (int(std::bit_width(uint64_t(size - 1))) + 1) / 2);  // bits of each half, up to 32
  const uint64_t mask = (uint64_t{1} << half) - 1;
  uint64_t value = uint64_t(index);
  do {
    uint64_t left = value >> half, right = value & mask;
    for (uint32_t round = 0; round < kRounds; ++round) {
      const auto words = philox({uint32_t(right), round, uint32_t(epoch), uint32_t(epoch >> 32)}, uint32_t(seed),
                                uint32_t(seed >> 32));
      const uint64_t mixed = left ^ (words[0] & mask);
      left = right;
      right = mixed;
    }
    value = left << half | right;
  } while (value >= uint64_t(size));
  return int64_t(value);
}

Sampler::Sampler(const TokenDataset& data, int64_t sequence_length, bool shuffle, uint64_t seed, bool packed)
    : data_(data), length_(sequence_length), shuffle_(shuffle), packed_(packed), seed_(seed), starts_{0} {
  STRATA_CHECK(length_ > 0);
  for (size_t file = 0; packed && file < data.files().size(); ++file) pack(file);
  for (const TokenFile& file : data.files()) starts_.push_back(starts_.back() + (file.tokens() - 1) / length_);
  if (sequences() > 0) return;
  const size_t files = data.files().size();
  const std::string names =
      data.files().front().path() + (files > 1 ? " and " + std::to_string(files - 1) + " more" : "");
  if (packed)
    throw Error(names + ": " + (files > 1 ? "hold" : "holds") +
                " no document of at least two tokens; there is nothing to predict.");
  throw Error(names + ": " + (files > 1 ? "no file holds " : "does not hold ") + "one sequence of " +
              std::to_string(length_) + " tokens and the token after it (" + std::to_string(data.tokens()) +
              " tokens in all); use more text or lower data.sequence_length.");
}

void Sampler::pack(size_t number) {
  const TokenFile& file = data_.files()[number];
  if (!file.documents())
    throw Error(file.path() + ": does not say where its documents begin (" + name_beside(file.path(), kDocuments) +
                "), which data.packed needs; prepare it again with: strata data prepare.");
  const std::span<const int64_t> documents = file.documents()->all();
  const auto end_of = [&](size_t i) { return i + 1 < documents.size() ? documents[i + 1] : file.tokens(); };
  const auto fits = [&](int64_t begin, int64_t end) { return end - 1 - begin <= length_; };
  int64_t begin = 0;
  for (size_t i = 0; i < documents.size();) {
    if (!fits(begin, end_of(i))) {
      packs_.push_back({number, begin, begin + length_, begin + length_});
      begin += length_;
      continue;
    }
    while (i + 1 < documents.size() && fits(begin, end_of(i + 1))) ++i;
    const int64_t end = end_of(i++);
    // A token alone is nobody's: it was the last target of the piece before, or is a document.
    if (end - begin > 1) packs_.push_back({number, begin, std::min(end, begin + length_), end - 1});
    begin = end;
  }
}

Sampler::Pack Sampler::pack_of(int64_t sample) const {
  STRATA_CHECK(sample >= 0);
  const int64_t epoch = sample / sequences();
  int64_t sequence = sample % sequences();
  if (shuffle_) sequence = permuted(sequence, sequences(), seed_, uint64_t(epoch));
  if (packed_) return packs_[size_t(sequence)];
  const size_t file = size_t(std::upper_bound(starts_.begin(), starts_.end(), sequence) - starts_.begin()) - 1;
  const int64_t at = (sequence - starts_[file]) * length_;
  return {file, at, at + length_, at + length_};
}

namespace {

// Calls body(i) for each of a file's documents that begins in [first, end).
template <class Body>
void over_documents(const TokenFile& file, int64_t first, int64_t end, Body&& body) {
  const std::span<const int64_t> starts = file.documents()->all();
  for (auto at = std::lower_bound(starts.begin(), starts.end(), first); at != starts.end() && *at < end; ++at)
    body(*at);
}

}  // namespace

void Sampler::fill(int64_t sample, const SampleBuffers& to) const {
  const Pack pack = pack_of(sample);
  const TokenFile& file = data_.files()[pack.file];
  const int64_t count = pack.end - pack.begin, targets = pack.last - pack.begin;
  file.read(pack.begin, count, to.tokens);
  std::fill(to.tokens + count, to.tokens + length_, 0);
  std::copy(to.tokens + 1, to.tokens + std::min(count, targets + 1), to.targets);
  if (targets == count) file.read(pack.last, 1, to.targets + count - 1);
  std::fill(to.targets + targets, to.targets + length_, -1);
  leave_out(pack, to.targets);
  if (to.document_starts) put_documents(pack, to);
}

// Targets that a mask leaves out, and with `packed` the first tokens of documents.
void Sampler::leave_out(const Pack& pack, int32_t* targets) const {
  const TokenFile& file = data_.files()[pack.file];
  for (int64_t token = pack.begin + 1; file.mask() && token <= pack.last; ++token)
    if (!file.mask()->counts(token)) targets[token - 1 - pack.begin] = -1;
  if (packed_)
    over_documents(file, pack.begin + 1, pack.last + 1, [&](int64_t at) { targets[at - 1 - pack.begin] = -1; });
}

void Sampler::put_documents(const Pack& pack, const SampleBuffers& to) const {
  std::fill(to.document_starts, to.document_starts + length_, 0);
  if (!packed_) return;
  const auto begin_at = [&](int64_t place) {
    std::fill(to.document_starts + place, to.document_starts + length_, int32_t(place));
  };
  over_documents(data_.files()[pack.file], pack.begin + 1, pack.end, [&](int64_t at) { begin_at(at - pack.begin); });
  begin_at(pack.end - pack.begin);  // what is left over
}

int64_t Sampler::counted(int64_t sample) const {
  const Pack pack = pack_of(sample);
  const TokenFile& file = data_.files()[pack.file];
  const auto counted = [&](int64_t first, int64_t count) {
    return file.mask() ? file.mask()->counted(first, count) : count;
  };
  int64_t sum = counted(pack.begin + 1, pack.last - pack.begin);
  if (packed_) over_documents(file, pack.begin + 1, pack.last + 1, [&](int64_t at) { sum -= counted(at, 1); });
  return sum;
}

int64_t Sampler::padding() const {
  int64_t sum = 0;
  for (const Pack& pack : packs_) sum += length_ - (pack.end - pack.begin);
  return sum;
}

}  // namespace strata
