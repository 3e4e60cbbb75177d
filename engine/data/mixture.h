// The samples of a run from one source of data or several, each as often as its weight says: which source and which of
// its samples is sample n is a pure function of the weights and n, so a resumed run needs no state, and any number of
// ranks sees the same.
#pragma once
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "engine/config/sections.h"
#include "engine/data/sampler.h"

namespace strata {

class Mixture {
 public:
  struct How {
    int64_t vocabulary, sequence_length;
    bool shuffle, packed;
    uint64_t seed;
  };
  // Throws Error for what TokenDataset and Sampler refuse, and for sources made with different tokenizers.
  Mixture(const std::vector<DataSource>& sources, const How& how);

  void fill(int64_t sample, const SampleBuffers& to) const;
  int64_t counted(int64_t sample) const;  // targets that count
  // A source among the first `samples` ones: how many are its.
  int64_t taken(size_t source, int64_t samples) const;

  const std::vector<DataSource>& sources() const { return sources_; }
  const Sampler& of(size_t source) const { return samplers_[source]; }
  int64_t tokens() const;
  bool masked() const;  // some source has loss masks

 private:
  struct Place {
    size_t source;
    int64_t sample;
  };
  Place place(int64_t sample) const;

  std::vector<DataSource> sources_;
  std::deque<TokenDataset> data_;  // samplers point into it
  std::vector<Sampler> samplers_;
  std::vector<uint64_t> shares_;  // of each source among itself and those after it, in 2^-64
};

}  // namespace strata
