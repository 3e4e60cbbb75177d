// How fast this machine is, as planning sees it: measured once per machine and cached, or given by a test.
// Predictions of time come from here and from the kinds' cost rules; results never depend on them.
#pragma once
#include "strata/op_kind.h"

namespace strata {

struct Rates {
  double flops = 400e9;        // of matrix products on the compute stream, a second
  double half_flops = 400e9;   // of products of 16-bit numbers
  double memory = 40e9;        // bytes a second that a kernel moves to and from memory
  double copy = 10e9;          // bytes a second between device and host, either way
  double read = 2e9;           // bytes a second from the NVMe tier
  double write = 2e9;          // bytes a second to it
  double launch = 2e-6;        // seconds an op takes at least
  double copy_latency = 5e-6;  // seconds before the first byte
  double storage_latency = 150e-6;
  bool assumed = false;  // there is no such device here: a data sheet's
};

// Predicted seconds of one op on its stream; a "move" by the tiers of its two tensors.
double seconds_of(const OpView& view, const Rates& rates);

}  // namespace strata
