// Masks and document starts as files; see token_marks.h.
#include "engine/data/token_marks.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>

#include "strata/error.h"

namespace strata {
namespace {

constexpr int64_t kHeaderOfMarks = 16;
constexpr const char *kMagicOfMask = "strmask1", *kMagicOfDocuments = "strdocs1";

// The file's bytes behind its header.
int64_t checked_size(const MappedFile& file, const char* magic, const char* what, const std::string& token_file,
                     int64_t tokens) {
  const int64_t size = int64_t(file.bytes().size());
  if (size < kHeaderOfMarks || std::memcmp(file.bytes().data(), magic, 8) != 0)
    throw Error(file.path() + ": is no " + what + ": it does not begin with \"" + magic +
                "\" and a number of tokens. Make it and " + token_file + " again with: strata data prepare.");
  int64_t said = 0;
  std::memcpy(&said, file.bytes().data() + 8, 8);
  if (said != tokens)
    throw Error(file.path() + ": is of " + std::to_string(said) + " tokens, but " + token_file + " has " +
                std::to_string(tokens) + "; make both again with: strata data prepare.");
  return size - kHeaderOfMarks;
}

std::string header_of_marks(const char* magic, int64_t tokens) {
  std::string header(magic, 8);
  header.append(reinterpret_cast<const char*>(&tokens), 8);
  return header;
}

}  // namespace

std::string name_beside(const std::string& token_file, const char* extension) {
  const bool is_bin = token_file.ends_with(".bin");
  return token_file.substr(0, token_file.size() - (is_bin ? 4 : 0)) + extension;
}

LossMask::LossMask(const std::string& path, const std::string& token_file, int64_t tokens) : file_(path) {
  const int64_t size = checked_size(file_, kMagicOfMask, "loss mask", token_file, tokens), expected = (tokens + 7) / 8;
  if (size != expected)
    throw Error(path + ": says that it is of " + std::to_string(tokens) + " tokens, whose bits take " +
                std::to_string(expected) + " bytes, but it has " + std::to_string(size) + ". Make or copy it again.");
}

int64_t LossMask::counted(int64_t first, int64_t count) const {
  int64_t sum = 0;
  const int64_t end = first + count;
  for (; first < end && first % 8 != 0; ++first) sum += counts(first);
  for (; first + 8 <= end; first += 8) sum += std::popcount(uint8_t(bits()[first / 8]));
  for (; first < end; ++first) sum += counts(first);
  return sum;
}

DocumentStarts::DocumentStarts(const std::string& path, const std::string& token_file, int64_t tokens) : file_(path) {
  const int64_t size = checked_size(file_, kMagicOfDocuments, "list of documents", token_file, tokens);
  const std::span<const int64_t> starts = all();
  const auto next = std::adjacent_find(starts.begin(), starts.end(), std::greater_equal<>());
  if (size % 8 != 0 || starts.empty() || starts[0] != 0 || next != starts.end() || starts.back() >= tokens)
    throw Error(path + ": must be whole numbers that ascend from 0 to below the " + std::to_string(tokens) +
                " tokens of " + token_file + ". Make both again with: strata data prepare.");
}

std::span<const int64_t> DocumentStarts::all() const {
  return {reinterpret_cast<const int64_t*>(file_.bytes().data() + kHeaderOfMarks),
          (file_.bytes().size() - size_t(kHeaderOfMarks)) / 8};
}

TokenMarksWriter::TokenMarksWriter(const std::string& token_file)
    : mask_(name_beside(token_file, kMask)), documents_(name_beside(token_file, kDocuments)) {
  for (AtomicFile* file : {&mask_, &documents_}) file->write(std::string(size_t(kHeaderOfMarks), '\0'));
}

void TokenMarksWriter::append(int64_t count, bool counts) {
  for (int64_t i = 0; i < count; ++i, ++tokens_) {
    if (tokens_ % 8 == 0) bytes_.push_back(0);
    if (counts) bytes_.back() |= uint8_t(1 << tokens_ % 8);
  }
  if (bytes_.size() < 2) return;
  mask_.write(std::as_bytes(std::span(bytes_)).first(bytes_.size() - 1));
  bytes_.erase(bytes_.begin(), bytes_.end() - 1);
}

void TokenMarksWriter::append(std::span<const uint8_t> counts) {
  for (size_t i = 0; i < counts.size();) {
    const size_t first = i;
    while (i < counts.size() && (counts[i] != 0) == (counts[first] != 0)) ++i;
    append(int64_t(i - first), counts[first] != 0);
  }
}

void TokenMarksWriter::begin_document() {
  if (starts_.empty() || starts_.back() < tokens_) starts_.push_back(tokens_);
}

void TokenMarksWriter::commit() {
  if (starts_.empty() || starts_[0] > 0) starts_.insert(starts_.begin(), 0);  // goes on from the file before
  while (starts_.back() >= tokens_) starts_.pop_back();                       // nothing came
  mask_.write(std::as_bytes(std::span(bytes_)));
  documents_.write(std::as_bytes(std::span(starts_)));
  const std::string of_mask = header_of_marks(kMagicOfMask, tokens_),
                    of_documents = header_of_marks(kMagicOfDocuments, tokens_);
  mask_.write_at(std::as_bytes(std::span(of_mask)), 0);
  documents_.write_at(std::as_bytes(std::span(of_documents)), 0);
  mask_.commit();
  documents_.commit();
}

}  // namespace strata
