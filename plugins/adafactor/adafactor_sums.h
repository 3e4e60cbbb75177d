// What Adafactor sums over the ranks that hold parts of a tensor: which of its matrices (or vectors) the rows of a part
// belong to, and sums that are taken plainly or exactly. Not what is summed: adafactor_part.cpp, adafactor_vector.cpp.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "plugins/adafactor/adafactor_part.h"
#include "strata/exact_sum.h"
#include "strata/layout.h"
#include "strata/simd.h"

namespace strata::adafactor {

// `step`: the first of the op's scalars among its inputs.
inline Settings settings(const Binding& b, int step) { return settings_of(b.attributes(), update_scalars(b, step)); }

// The rows that are here, of the matrices that the whole tensor is, and where in the sums what is of each.
struct Part {
  Matrices whole;
  int64_t first, rows, columns, digits;  // first: of the whole's rows; digits: doubles a sum
  int64_t most_rows, most_columns;       // that any rank has here: sums have room for as many on every rank
  // `like`: a tensor (rows, columns), or a vector, rows of one number, with the part's layout.
  Part(const OpView& v, const Tensor& like)
      : whole(matrices_of(in_rows(like.full_shape()), fused_of(v.attributes()))),
        first(box_of(like).offset[0]),
        rows(like.shape[0]),
        columns(in_rows(like.shape).back()),
        digits(v.attributes().integer("exact", 0) ? kExactSum : 1),
        most_rows(v.attributes().integer("most_rows", rows)),
        most_columns(v.attributes().integer("most_columns", columns)) {
    period_ = whole.members.back().first + whole.members.back().run;
    if (!whole.apart) whole.members = {{.first = 0, .run = whole.rows, .period = whole.rows, .rows = whole.rows}};
  }
  int64_t matrices() const { return whole.count(); }
  int64_t matrix_of(int64_t row) const {  // of the part
    const int64_t at = whole.apart ? (first + row) % period_ : 0;
    int64_t k = matrices() - 1;
    while (whole.members[size_t(k)].first > at) --k;
    return k;
  }
  double rows_of(int64_t k) const { return double(whole.members[size_t(k)].rows); }
  // The sums: squares by column of each matrix, then the rows' moments of each, then the parameter's squares of each.
  int64_t sums() const { return matrices() * (most_columns + 2); }
  int64_t column(int64_t k) const { return k * most_columns; }
  int64_t moments(int64_t k) const { return matrices() * most_columns + k; }
  int64_t squares(int64_t k) const { return matrices() * (most_columns + 1) + k; }
  // Where ranks hold other columns, sums of whole rows: the gradient's squares, then the parameter's.
  int64_t row_sums() const { return 2 * most_rows; }
  int64_t row_squares(int64_t i) const { return most_rows + i; }
  double value(const double* sums, int64_t i) const { return digits == 1 ? sums[i] : value_of_sum(sums + i * digits); }

 private:
  static Shape in_rows(Shape shape) {
    if (shape.size() == 1) shape.push_back(1);
    return shape;
  }
  int64_t period_ = 1;
};

// Sums that are taken number by number, plainly or exactly.
struct Sums {
  double* out;
  int64_t digits;
  void clear(int64_t first, int64_t count) const { std::fill_n(out + first * digits, count * digits, 0.0); }
  void add(int64_t i, double value) const {
    if (digits == 1)
      out[i] += value;
    else
      add_number(out + i * digits, value);
  }
  // After at most 2^20 numbers each.
  void carry_all(int64_t first, int64_t count) const {
    for (int64_t i = first; digits > 1 && i < first + count; ++i) carry(out + i * digits);
  }
};
inline constexpr int64_t kNumbers = int64_t{1} << 20;

inline TensorSpec like(const Tensor& tensor) { return {tensor.shape, tensor.dtype}; }
inline TensorSpec sums(int64_t count, const Part& part) { return {{count * part.digits}, DType::f64}; }

// As register_kind, of a kind that works in the type of its first input.
void add_part_kind(std::string name, std::string summary, std::function<std::vector<TensorSpec>(const OpView&)> shape,
                   Launch (*f32)(const Binding&), Launch (*f64)(const Binding&),
                   std::function<int64_t(const OpView&, int)> workspace = {});
void register_vector_kinds();

}  // namespace strata::adafactor
