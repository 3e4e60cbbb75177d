// Decisions found by measuring, kept in a file from run to run: what is measured anew may be decided anew, and another
// algorithm sums in another order.
#pragma once
#include <functional>
#include <string>

namespace strata::cuda {

class Choices {
 public:
  explicit Choices(std::string path);  // of the file, made when needed; empty: none
  // What is kept under `key` (one line of text), or what `measure` gives, kept from now on; bytes of any length but 0.
  // Of several processes one measures and the others wait for it. Where no file can be written `otherwise` is taken, at
  // every run: rather always the same than sometimes faster.
  std::string get(const std::string& key, const std::function<std::string()>& measure,
                  const std::function<std::string()>& otherwise) const;

 private:
  std::string path_;
};

}  // namespace strata::cuda
