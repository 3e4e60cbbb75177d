// The model of a tokenizer.json: byte-pair encoding of words (Sennrich et al., 1508.07909) over bytes or characters.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "engine/data/tokenizer_json/field.h"

namespace strata {

// Merges by pair of tokens.
class MergeTable {
 public:
  struct Merge {
    uint32_t rank = kNone;  // low ones come first
    int32_t id = 0;
  };
  static constexpr uint32_t kNone = UINT32_MAX;

  explicit MergeTable(size_t most);
  void put(int32_t left, int32_t right, Merge merge);
  Merge find(int32_t left, int32_t right) const;

 private:
  struct Slot {
    uint64_t pair = UINT64_MAX;
    Merge merge{};
  };
  size_t slot_of(uint64_t pair) const;
  std::vector<Slot> slots_;
};

class BytePairs {
 public:
  // `byte_level`: words are bytes, and the vocabulary has the characters that stand for them. Otherwise characters.
  BytePairs(const Field& field, bool byte_level);
  const std::unordered_map<std::string, int32_t>& vocabulary() const { return vocabulary_; }

  // What a thread keeps from word to word.
  class Memory {
   public:
    Memory();

   private:
    friend class BytePairs;
    static constexpr size_t kLongest = 30, kMostTokens = 8;
    struct Known {  // a word that was encoded; others of the same hash take its place
      uint8_t length = 0, tokens = 0;
      std::array<char, kLongest> word{};
      std::array<int32_t, kMostTokens> ids{};
    };
    std::vector<Known> known;
    std::vector<int32_t> symbols, before, after;
    std::vector<uint32_t> ranks;
  };
  // Appends the tokens of a word.
  void encode(std::string_view word, Memory& memory, std::vector<int32_t>& ids) const;
  // Where a word's first part ends such that its tokens are those of the parts, whatever they are next to: no merge
  // takes tokens of both. The word's end, when there is no such place.
  size_t first_part(std::string_view word) const;

 private:
  void read_vocabulary(const Field& field);
  void read_merges(const Field& field);
  int32_t symbol(std::string_view character) const;  // -1: none
  void split(std::string_view word, std::vector<int32_t>& symbols) const;
  void merge(Memory& memory) const;
  void merge_short(Memory& memory) const;
  void merge_long(Memory& memory) const;
  void encode_new(std::string_view word, Memory& memory) const;

  bool byte_level_, whole_words_ = false, byte_fallback_ = false, fuse_unknown_ = false;
  int32_t unknown_ = -1;
  std::unordered_map<std::string, int32_t> vocabulary_;  // as the file has it
  std::unordered_map<std::string_view, int32_t> words_;  // as text has it; into vocabulary_ or word_texts_
  std::vector<std::string> word_texts_;
  std::array<int32_t, 256> bytes_{};  // tokens of bytes; -1: none
  std::unordered_map<char32_t, int32_t> characters_;
  std::unordered_set<uint64_t> joints_;  // pairs of characters that some merge joins
  std::unique_ptr<MergeTable> merges_;
};

}  // namespace strata
