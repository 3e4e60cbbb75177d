// From the tensors of a Hugging Face folder to a model's parameters, one at a time: found and checked first, then read
// in small pieces, converted to f32 and put in place row by row.
#pragma once
#include <map>
#include <set>
#include <string>
#include <vector>

#include "engine/checkpoint/external_folder.h"
#include "strata/plugin.h"

namespace strata {

class ExternalImport {
 public:
  // `mapping`: the model's (Plugin::external_tensors). A tensor without rows is ignored; one with the same rows as an
  // earlier one is a second name of it (an output layer tied to the embedding) and may be absent, as either may.
  // `parameters`: names and shapes; f32, bf16 and f16 sources fill them whole. Throws Error when a tensor is missing,
  // has another shape or dtype, or is unknown to the mapping (but integers and truth values, which no parameter is made
  // of, are passed over), or a parameter is not filled exactly. `folder` must live as long.
  ExternalImport(const ExternalFolder& folder, std::vector<ExternalTensor> mapping,
                 std::map<std::string, Shape> parameters);

  // The second name of a tensor under which other numbers are stored; "" when there is none. Reads both.
  std::string differing_second_name() const;

  void read(const std::string& parameter, float* out) const;

 private:
  struct Source {
    ExternalTensor tensor;
    const ExternalFolder::Found* found;
    std::string where;  // file and name, for messages
  };
  struct SecondName {
    size_t source;
    Source other;
  };
  void check_filled();
  bool equal(const Source& a, const Source& b) const;
  std::string folder_;
  std::map<std::string, Shape> parameters_;
  std::vector<Source> sources_;
  std::map<std::string, std::set<size_t>> sources_of_;  // by parameter
  std::vector<SecondName> second_names_;
};

// Rows of a mapped tensor after transposing, and what one of them has.
int64_t external_rows(const ExternalTensor& tensor);
int64_t external_columns(const ExternalTensor& tensor);
// Whether two mapped tensors stand for the same rows of the same parameters.
bool same_rows(const ExternalTensor& a, const ExternalTensor& b);

}  // namespace strata
