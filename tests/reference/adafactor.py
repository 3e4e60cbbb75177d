#!/usr/bin/env python3
"""Records parameters after a few steps of transformers' Adafactor, in float64, for plugins/adafactor/adafactor_test.cpp.

Needs torch and transformers from PyPI. Run from the repository's root:
    python tests/reference/adafactor.py > plugins/adafactor/adafactor_recorded.h
"""
import textwrap

import torch
from transformers.optimization import Adafactor

STEPS = 5
CASES = [  # name, shape, options of transformers' Adafactor
    ("matrix", (5, 7), {}),
    ("vector", (6,), {}),
    ("batch_of_matrices", (2, 3, 4), {}),
    ("single_row", (1, 5), {}),
    ("first_moment", (4, 3), {"beta1": 0.9}),
    ("fixed_rate", (3, 6), {"lr": 0.02, "relative_step": False, "weight_decay": 0.1}),
    ("fixed_rate_unscaled", (4,), {"lr": 0.02, "relative_step": False, "scale_parameter": False, "beta1": 0.8}),
]


def main():
    print("// Recorded by tests/reference/adafactor.py; not to be edited.\n#pragma once\n#include <vector>\n")
    print("namespace strata::adafactor::recorded {\n")
    print(f"inline constexpr int kSteps = {STEPS};")
    for name, shape, options in CASES:
        count = torch.Size(shape).numel()
        index = torch.arange(count, dtype=torch.float64)
        parameter = torch.nn.Parameter((0.3 * torch.sin(index + 1)).reshape(shape))
        optimizer = Adafactor([parameter], **options)
        for step in range(1, STEPS + 1):
            parameter.grad = (torch.cos(0.7 * index + step) / step).reshape(shape)
            optimizer.step()
        values = ", ".join(f"{v:.12g}" for v in parameter.detach().flatten().tolist())
        print(f"// shape {shape}, {options or 'defaults'}")
        print(textwrap.fill(f"inline const std::vector<double> k_{name}{{{values}}};", 118, subsequent_indent="    "))
    print("\n}  // namespace strata::adafactor::recorded")


main()
