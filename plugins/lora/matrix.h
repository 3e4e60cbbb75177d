// The op that makes of an adapter's second matrix what a plain product takes. A weight may be several matrices whose
// rows alternate (Lasting::fused: queries, keys, values), and each that is adapted has an adapter of its own.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "strata/op_kind.h"

namespace strata::lora {

// Which rows of a weight belong to which of its matrices, and which of these are adapted. Rows repeat: `rows` of matrix
// 0, then of matrix 1, …, and again.
struct Rows {
  static constexpr size_t kMost = 16;  // matrices of a weight
  std::vector<int64_t> rows{1};        // of each matrix before they repeat
  std::vector<int64_t> chosen{0};      // the matrices that are adapted, ascending

  // Rows of the weight before they repeat, and those of them that are adapted.
  int64_t period() const { return std::accumulate(rows.begin(), rows.end(), int64_t{0}); }
  int64_t adapted() const {
    int64_t sum = 0;
    for (int64_t matrix : chosen) sum += rows[size_t(matrix)];
    return sum;
  }
  int64_t matrix_of(int64_t row) const {
    row %= period();
    int64_t matrix = 0;
    while (row >= rows[size_t(matrix)]) row -= rows[size_t(matrix++)];
    return matrix;
  }
  // Where a row of the weight is among those that are adapted, and its matrix among the chosen; -1: nowhere.
  struct Place {
    int64_t row = -1, adapter = -1;
  };
  Place place_of(int64_t row) const {
    const int64_t matrix = matrix_of(row);
    const auto found = std::find(chosen.begin(), chosen.end(), matrix);
    if (found == chosen.end()) return {};
    int64_t left_out = 0;
    for (int64_t before = 0; before < matrix; ++before)
      if (std::find(chosen.begin(), chosen.end(), before) == chosen.end()) left_out += rows[size_t(before)];
    return {row / period() * adapted() + row % period() - left_out, found - chosen.begin()};
  }

  Attributes attributes() const { return {{"rows", text_of(rows)}, {"chosen", text_of(chosen)}}; }
  static Rows of(const Attributes& attributes) {
    return {numbers_of(attributes.string("rows")), numbers_of(attributes.string("chosen"))};
  }

 private:
  static std::string text_of(const std::vector<int64_t>& numbers) {
    std::string text;
    for (int64_t number : numbers) text += (text.empty() ? "" : " ") + std::to_string(number);
    return text;
  }
  static std::vector<int64_t> numbers_of(const std::string& text) {
    std::vector<int64_t> numbers;
    std::istringstream in(text);
    for (int64_t number; in >> number;) numbers.push_back(number);
    return numbers;
  }
};

// lora_matrix: b (adapted rows, r) -> (rows of the weight, r · chosen matrices): `scale` times each row of b in the
// columns of its own adapter, zeros elsewhere. So x aᵀ with the adapters' first matrices below each other, times that,
// is what all adapters add.
void register_matrix_kinds();

}  // namespace strata::lora
