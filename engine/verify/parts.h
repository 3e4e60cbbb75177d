// What ranks hold of tensors, put together: by all threads of a process, or from the files of several processes.
#pragma once
#include <mutex>
#include <string>
#include <map>
#include <vector>

#include "engine/verify/outcome.h"

namespace strata::verifying {

// Whole tensors, filled by all ranks.
class Parts {
 public:
  void add(const Tensor& tensor, const std::vector<std::byte>& part);
  void add(const Parts& other);
  std::vector<Whole> take();

  void write(std::string& out) const;
  // Reads what `write` wrote at `at` of a text, and moves `at` behind it.
  static Parts read(const std::string& text, size_t& at);
  Parts() = default;
  Parts(Parts&& other) noexcept;

 private:
  struct Part {
    Whole whole;
    std::vector<char> written;  // by element
  };
  Part& of(const std::string& name, DType dtype, const Shape& shape);
  static void put(Part& part, int64_t at, const std::byte* from, int64_t count);

  std::mutex mutex_;
  std::vector<Part> parts_;
  std::map<std::string, size_t> places_;
};

// What one process hands to the one that started it.
void write_result(const std::string& file, const Outcome& outcome, const Parts& parts);
// Of all ranks, from the files rank-0, rank-1, … of a folder: the tensors of all, the rest of rank 0 or of the rank
// that failed. Whose file is missing was lost.
Outcome read_results(const std::string& folder, int ranks);

}  // namespace strata::verifying
