// Byte-pair encoding; see byte_pairs.h.
#include "engine/data/tokenizer_json/byte_pairs.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <queue>

#include "engine/data/tokenizer_json/byte_characters.h"
#include "engine/data/tokenizer_json/unicode.h"
#include "strata/error.h"

namespace strata {
namespace {

constexpr size_t kKnownWords = 1 << 16;  // of 64 bytes each
constexpr size_t kShort = 40;            // symbols; words below are looked through for each merge

uint64_t pair_key(uint32_t left, uint32_t right) { return uint64_t(left) << 32 | right; }

std::string byte_token(unsigned char byte) {
  char text[8];
  std::snprintf(text, sizeof text, "<0x%02X>", byte);
  return text;
}

size_t character_end(std::string_view text, size_t at) {
  do ++at;
  while (at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80);
  return at;
}

// The two tokens of a merge: "left right" or ["left", "right"].
std::pair<std::string, std::string> merge_of(const Field& field) {
  if (field.is_text()) {
    const std::string& text = field.text();
    const size_t space = text.find(' ');
    if (space == text.npos || text.find(' ', space + 1) != text.npos)
      field.refuse("\"" + text + "\" is not two tokens with a space between them.");
    return {text.substr(0, space), text.substr(space + 1)};
  }
  const std::vector<Field> both = field.items();
  if (both.size() != 2) field.refuse("must be two tokens.");
  return {both[0].text(), both[1].text()};
}

}  // namespace

MergeTable::MergeTable(size_t most) : slots_(std::bit_ceil(std::max<size_t>(most * 2, 16))) {}

size_t MergeTable::slot_of(uint64_t pair) const {
  size_t at = (pair * 0x9E3779B97F4A7C15u) >> (64 - std::countr_zero(slots_.size()));
  while (slots_[at].pair != pair && slots_[at].pair != UINT64_MAX) at = (at + 1) & (slots_.size() - 1);
  return at;
}
void MergeTable::put(int32_t left, int32_t right, Merge merge) {
  const uint64_t pair = pair_key(uint32_t(left), uint32_t(right));
  slots_[slot_of(pair)] = {pair, merge};
}
MergeTable::Merge MergeTable::find(int32_t left, int32_t right) const {
  return slots_[slot_of(pair_key(uint32_t(left), uint32_t(right)))].merge;
}

BytePairs::Memory::Memory() : known(kKnownWords) {}

BytePairs::BytePairs(const Field& field, bool byte_level) : byte_level_(byte_level) {
  if (const auto type = field.find("type"); type && type->text() != "BPE")
    type->refuse("\"" + type->text() + "\" is not supported; BPE is.");
  field.only({"type", "vocab", "merges", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
              "fuse_unk", "byte_fallback", "ignore_merges", "cache_capacity"});
  if (const auto dropout = field.find("dropout")) dropout->refuse("dropout of merges is not supported.");
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (const auto mark = field.find(name); mark && !mark->text().empty()) mark->refuse("is not supported.");
  fuse_unknown_ = field.flag("fuse_unk", false);
  whole_words_ = field.flag("ignore_merges", false);
  byte_fallback_ = field.flag("byte_fallback", false);
  if (byte_fallback_ && byte_level) field.at("byte_fallback").refuse("is not supported with ByteLevel.");
  read_vocabulary(field.at("vocab"));
  if (const auto unknown = field.find("unk_token")) {
    const auto found = vocabulary_.find(unknown->text());
    if (found == vocabulary_.end()) unknown->refuse("\"" + unknown->text() + "\" is not in the vocabulary.");
    unknown_ = found->second;
  }
  read_merges(field.at("merges"));
}

void BytePairs::read_vocabulary(const Field& field) {
  std::unordered_set<int64_t> ids;
  for (const auto& [text, value] : field.members()) {
    const int64_t id = value.integer();
    if (id < 0 || id >= INT32_MAX) value.refuse("id " + std::to_string(id) + " is out of range.");
    if (!ids.insert(id).second) value.refuse("id " + std::to_string(id) + " is another token's, too.");
    vocabulary_.emplace(text, int32_t(id));
  }
  if (vocabulary_.empty()) field.refuse("is empty.");
  bytes_.fill(-1);
  word_texts_.reserve(vocabulary_.size());
  for (const auto& [text, id] : vocabulary_) {
    if (!byte_level_) {
      words_.emplace(text, id);
      if (!text.empty() && character_end(text, 0) == text.size()) {
        size_t at = 0;
        characters_.emplace(next_character(text, at), id);
      }
    } else if (const auto bytes = bytes_of_characters(text)) {
      words_.emplace(word_texts_.emplace_back(*bytes), id);
      if (bytes->size() == 1) bytes_[static_cast<unsigned char>((*bytes)[0])] = id;
    }
  }
  if (byte_fallback_)
    for (int byte = 0; byte < 256; ++byte)
      if (const auto found = vocabulary_.find(byte_token(static_cast<unsigned char>(byte))); found != vocabulary_.end())
        bytes_[size_t(byte)] = found->second;
}

void BytePairs::read_merges(const Field& field) {
  const std::vector<Field> all = field.items();
  merges_ = std::make_unique<MergeTable>(all.size());
  const auto id_of = [&](const std::string& text, const Field& merge) {
    const auto found = vocabulary_.find(text);
    if (found == vocabulary_.end()) merge.refuse("\"" + text + "\" is not in the vocabulary.");
    return found->second;
  };
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto [left, right] = merge_of(all[rank]);
    const int32_t first = id_of(left, all[rank]), second = id_of(right, all[rank]);
    if (left.empty() || right.empty()) all[rank].refuse("has an empty token.");
    merges_->put(first, second, {uint32_t(rank), id_of(left + right, all[rank])});
    size_t at = 0;
    if (!byte_level_) joints_.insert(pair_key(uint32_t(last_character(left)), uint32_t(next_character(right, at))));
  }
}

