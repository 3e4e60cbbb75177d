// A machine that is not here, as a file describes it: how fast its device, its host and its disks are, so that
// `strata plan --machine` can predict a step there. Nothing is measured or run.
#pragma once
#include <string>

#include "engine/planning/rates.h"
#include "strata/mesh.h"

namespace strata {

class DescribedMachine {
 public:
  // A TOML file with one table, [rates]. Throws Error for whatever is wrong in it, and where `backend` is this host's
  // processors: how its threads share them cannot be described.
  DescribedMachine(const std::string& file, const std::string& backend);
  // Of a rank with so many folders on NVMe, each on a disk of its own; its axes of several ranks have one kind of link.
  Rates rates(size_t folders, const Mesh& mesh) const;

 private:
  Rates machine_;
  DiskRates disk_;
  Link link_;
};

}  // namespace strata
