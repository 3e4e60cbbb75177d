// Parts in memory and in files; see parts.h.
#include "engine/verify/parts.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <sstream>

#include "memory/atomic_file.h"
#include "strata/layout.h"

namespace strata::verifying {
namespace {

template <class T>
void put_number(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}
void put_text(std::string& out, std::string_view text) {
  put_number(out, int64_t(text.size()));
  out.append(text);
}

const char* taken(const std::string& text, size_t& at, size_t bytes) {
  if (bytes > text.size() - at) throw Error("a rank left an incomplete result.", ExitCode::failed);
  at += bytes;
  return text.data() + at - bytes;
}
template <class T>
T number_at_place(const std::string& text, size_t& at) {
  T value;
  std::memcpy(&value, taken(text, at, sizeof value), sizeof value);
  return value;
}
std::string text_at_place(const std::string& text, size_t& at) {
  const auto size = size_t(number_at_place<int64_t>(text, at));
  return std::string(taken(text, at, size), size);
}

}  // namespace

Parts::Parts(Parts&& other) noexcept : parts_(std::move(other.parts_)), places_(std::move(other.places_)) {}

Parts::Part& Parts::of(const std::string& name, DType dtype, const Shape& shape) {
  const auto [found, is_new] = places_.try_emplace(name, parts_.size());
  if (is_new) {
    const auto count = size_t(elements(shape));
    parts_.push_back({{.name = name,
                       .dtype = dtype,
                       .shape = shape,
                       .bytes = std::vector<std::byte>(count * size_t(size_of(dtype)))},
                      std::vector<char>(count)});
  }
  return parts_[found->second];
}

// Elements from `at` on.
void Parts::put(Part& part, int64_t at, const std::byte* from, int64_t count) {
  const int64_t unit = size_of(part.whole.dtype);
  for (int64_t i = 0; i < count; ++i) {
    std::byte* to = part.whole.bytes.data() + (at + i) * unit;
    char& written = part.written[size_t(at + i)];
    if (written && std::memcmp(to, from + i * unit, size_t(unit)) != 0) part.whole.agrees = false;
    std::memcpy(to, from + i * unit, size_t(unit));
    written = 1;
  }
}

void Parts::add(const Tensor& tensor, const std::vector<std::byte>& part) {
  const std::lock_guard lock(mutex_);
  Part& whole = of(tensor.name, tensor.dtype, tensor.full_shape());
  GlobalIndex(tensor).runs(0, elements(tensor.shape), [&](int64_t local, int64_t global, int64_t count) {
    put(whole, global, part.data() + local * size_of(tensor.dtype), count);
  });
}

void Parts::add(const Parts& other) {
  const std::lock_guard lock(mutex_);
  for (const Part& part : other.parts_) {
    Part& whole = of(part.whole.name, part.whole.dtype, part.whole.shape);
    whole.whole.agrees &= part.whole.agrees && whole.whole.shape == part.whole.shape;
    if (whole.whole.shape != part.whole.shape) continue;
    const int64_t unit = size_of(part.whole.dtype);
    for (size_t i = 0; i < part.written.size(); ++i)
      if (part.written[i]) put(whole, int64_t(i), part.whole.bytes.data() + int64_t(i) * unit, 1);
  }
}

std::vector<Whole> Parts::take() {
  std::vector<Whole> wholes;
  for (Part& part : parts_) {
    part.whole.digest = XXH3_64bits(part.whole.bytes.data(), part.whole.bytes.size());
    wholes.push_back(std::move(part.whole));
  }
  parts_.clear(), places_.clear();
  return wholes;
}

void Parts::write(std::string& out) const {
  put_number(out, int64_t(parts_.size()));
  for (const Part& part : parts_) {
    put_text(out, part.whole.name);
    put_number(out, int32_t(part.whole.dtype));
    put_number(out, int64_t(part.whole.shape.size()));
    for (const int64_t size : part.whole.shape) put_number(out, size);
    put_number(out, char(part.whole.agrees));
    put_text(out, {reinterpret_cast<const char*>(part.whole.bytes.data()), part.whole.bytes.size()});
    put_text(out, {part.written.data(), part.written.size()});
  }
}

Parts Parts::read(const std::string& text, size_t& at) {
  Parts parts;
  for (auto left = number_at_place<int64_t>(text, at); left > 0; --left) {
    const std::string name = text_at_place(text, at);
    const auto dtype = DType(number_at_place<int32_t>(text, at));
    Shape shape;
    for (auto sizes = number_at_place<int64_t>(text, at); sizes > 0; --sizes)
      shape.push_back(number_at_place<int64_t>(text, at));
    const bool agrees = number_at_place<char>(text, at) != 0;
    const std::string bytes = text_at_place(text, at), written = text_at_place(text, at);
    Part& part = parts.of(name, dtype, shape);
    if (bytes.size() != part.whole.bytes.size() || written.size() != part.written.size())
      throw Error("a rank left a result that does not fit " + name + ".", ExitCode::failed);
    std::memcpy(part.whole.bytes.data(), bytes.data(), bytes.size());
    std::copy(written.begin(), written.end(), part.written.begin());
    part.whole.agrees = agrees;
  }
  return parts;
}

void write_result(const std::string& file, const Outcome& outcome, const Parts& parts) {
  std::string text;
  put_number(text, int32_t(outcome.end));
  put_text(text, outcome.reason);
  put_number(text, int64_t(outcome.losses.size()));
  for (const double loss : outcome.losses) put_number(text, loss);
  put_number(text, outcome.planned_bytes);
  put_number(text, outcome.measured_bytes);
  put_number(text, char(outcome.has_data));
  parts.write(text);
  AtomicFile out(file);
  out.write(text);
  out.commit();
}

Outcome read_results(const std::string& folder, int ranks) {
  Outcome outcome;
  Parts all;
  std::string lost;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string number = std::to_string(rank);
    std::ifstream file(folder + "/rank-" + number, std::ios::binary);
    if (!file) {
      lost += (lost.empty() ? "" : ", ") + number;
      continue;
    }
    std::stringstream content;
    content << file.rdbuf();
    const std::string text = content.str();
    size_t at = 0;
    Outcome one;
    one.end = Outcome::End(number_at_place<int32_t>(text, at));
    one.reason = text_at_place(text, at);
    for (auto left = number_at_place<int64_t>(text, at); left > 0; --left)
      one.losses.push_back(number_at_place<double>(text, at));
    one.planned_bytes = number_at_place<int64_t>(text, at);
    one.measured_bytes = number_at_place<int64_t>(text, at);
    one.has_data = number_at_place<char>(text, at) != 0;
    all.add(Parts::read(text, at));
    // What the others say is that a rank failed.
    const bool own = one.end != Outcome::End::done && one.reason.find("rank ") != 0;
    if (rank == 0 || (own && (outcome.end == Outcome::End::done || outcome.reason.find("rank ") == 0)))
      outcome = std::move(one);
  }
  outcome.ranks = ranks;
  if (!lost.empty() && outcome.end != Outcome::End::refused) {
    outcome.end = Outcome::End::failed;
    if (outcome.reason.empty()) outcome.reason = "the process of rank " + lost + " was lost.";
  }
  outcome.tensors = all.take();
  return outcome;
}

}  // namespace strata::verifying
