// Which sequence of the data set is sample n of a run: a pure function of seed and n, so a resumed run needs no state.
#pragma once
#include <cstdint>
#include <vector>

#include "engine/data/token_file.h"

namespace strata {

// Where a sample goes: `sequence_length` int32 each. `document_starts`, unless null: of each token at which place of
// the sequence its document begins.
struct SampleBuffers {
  int32_t *tokens, *targets, *document_starts = nullptr;
};

class Sampler {
 public:
  // A file of n tokens holds (n - 1) / sequence_length sequences: they do not overlap but for the one token that is
  // target of one and input of the next, and none crosses files. `data` must outlive the sampler.
  //
  // `packed`: sequences are made of whole documents instead, as many in a row as fit, and what is left of a sequence is
  // padding. Only a document that is longer is divided. Its first token is nobody's target, and of one of n tokens the
  // last is not needed where it would be the first that does not fit.
  // Throws Error when there is not one whole sequence, or with `packed` for a file that does not say where its
  // documents begin.
  Sampler(const TokenDataset& data, int64_t sequence_length, bool shuffle, uint64_t seed, bool packed = false);
  int64_t sequences() const { return packed_ ? int64_t(packs_.size()) : starts_.back(); }  // in one epoch
  // Tokens and targets (the tokens one later) of sample 0, 1, 2, …; targets that do not count are -1. Sample n belongs
  // to epoch n / sequences(); with `shuffle` every epoch has an order of its own. Any thread may call it.
  void fill(int64_t sample, const SampleBuffers& to) const;
  int64_t counted(int64_t sample) const;  // its targets that count
  int64_t padding() const;                // tokens of one epoch that are none of the data's

 private:
  // Tokens [begin, end) of a file, whose targets are up to `last`.
  struct Pack {
    size_t file;
    int64_t begin, end, last;
  };
  void pack(size_t file);
  Pack pack_of(int64_t sample) const;
  void leave_out(const Pack& pack, int32_t* targets) const;
  void put_documents(const Pack& pack, const SampleBuffers& to) const;

  const TokenDataset& data_;
  int64_t length_;
  bool shuffle_, packed_;
  uint64_t seed_;
  std::vector<int64_t> starts_;  // first sequence of each file; the last entry is their number
  std::vector<Pack> packs_;
};

// Where a random permutation of [0, size) puts `index`: eight rounds of a Feistel network keyed by Philox over the next
// power of four, walked until the result is inside (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
// Below four walks on average; needs 0 <= index < size.
int64_t permuted(int64_t index, int64_t size, uint64_t seed, uint64_t epoch);

}  // namespace strata
