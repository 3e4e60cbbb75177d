#!/usr/bin/env python3
"""Writes engine/ops/gating_recorded.h: gates and losses of Switch Transformers (arXiv 2101.03961), GShard (arXiv
2006.16668, algorithm 1) and noisy top-k gating (arXiv 1701.06538), by the formulas of the papers, for inputs that test
and program both make: x[t, c] = sin(1 + 7 t + 3 c), w[e, c] = cos(2 + 5 e + 11 c), noise's w[e, c] = sin(3 + 2 e + c).

    python tests/reference/gating.py        # needs NumPy
"""
import math
import pathlib

import numpy as np

TOKENS, WIDTH, EXPERTS = 12, 5, 4
SEED, STEP, STREAM = 9, 3, 77


def philox(counter, key0, key1):  # Salmon et al., SC'11: Philox 4x32-10
    c = list(counter)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ key0, b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ key1, a & 0xFFFFFFFF]
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFFFFFF, (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def words(block):
    stream = STREAM ^ (STEP * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
    return philox([block, 0, stream & 0xFFFFFFFF, stream >> 32], SEED, 0)


def uniform(shape):
    return np.array([words(i // 4)[i % 4] / 2**32 for i in range(math.prod(shape))]).reshape(shape)


def normal(shape):
    def one(i):
        pair = words(i // 4)[i % 4 // 2 * 2 :]
        radius, angle = math.sqrt(-2 * math.log((pair[0] + 0.5) / 2**32)), 2 * math.pi * (pair[1] + 0.5) / 2**32
        return radius * (math.sin(angle) if i % 2 else math.cos(angle))

    return np.array([one(i) for i in range(math.prod(shape))]).reshape(shape)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


t, c, e = np.arange(TOKENS)[:, None], np.arange(WIDTH)[None, :], np.arange(EXPERTS)[:, None]
x, w, w_noise = np.sin(1.0 + 7 * t + 3 * c), np.cos(2.0 + 5 * e + 11 * c), np.sin(3.0 + 2 * e + c)


def switch(capacity, epsilon):
    p = softmax((x * (1 - epsilon + 2 * epsilon * uniform(x.shape))) @ w.T)
    gates, taken = np.zeros((TOKENS, EXPERTS)), np.zeros(EXPERTS)
    chosen = p.argmax(-1)
    for s in range(TOKENS):
        if taken[chosen[s]] < capacity:
            gates[s, chosen[s]] = p[s, chosen[s]]
        taken[chosen[s]] += 1
    f = taken / TOKENS  # equation 5
    return gates, EXPERTS * (f * p.mean(0)).sum()  # equation 4 without alpha


def gshard(capacity):
    p, rnd = softmax(x @ w.T), uniform((TOKENS, 2))[:, 1]
    gates, count = np.zeros((TOKENS, EXPERTS)), np.zeros(EXPERTS)
    order = np.argsort(-p, axis=-1)
    for s in range(TOKENS):  # first choices
        e1, e2 = order[s, :2]
        if count[e1] < capacity:
            gates[s, e1] = p[s, e1] / (p[s, e1] + p[s, e2])
        count[e1] += 1
    loss = (count / TOKENS * p.mean(0)).sum() / EXPERTS
    for s in range(TOKENS):
        e1, e2 = order[s, :2]
        g2 = p[s, e2] / (p[s, e1] + p[s, e2])
        if 2 * g2 > rnd[s]:
            if count[e2] < capacity:
                gates[s, e2] = g2
            count[e2] += 1
    return gates, loss


def shazeer(k):
    clean, width = x @ w.T, np.log1p(np.exp(x @ w_noise.T))
    h = clean + normal(clean.shape) * width  # equation 4
    gates, load = np.zeros((TOKENS, EXPERTS)), np.zeros(EXPERTS)
    for s in range(TOKENS):
        top = np.argsort(-h[s])[:k]
        gates[s, top] = softmax(h[s, top])  # equations 3 and 5
        for i in range(EXPERTS):
            threshold = np.sort(np.delete(h[s], i))[-k]  # kth_excluding
            load[i] += 0.5 * (1 + math.erf((clean[s, i] - threshold) / width[s, i] / math.sqrt(2)))  # equation 9
    variation = lambda v: v.var() / v.mean() ** 2
    return gates, variation(gates.sum(0)), variation(load)  # equations 7 and 11 without their factors


def listed(name, values):
    text = ", ".join(repr(float(v)) for v in np.ravel(values))
    return f"inline const double {name}[] = {{{text}}};\n"


text = "// Written by tests/reference/gating.py from the papers' formulas; do not edit.\n#pragma once\n\n"
text += "namespace strata::recorded_gating {\n\n// clang-format off\n"
for name, result in [("kSwitch", switch(3, 0.2)), ("kGshard", gshard(4)), ("kShazeer", shazeer(2))]:
    text += listed(name + "Gates", result[0]) + listed(name + "Losses", result[1:])
text += "// clang-format on\n\n}  // namespace strata::recorded_gating\n"
(pathlib.Path(__file__).resolve().parents[2] / "engine/ops/gating_recorded.h").write_text(text)
