// What this machine can do at most, measured: the denominators of every share that is reported.
#pragma once

namespace strata {

double measure_fma_peak(int threads);         // FLOP/s of fp32 fused multiply-adds (2 each) in registers, about 30 ms
double measure_triad_bandwidth(int threads);  // bytes/s of STREAM's triad a = b + s·c, arrays far larger than caches

}  // namespace strata
