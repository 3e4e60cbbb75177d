// Reading and writing llm.c's .bin files; see token_file.h.
#include "engine/data/token_file.h"

#include <glob.h>

#include <cstring>

#include "strata/error.h"
#include "strata/simd.h"

namespace strata {
namespace {

constexpr int64_t kHeader = 256 * 4;
constexpr int32_t kMagic16 = 20240520, kVersion16 = 1, kMagic32 = 20240801, kVersion32 = 7;

// The largest token of a run; unsigned, so that ids above 2^31 count as large.
STRATA_SIMD uint32_t largest16(const uint16_t* p, int64_t n) {
  uint16_t best = 0;
  for (int64_t i = 0; i < n; ++i) best = p[i] > best ? p[i] : best;
  return best;
}
STRATA_SIMD uint32_t largest32(const uint32_t* p, int64_t n) {
  uint32_t best = 0;
  for (int64_t i = 0; i < n; ++i) best = p[i] > best ? p[i] : best;
  return best;
}

}  // namespace

TokenFile::TokenFile(const std::string& path) : file_(path) {
  const auto bytes = file_.bytes();
  const std::string remedy = " Make token files with: strata data prepare.";
  if (int64_t(bytes.size()) < kHeader)
    throw Error(path + ": is no token file: it has " + std::to_string(bytes.size()) + " bytes, less than the header of 1024." + remedy);
  int32_t header[3];
  std::memcpy(header, bytes.data(), sizeof header);
  if (header[0] == kMagic16 && header[1] == kVersion16) width_ = 2;
  else if (header[0] == kMagic32 && header[1] == kVersion32) width_ = 4;
  else if (header[0] == kMagic16 || header[0] == kMagic32)
    throw Error(path + ": has version " + std::to_string(header[1]) + " of the token format; this program reads version 1 (uint16) and 7 (uint32).");
  else throw Error(path + ": is no token file: it does not begin with llm.c's magic number 20240520 or 20240801." + remedy);
  const int64_t held = (int64_t(bytes.size()) - kHeader) / width_;
  tokens_ = header[2];
  if (tokens_ < 0 || held != tokens_ || (int64_t(bytes.size()) - kHeader) % width_ != 0)
    throw Error(path + ": its header says " + std::to_string(header[2]) + " tokens, but the file holds " + std::to_string(held) +
                "; it is truncated or damaged. Make it again.");
}

void TokenFile::read(int64_t offset, int64_t count, int32_t* out) const {
  STRATA_CHECK(offset >= 0 && count >= 0 && offset + count <= tokens_);
  const std::byte* from = file_.bytes().data() + kHeader + offset * width_;
  if (width_ == 4) {
    std::memcpy(out, from, size_t(count) * 4);
    return;
  }
  const auto* narrow = reinterpret_cast<const uint16_t*>(from);
  for (int64_t i = 0; i < count; ++i) out[i] = narrow[i];
}

int64_t TokenFile::first_at_least(int64_t vocabulary) const {
  constexpr int64_t kRun = 1 << 16;
  const std::byte* data = file_.bytes().data() + kHeader;
  for (int64_t i = 0; i < tokens_; i += kRun) {
    const int64_t n = std::min(kRun, tokens_ - i);
    const uint32_t largest = width_ == 2 ? largest16(reinterpret_cast<const uint16_t*>(data) + i, n) : largest32(reinterpret_cast<const uint32_t*>(data) + i, n);
    if (int64_t(largest) < vocabulary) continue;
    for (int64_t j = i;; ++j) {
      int32_t token;
      read(j, 1, &token);
      if (int64_t(uint32_t(token)) >= vocabulary) return j;
    }
  }
  return -1;
}

TokenDataset::TokenDataset(const std::vector<std::string>& patterns, int64_t vocabulary) {
  for (const std::string& pattern : patterns) {
    glob_t found{};
    const int status = glob(pattern.c_str(), 0, nullptr, &found);
    std::vector<std::string> paths;
    if (status == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    globfree(&found);
    if (paths.empty() && pattern.find_first_of("*?[") != std::string::npos)
      throw Error(pattern + ": no file matches. Make token files with: strata data prepare.");
    if (paths.empty()) paths = {pattern};  // opening it says what is wrong
    for (const std::string& path : paths) {
      files_.emplace_back(path);
      if (const int64_t at = files_.back().first_at_least(vocabulary); at >= 0) {
        int32_t token;
        files_.back().read(at, 1, &token);
        throw Error(path + ": token " + std::to_string(at) + " has id " + std::to_string(uint32_t(token)) + ", but the model's vocabulary has " +
                    std::to_string(vocabulary) + " ids; raise model.vocabulary or use the model's tokenizer.");
      }
    }
  }
}

int64_t TokenDataset::tokens() const {
  int64_t sum = 0;
  for (const TokenFile& file : files_) sum += file.tokens();
  return sum;
}

TokenFileWriter::TokenFileWriter(const std::string& path, bool wide) : file_(path), wide_(wide) {
  file_.write(std::string(size_t(kHeader), '\0'));
}

void TokenFileWriter::append(const std::vector<int32_t>& tokens) {
  if (wide_) {
    file_.write(std::as_bytes(std::span(tokens)));
  } else {
    const std::vector<uint16_t> narrow(tokens.begin(), tokens.end());
    file_.write(std::as_bytes(std::span(narrow)));
  }
  tokens_ += int64_t(tokens.size());
}

void TokenFileWriter::commit() {
  if (tokens_ > INT32_MAX) throw Error("a token file holds at most 2147483647 tokens; lower --shard-tokens.");
  const int32_t header[3] = {wide_ ? kMagic32 : kMagic16, wide_ ? kVersion32 : kVersion16, int32_t(tokens_)};
  file_.write_at(std::as_bytes(std::span(header)), 0);
  file_.commit();
}

}  // namespace strata
