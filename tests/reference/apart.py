#!/usr/bin/env python3
"""Records what ranks that train apart make of made-up gradients, step by step: plain NumPy programs in f64 of DiLoCo (Douillard
et al., arXiv 2311.08105, algorithm 1), with its exchange behind a step (arXiv 2501.18512), of local SGD (Stich, arXiv 1805.09767) and of D-PSGD (Lian et al., arXiv 1705.09056,
algorithm 1, a ring), each with AdamW as the update of a rank, into tests/apart_recorded.h.
"""
import numpy as np

RANKS, STEPS, ELEMENTS, EVERY = 3, 7, 16, 3
RATE, BETA1, BETA2, EPSILON = 1e-2, 0.9, 0.95, 1e-2
OUTER_RATE, MOMENTUM, KEEP = 0.7, 0.9, 0.25


def gradient(rank, step):
    """Of the mean loss over the rank's sequences; steps from 1."""
    i = np.arange(ELEMENTS)
    return np.sin(1.7 * i + 2.3 * (rank + 1) + 0.9 * step) + 0.3 * np.cos(0.5 * i * (rank + 1))


class AdamW:
    """Without decay, as for vectors."""

    def __init__(self):
        self.m, self.v, self.t = np.zeros(ELEMENTS), np.zeros(ELEMENTS), 0

    def step(self, g):
        self.t += 1
        self.m = BETA1 * self.m + (1 - BETA1) * g
        self.v = BETA2 * self.v + (1 - BETA2) * g * g
        return RATE * (self.m / (1 - BETA1**self.t)) / (np.sqrt(self.v / (1 - BETA2**self.t)) + EPSILON)


def diloco(nesterov):
    theta, velocity = np.ones(ELEMENTS), np.zeros(ELEMENTS)
    own, inner = [theta.copy() for _ in range(RANKS)], [AdamW() for _ in range(RANKS)]
    for step in range(1, STEPS + 1):
        for r in range(RANKS):
            own[r] = own[r] - inner[r].step(gradient(r, step))
        if step % EVERY == 0:
            delta = theta - np.mean(own, axis=0)  # the outer gradient
            if nesterov:
                velocity = MOMENTUM * velocity + delta
                theta = theta - OUTER_RATE * (delta + MOMENTUM * velocity)
            else:
                theta = theta - delta
            own = [theta.copy() for _ in range(RANKS)]
        yield np.array(own)


def streaming():
    """Of one fragment, whose outer gradient is on its way for a step (arXiv 2501.18512, algorithm 2: tau = 1)."""
    theta, velocity, taken = np.ones(ELEMENTS), np.zeros(ELEMENTS), None
    own, inner = [theta.copy() for _ in range(RANKS)], [AdamW() for _ in range(RANKS)]
    for step in range(1, STEPS + 1):
        for r in range(RANKS):
            own[r] = own[r] - inner[r].step(gradient(r, step))
        if taken is not None:
            delta = np.mean(taken, axis=0)
            velocity = MOMENTUM * velocity + delta
            theta = theta - OUTER_RATE * (delta + MOMENTUM * velocity)
            own, taken = [KEEP * o + (1 - KEEP) * theta for o in own], None
        if step % EVERY == 0:
            taken = [theta - o for o in own]
        yield np.array(own)


def gossip():
    x, inner = [np.ones(ELEMENTS) for _ in range(RANKS)], [AdamW() for _ in range(RANKS)]
    for step in range(1, STEPS + 1):
        updates = [inner[r].step(gradient(r, step)) for r in range(RANKS)]  # of gradients where the ranks are
        mixed = [(x[r - 1] + x[r] + x[(r + 1) % RANKS]) / 3 for r in range(RANKS)]
        x = [mixed[r] - updates[r] for r in range(RANKS)]
        yield np.array(x)


def list_of(values):
    return "{" + ", ".join(f"{x:.9g}" for x in np.asarray(values).ravel()) + "}"


def main():
    with open("tests/apart_recorded.h", "w") as out:
        out.write(f"""// Recorded by tests/reference/apart.py: ranks that train apart on made-up gradients, by NumPy programs of the papers.
#pragma once

// clang-format off
namespace strata::apart::recorded {{
constexpr int kRanks = {RANKS}, kSteps = {STEPS}, kElements = {ELEMENTS};
// Each rank's parameters after each step.
""")
        for name, steps in (("kDiLoCo", diloco(True)), ("kStreaming", streaming()), ("kLocalSgd", diloco(False)), ("kGossip", gossip())):
            out.write(f"constexpr double {name}[kSteps][kRanks][kElements] = {{\n")
            for ranks in steps:
                out.write("{" + ",\n".join(list_of(own) for own in ranks) + "},\n")
            out.write("};\n")
        out.write("}  // namespace strata::apart::recorded\n// clang-format on\n")


if __name__ == "__main__":
    main()
