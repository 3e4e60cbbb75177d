// Sources by weight; see mixture.h.
#include "engine/data/mixture.h"

#include <algorithm>
#include <cmath>

#include "strata/error.h"

namespace strata {
namespace {

// How many of the first n samples a source gets whose share is `share`/2^64, spread evenly: the nearest number.
int64_t taken_of(int64_t n, uint64_t share) {
  using Wide = unsigned __int128;
  return int64_t((Wide(uint64_t(n)) * share + (Wide(1) << 63)) >> 64);
}

}  // namespace

Mixture::Mixture(const std::vector<DataSource>& sources, const How& how) : sources_(sources) {
  STRATA_CHECK(!sources.empty());
  std::vector<std::string> all;
  for (const DataSource& source : sources) {
    data_.emplace_back(source.files, how.vocabulary);
    samplers_.emplace_back(data_.back(), how.sequence_length, how.shuffle, how.seed, how.packed);
    all.insert(all.end(), source.files.begin(), source.files.end());
  }
  if (sources.size() > 1) tokenizer_of(all);  // one of all
  double rest = 0;
  shares_.resize(sources.size());
  for (size_t s = sources.size(); s-- > 0;) {
    rest += sources[s].weight;
    shares_[s] = s + 1 == sources.size()
                     ? 0
                     : uint64_t(std::ldexp(std::min(sources[s].weight / rest, std::nextafter(1.0, 0.0)), 64));
  }
}

// Each source takes its share, evenly spread, of what those before it leave.
Mixture::Place Mixture::place(int64_t sample) const {
  STRATA_CHECK(sample >= 0);
  for (size_t s = 0; s + 1 < samplers_.size(); ++s) {
    const int64_t before = taken_of(sample, shares_[s]);
    if (taken_of(sample + 1, shares_[s]) > before) return {s, before};
    sample -= before;
  }
  return {samplers_.size() - 1, sample};
}

int64_t Mixture::taken(size_t source, int64_t samples) const {
  for (size_t s = 0; s < source; ++s) samples -= taken_of(samples, shares_[s]);
  return source + 1 == samplers_.size() ? samples : taken_of(samples, shares_[source]);
}

void Mixture::fill(int64_t sample, const SampleBuffers& to) const {
  const Place at = place(sample);
  samplers_[at.source].fill(at.sample, to);
}

int64_t Mixture::counted(int64_t sample) const {
  const Place at = place(sample);
  return samplers_[at.source].counted(at.sample);
}

bool Mixture::masked() const {
  return std::any_of(data_.begin(), data_.end(), [](const TokenDataset& data) { return data.masked(); });
}

int64_t Mixture::tokens() const {
  int64_t sum = 0;
  for (const TokenDataset& data : data_) sum += data.tokens();
  return sum;
}

}  // namespace strata
