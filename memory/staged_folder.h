// Writes a set of files into a folder so that the set is there whole or not at all: they are made in a hidden folder
// inside it and renamed one by one, the one without which nothing else counts at last.
#pragma once
#include <functional>
#include <string>
#include <vector>

namespace strata {

class StagedFolder {
 public:
  // Makes `target` where need be (with the folders above it) and the hidden folder in it, locked against others that do
  // the same, and removes what killed ones left. Throws Error: usage where a folder cannot be made, failed when another
  // process is at it.
  explicit StagedFolder(const std::string& target);
  // Removes what was not published, and folders that this one made and that are empty.
  ~StagedFolder();
  StagedFolder(const StagedFolder&) = delete;

  const std::string& path() const { return staging_; }                // where to write
  const std::vector<std::string>& before() const { return before_; }  // names in the target when this began
  // Takes away those entries of `before` that `replaced` names, beginning with the last of `names`, then renames these
  // to the target, in order. When anything goes wrong (Error: failed), all is as it was before; after a kill in between
  // there are old files or new ones, and of the last none.
  void publish(const std::vector<std::string>& names, const std::function<bool(const std::string&)>& replaced);
  // The same of everything written, ending with `last`.
  void publish(const std::string& last, const std::function<bool(const std::string&)>& replaced);

 private:
  void prepare();
  void clean();
  std::string target_, staging_;
  std::vector<std::string> made_, before_;  // made_: folders, outermost first
  int lock_ = -1;
};

}  // namespace strata
