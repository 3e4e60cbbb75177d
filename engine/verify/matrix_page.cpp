// The matrix for people, as text and as a page, and for machines; see matrix.h.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "engine/verify/matrix.h"
#include "engine/verify/verify.h"

namespace strata::verifying {
namespace {

using Kind = Verdict::Kind;
constexpr Kind kKinds[] = {Kind::same, Kind::within, Kind::program, Kind::refused, Kind::outside};

char letter_of(Kind kind) {
  switch (kind) {
    case Kind::same:
      return '=';
    case Kind::within:
      return '~';
    case Kind::program:
      return 'p';
    case Kind::refused:
      return '-';
    case Kind::outside:
      return 'X';
  }
  return '?';
}

// What a set comes to: outside where one of its cells is, refused where all are, else the loosest.
Kind kind_of(const std::vector<const Cell*>& cells) {
  const auto any = [&](Kind kind) {
    return std::any_of(cells.begin(), cells.end(), [&](const Cell* cell) { return cell->verdict.kind == kind; });
  };
  for (const Kind kind : {Kind::outside, Kind::within, Kind::same, Kind::program})
    if (any(kind)) return kind;
  return Kind::refused;
}

std::map<std::vector<std::string>, std::vector<const Cell*>> by_set(const Matrix& matrix) {
  std::map<std::vector<std::string>, std::vector<const Cell*>> sets;
  for (const Cell& cell : matrix.cells) sets[cell.plugins].push_back(&cell);
  return sets;
}

std::vector<std::string> pair_of(const std::string& a, const std::string& b) {
  return a == b ? std::vector<std::string>{a} : std::vector<std::string>{std::min(a, b), std::max(a, b)};
}

std::string counts(const Matrix& matrix) {
  std::vector<std::string> parts;
  for (const Kind kind : kKinds) parts.push_back(fmt::format("{} {}", matrix.count(kind), name_of(kind)));
  return fmt::format("{} cells on {}: {}. Seed {}, {} steps, {:.0f} s.", matrix.cells.size(),
                     fmt::join(matrix.setup.backends, " and "), fmt::join(parts, ", "), matrix.setup.seed,
                     matrix.setup.setup.steps, matrix.seconds);
}

// Reasons of refusals, each with the sets that have it: how often, and the first.
std::vector<std::string> refusals(const Matrix& matrix) {
  std::map<std::string, std::vector<const Cell*>> reasons;
  for (const Cell& cell : matrix.cells)
    if (cell.verdict.kind == Kind::refused) reasons[cell.verdict.reason].push_back(&cell);
  std::vector<std::string> lines;
  for (const auto& [reason, cells] : reasons)
    lines.push_back(fmt::format("{} × ({}{}): {}", cells.size(), fmt::join(cells.front()->plugins, " + "),
                                cells.size() > 1 ? ", …" : "", reason));
  return lines;
}

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) result += c == '<' ? "&lt;" : c == '&' ? "&amp;" : c == '"' ? "&quot;" : std::string(1, c);
  return result;
}