int32_t BytePairs::symbol(std::string_view character) const {
  if (byte_level_) return bytes_[static_cast<unsigned char>(character[0])];
  size_t at = 0;
  const auto found = characters_.find(next_character(character, at));
  return found == characters_.end() ? -1 : found->second;
}

// Characters outside the vocabulary become the tokens of their bytes where there are all of them, else the token for
// what is unknown, one for several in a row if so asked, else nothing.
void BytePairs::split(std::string_view word, std::vector<int32_t>& symbols) const {
  symbols.clear();
  bool pending = false;  // an unknown one that is not yet written
  for (size_t at = 0, end; at < word.size(); at = end) {
    end = byte_level_ ? at + 1 : character_end(word, at);
    const std::string_view character = word.substr(at, end - at);
    if (const int32_t id = symbol(character); id >= 0) {
      if (pending) symbols.push_back(unknown_);
      pending = false;
      symbols.push_back(id);
      continue;
    }
    const auto has_token = [&](char byte) { return bytes_[static_cast<unsigned char>(byte)] >= 0; };
    if (byte_fallback_ && std::all_of(character.begin(), character.end(), has_token)) {
      for (const char byte : character) symbols.push_back(bytes_[static_cast<unsigned char>(byte)]);
    } else if (unknown_ >= 0) {
      if (pending && !fuse_unknown_) symbols.push_back(unknown_);
      pending = true;
    }
  }
  if (pending) symbols.push_back(unknown_);
}

void BytePairs::merge(Memory& memory) const {
  if (memory.symbols.size() < 2) return;
  if (memory.symbols.size() < kShort)
    merge_short(memory);
  else
    merge_long(memory);
}

void BytePairs::merge_short(Memory& memory) const {
  std::vector<int32_t>& symbols = memory.symbols;
  std::vector<uint32_t>& ranks = memory.ranks;  // of each symbol with the next
  const auto rank_at = [&](size_t i) { return merges_->find(symbols[i], symbols[i + 1]).rank; };
  ranks.resize(symbols.size() - 1);
  for (size_t i = 0; i < ranks.size(); ++i) ranks[i] = rank_at(i);
  while (!ranks.empty()) {
    const auto best = std::min_element(ranks.begin(), ranks.end());
    if (*best == MergeTable::kNone) return;
    const auto at = size_t(best - ranks.begin());
    symbols[at] = merges_->find(symbols[at], symbols[at + 1]).id;
    symbols.erase(symbols.begin() + int64_t(at) + 1);
    ranks.erase(best);
    if (at < ranks.size()) ranks[at] = rank_at(at);
    if (at > 0) ranks[at - 1] = rank_at(at - 1);
  }
}

