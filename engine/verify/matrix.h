// `strata verify --matrix`: all plugins that are found, alone, in pairs and in larger sets by chance, over meshes of up
// to eight ranks, with sums in any order and reproducible ones, on a small model.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/verify/judge.h"

namespace strata::verifying {

struct MatrixSetup {
  Setup setup;         // the model, the optimizer, and options of plugins that make them do something on it
  std::string config;  // the user's, with which commands repeat cells; empty: none was given
  std::vector<std::string> backends = {"cpu"};
  uint64_t seed = 1;                    // of what is drawn
  int64_t larger = 40;                  // sets of three to six plugins
  bool modes = true;                    // also each plugin in the modes that its options name
  int64_t cells = 0;                    // so many of all, drawn; 0: all
  std::vector<std::string> only{};      // sets, as "clip+zero"; empty: all
  std::vector<std::string> smallest{};  // backends on which each set is run over its smallest mesh alone
};

struct Cell {
  std::vector<std::string> plugins;  // one, two, or more, in the order of Matrix::plugins
  std::string backend;
  Verdict verdict;
};

struct Matrix {
  std::vector<std::string> plugins;  // sorted; the model is not among them
  std::string optimizer;             // of sets that have none
  MatrixSetup setup;
  std::vector<Cell> cells;
  std::vector<Cell> failures;  // the smallest sets that are outside
  double seconds = 0;
  int64_t count(Verdict::Kind kind) const;
};

// `said` is called with each cell as it comes. Throws Error where there are no plugins, one says no effect, or `only`
// names one that is not found.
Matrix run_matrix(const MatrixSetup& setup, const std::function<void(const Cell&)>& said = {});

std::string matrix_text(const Matrix& matrix);  // a triangle of letters, refusals and failures
std::string matrix_json(const Matrix& matrix);
std::string matrix_page(const Matrix& matrix);  // one HTML page
// The command that repeats a cell of such a matrix.
std::string command_of(const Cell& cell, const MatrixSetup& of);

}  // namespace strata::verifying
