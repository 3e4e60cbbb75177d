// See prepared_shards.h.
#include "engine/data/prepared_shards.h"

#include <algorithm>
#include <cstdio>

namespace strata {
namespace {

namespace fs = std::filesystem;

// Is this the name of a shard, such as train_000.bin, or of what stands beside one?
bool is_shard(const std::string& name) {
  const size_t digits = name.find('_') + 1;
  if (name.rfind("train_", 0) != 0 && name.rfind("validation_", 0) != 0) return false;
  const size_t dot = name.find_first_not_of("0123456789", digits);
  if (dot == name.npos || dot < digits + 3) return false;
  const std::string extension = name.substr(dot);
  return extension == ".bin" || extension == kMask || extension == kDocuments;
}

}  // namespace

bool is_prepared(const std::string& name) {
  return is_shard(name) || name == "tokenizer.json" || name == "tokenizer.model" || name == "tokenizer.txt";
}

ShardWriter::ShardWriter(fs::path folder, std::string prefix, bool wide, int64_t limit, uint64_t tokenizer)
    : folder_(std::move(folder)), prefix_(std::move(prefix)), wide_(wide), limit_(limit), tokenizer_(tokenizer) {}

void ShardWriter::append(std::span<const int32_t> ids, std::span<const uint8_t> counts) {
  while (!ids.empty()) {
    if (!writer_) {
      char number[32];
      std::snprintf(number, sizeof number, "_%03zu.bin", names_.size());
      names_.push_back(prefix_ + number);
      writer_.emplace((folder_ / names_.back()).string(), wide_, tokenizer_);
      marks_.emplace((folder_ / names_.back()).string());
    }
    if (begins_) marks_->begin_document();
    begins_ = false;
    const size_t count = std::min(ids.size(), size_t(limit_ - writer_->tokens()));
    writer_->append(ids.first(count));
    ids = ids.subspan(count);
    if (counts.empty()) {
      marks_->append(int64_t(count), true);
      counted_ += int64_t(count);
    } else {
      marks_->append(counts.first(count));
      counted_ += std::count_if(counts.begin(), counts.begin() + int64_t(count), [](uint8_t one) { return one != 0; });
      counts = counts.subspan(count);
    }
    tokens_ += int64_t(count);
    if (writer_->tokens() == limit_) close();
  }
}

void ShardWriter::begin_document() {
  begins_ = true;
  ++documents_;
}

void ShardWriter::close() {
  if (!writer_) return;
  marks_->commit();
  writer_->commit();
  marks_.reset();
  writer_.reset();
}

}  // namespace strata
