// The stages of a pipeline as `strata plan` plans them, from text of a configuration; or why they are refused.
#pragma once
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "engine/planning/stages_report.h"
#include "engine/runtime/job.h"
#include "tests/harness.h"

namespace strata::test {

// `more`: a plugin besides those that the configuration names.
inline std::vector<RunPlans> planned_stages(const std::string& config, const Rates& rates = {},
                                            Plugin* more = nullptr) {
  const TemporaryFolder folder;
  Session session(write_file(folder / "config.toml", config), {});
  session.rates = rates;
  if (more) session.plugins.push_back({"more", more});
  return plan_stages(session);
}

// What the one message says; nothing where they are planned.
inline std::string refusal_of_stages(const std::string& config) {
  try {
    planned_stages(config);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    return error.what();
  }
  return "";
}

}  // namespace strata::test