// The same with a list of symbols and a queue of merges that can be done, for which long words are what they are for
// short ones.
void BytePairs::merge_long(Memory& memory) const {
  std::vector<int32_t>&symbols = memory.symbols, &before = memory.before, &after = memory.after;
  const auto count = int32_t(symbols.size());
  before.resize(symbols.size()), after.resize(symbols.size());
  struct Candidate {
    uint32_t rank;
    int32_t at, left, right;
    bool operator>(const Candidate& other) const { return rank != other.rank ? rank > other.rank : at > other.at; }
  };
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
  const auto offer = [&](int32_t left, int32_t right) {
    if (left < 0 || right >= count) return;
    const uint32_t rank = merges_->find(symbols[size_t(left)], symbols[size_t(right)]).rank;
    if (rank != MergeTable::kNone) queue.push({rank, left, symbols[size_t(left)], symbols[size_t(right)]});
  };
  for (int32_t i = 0; i < count; ++i) before[size_t(i)] = i - 1, after[size_t(i)] = i + 1;
  for (int32_t i = 0; i + 1 < count; ++i) offer(i, i + 1);
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    const auto left = size_t(best.at);
    const int32_t right = after[left];
    if (symbols[left] != best.left || right >= count || symbols[size_t(right)] != best.right) continue;
    symbols[left] = merges_->find(best.left, best.right).id;
    symbols[size_t(right)] = -1;  // part of its left neighbour
    after[left] = after[size_t(right)];
    if (after[left] < count) before[size_t(after[left])] = best.at;
    offer(before[left], best.at);
    offer(best.at, after[left]);
  }
  std::erase(symbols, -1);
}

void BytePairs::encode_new(std::string_view word, Memory& memory) const {
  if (whole_words_)
    if (const auto found = words_.find(word); found != words_.end()) {
      memory.symbols.assign(1, found->second);
      return;
    }
  if (word.size() > size_t(INT32_MAX))
    throw Error("a word of " + std::to_string(word.size()) + " bytes is too long for the tokenizer.");
  split(word, memory.symbols);
  merge(memory);
}

void BytePairs::encode(std::string_view word, Memory& memory, std::vector<int32_t>& ids) const {
  Memory::Known* known = nullptr;
  if (word.size() <= Memory::kLongest) {
    known = &memory.known[XXH3_64bits(word.data(), word.size()) % kKnownWords];
    if (known->length == word.size() && std::memcmp(known->word.data(), word.data(), word.size()) == 0) {
      ids.insert(ids.end(), known->ids.begin(), known->ids.begin() + known->tokens);
      return;
    }
  }
  encode_new(word, memory);
  ids.insert(ids.end(), memory.symbols.begin(), memory.symbols.end());
  if (!known || memory.symbols.size() > Memory::kMostTokens) return;
  known->length = uint8_t(word.size());
  known->tokens = uint8_t(memory.symbols.size());
  std::memcpy(known->word.data(), word.data(), word.size());
  std::copy(memory.symbols.begin(), memory.symbols.end(), known->ids.begin());
}

size_t BytePairs::first_part(std::string_view word) const {
  if (byte_level_ || whole_words_ || word.empty()) return word.size();
  size_t at = 0;
  char32_t left = next_character(word, at);
  bool left_known = characters_.contains(left);
  while (at < word.size()) {
    const size_t place = at;
    const char32_t right = next_character(word, at);
    const bool right_known = characters_.contains(right);
    if (left_known && right_known && !joints_.contains(pair_key(uint32_t(left), uint32_t(right)))) return place;
    left = right;
    left_known = right_known;
  }
  return word.size();
}

}  // namespace strata