constexpr const char* kStyle = R"(<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>strata verify --matrix</title><style>
body { font: 14px sans-serif; margin: 2em; max-width: 75em }
table.triangle { border-collapse: collapse }
table.triangle td { width: 26px; height: 26px; text-align: center; border: 1px solid #fff; cursor: pointer }
table.triangle th { font-weight: normal; text-align: right; padding-right: 6px }
table.triangle th.top { writing-mode: vertical-rl; text-align: left; padding: 4px 0 }
.same { background: #2e7d32; color: #fff } .within { background: #a5d6a7 } .program { background: #e0e0e0 }
.refused { background: #fff3c4 } .outside { background: #c62828; color: #fff }
table.list td { padding: 2px 10px 2px 4px; vertical-align: top } code { background: #f3f3f3 }
</style></head><body>
)";

std::string_view class_of(Kind kind) {
  switch (kind) {
    case Kind::same:
      return "same";
    case Kind::within:
      return "within";
    case Kind::program:
      return "program";
    case Kind::refused:
      return "refused";
    case Kind::outside:
      return "outside";
  }
  return "";
}

std::string rows_of(const std::vector<const Cell*>& cells) {
  std::string rows;
  for (const Cell* cell : cells)
    rows += fmt::format("<tr><td class=\"{}\">{}</td><td>{}</td><td>{}</td><td>{}</td></tr>\n",
                        class_of(cell->verdict.kind), letter_of(cell->verdict.kind), escaped(cell->backend),
                        escaped(mesh_text(cell->verdict.trial)), escaped(outcome_text(cell->verdict)));
  return rows;
}

}  // namespace

std::string matrix_text(const Matrix& matrix) {
  const auto sets = by_set(matrix);
  std::string text;
  for (size_t i = 0; i < matrix.plugins.size(); ++i) {
    text += fmt::format("{:>20} {:>2}", matrix.plugins[i], i + 1);
    for (size_t j = 0; j <= i; ++j) {
      const auto found = sets.find(pair_of(matrix.plugins[i], matrix.plugins[j]));
      text += fmt::format("  {}", found == sets.end() ? ' ' : letter_of(kind_of(found->second)));
    }
    text += "\n";
  }
  text += fmt::format("{:>23}", "");
  for (size_t i = 0; i < matrix.plugins.size(); ++i) text += fmt::format("{:>3}", i + 1);
  text += "\n\n= bit for bit   ~ within its bound   p the plain program itself   - refused   X outside of its bound\n" +
          counts(matrix) + "\n";
  const std::vector<std::string> reasons = refusals(matrix);
  if (!reasons.empty()) text += "\nrefused:\n";
  for (const std::string& line : reasons) text += "  " + line + "\n";
  if (!matrix.failures.empty()) text += "\noutside, as the smallest sets that are:\n";
  for (const Cell& cell : matrix.failures)
    text += fmt::format("  {}\n    {}\n", failure_of(cell.verdict), command_of(cell, matrix.setup));
  return text;
}

std::string matrix_json(const Matrix& matrix) {
  const auto listed = [&](const std::vector<Cell>& cells) {
    Json::Array list;
    for (const Cell& cell : cells) {
      Json::Object object = to_json(cell.verdict).object("a verdict");
      object.emplace_back("backend", cell.backend);
      object.emplace_back("command", command_of(cell, matrix.setup));
      list.emplace_back(std::move(object));
    }
    return list;
  };
  return Json(Json::Object{{"seed", int64_t(matrix.setup.seed)},
                           {"steps", matrix.setup.setup.steps},
                           {"cells", listed(matrix.cells)},
                           {"failures", listed(matrix.failures)}})
             .dump(1) +
         "\n";
}

std::string matrix_page(const Matrix& matrix) {
  const auto sets = by_set(matrix);
  std::string page = kStyle;
  page += "<h1>Every plugin beside every other</h1><p>" + escaped(counts(matrix)) +
          " Each set of plugins was run beside the plain program, from the same seed on the same data; see "
          "<code>strata verify --help</code>. Click a cell.</p>\n<table class=\"triangle\">\n";
  for (const std::string& row : matrix.plugins) {
    page += "<tr><th>" + escaped(row) + "</th>";
    for (const std::string& column : matrix.plugins) {
      if (column > row) break;
      const auto found = sets.find(pair_of(row, column));
      if (found == sets.end()) {
        page += "<td></td>";
        continue;
      }
      const Kind kind = kind_of(found->second);
      const std::string name = fmt::format("{}", fmt::join(found->first, "+"));
      page += fmt::format("<td class=\"{}\" title=\"{}\" onclick=\"location.hash='{}'\">{}</td>", class_of(kind),
                          escaped(name), escaped(name), letter_of(kind));
    }
    page += "</tr>\n";
  }
  page += "<tr><th></th>";
  for (const std::string& column : matrix.plugins) page += "<th class=\"top\">" + escaped(column) + "</th>";
  page += "</tr></table>\n<p>";
  for (const Kind kind : kKinds)
    page += fmt::format("<span class=\"{}\">&nbsp;{}&nbsp;</span> {} &nbsp; ", class_of(kind), letter_of(kind),
                        name_of(kind));
  page += "</p>\n";
  if (!matrix.failures.empty()) page += "<h2>Outside</h2>\n";
  for (const Cell& cell : matrix.failures)
    page += "<p>" + escaped(failure_of(cell.verdict)) + "<br><code>" + escaped(command_of(cell, matrix.setup)) +
            "</code></p>\n";
  page += "<h2>Cells</h2>\n";
  for (const auto& [set, cells] : sets)
    page +=
        fmt::format("<h3 id=\"{}\">{}</h3><code>{}</code><table class=\"list\">\n{}</table>\n",
                    escaped(fmt::format("{}", fmt::join(set, "+"))), escaped(fmt::format("{}", fmt::join(set, " + "))),
                    escaped(command_of(*cells.front(), matrix.setup)), rows_of(cells));
  return page + "</body></html>\n";
}

}  // namespace strata::verifying
