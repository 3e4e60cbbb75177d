#!/usr/bin/env python3
"""Records what 1-bit Adam (Tang et al., arXiv 2102.02888, algorithm 1) makes of made-up gradients of several ranks, step by step:
a plain NumPy program of the paper, in f64, into plugins/adamw/onebit_adam_recorded.h. Compression is the paper's: of each
rank's list for each other (a share of the elements) the signs, times the mean of the absolute values of those of each sign, with
error feedback of what is sent and of what is handed on (the two rounds of section 5). Adam has its corrections of both moments,
which the paper leaves out: they are 1 where the warm-up is as long as the paper's.
"""
import numpy as np

RANKS, STEPS, FREEZE, ROWS, COLUMNS = 3, 9, 4, 32, 1
RATE, BETA1, BETA2, EPSILON = 1e-2, 0.9, 0.95, 1e-3


def gradient(rank, step):
    i = np.arange(ROWS * COLUMNS)
    return np.float32(np.sin(1.7 * i + 2.3 * (rank + 1) + 0.9 * step) + 0.3 * np.cos(0.5 * i * (rank + 1))).astype(np.float64)


def compressed(x):
    """The mean of those that have its sign, for each element (as 1-bit SGD has it; lists are shorter than a block)."""
    up = x >= 0
    return np.where(up, x[up].mean() if up.any() else 0.0, x[~up].mean() if (~up).any() else 0.0)


def shares():
    """Rows of each rank, as elements."""
    rows = np.array_split(np.arange(ROWS), RANKS)
    return [slice(r[0] * COLUMNS, (r[-1] + 1) * COLUMNS) for r in rows]


def one_bit_adam():
    x, m, v = np.ones(ROWS * COLUMNS), np.zeros(ROWS * COLUMNS), np.zeros(ROWS * COLUMNS)
    errors, of_share = [np.zeros(ROWS * COLUMNS) for _ in range(RANKS)], np.zeros(ROWS * COLUMNS)
    for step in range(1, STEPS + 1):
        gradients = [gradient(r, step) for r in range(RANKS)]
        if step <= FREEZE:
            g = np.mean(gradients, axis=0)
            m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
            corrected = v / (1 - BETA2**step)
        else:
            own = [(BETA1 * m + (1 - BETA1) * g) / RANKS + e for g, e in zip(gradients, errors)]
            next_m = np.zeros_like(m)
            for part in shares():
                sent = [compressed(o[part]) for o in own]
                for r in range(RANKS):
                    errors[r][part] = own[r][part] - sent[r]
                handed = np.sum(sent, axis=0) + of_share[part]
                next_m[part] = compressed(handed)
                of_share[part] = handed - next_m[part]
            m = next_m
            corrected = v / (1 - BETA2**FREEZE)
        x = x - RATE * (m / (1 - BETA1**step)) / (np.sqrt(corrected) + EPSILON)
        yield x.copy(), m.copy()


def list_of(values):
    return "{" + ", ".join(f"{x:.9g}" for x in np.asarray(values).ravel()) + "}"


with open("plugins/adamw/onebit_adam_recorded.h", "w") as out:
    out.write(f"""// Recorded by tests/reference/onebit_adam.py: 1-bit Adam on made-up gradients, by a NumPy program of the paper in f64.
#pragma once

// clang-format off
namespace strata::adamw::recorded {{
constexpr int kRanks = {RANKS}, kSteps = {STEPS}, kFreeze = {FREEZE}, kElements = {ROWS * COLUMNS};
// Parameters and first moment after each step.
constexpr double kSteps1[kSteps][2][kElements] = {{
""".replace("kSteps1", "kExpected"))
    for x, m in one_bit_adam():
        out.write("{" + list_of(x) + ",\n" + list_of(m) + "},\n")
    out.write("};\n}  // namespace strata::adamw::recorded\n// clang-format on\n")
