#!/usr/bin/env python3
"""Writes plugins/gist/fp8_recorded.h: every code of PyTorch's float8_e4m3fn and float8_e5m2 as a float, and the codes
PyTorch rounds some floats to. Needs torch (PyPI)."""
import pathlib
import torch

torch.manual_seed(1)
FORMATS = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}


def literal(value):
    return "NAN" if value != value else "INFINITY" if value == float("inf") else "-INFINITY" if value == -float("inf") else f"{value!r}f"


lines = ["// Written by tests/reference/fp8.py from PyTorch's float8 types; do not edit.", "#pragma once", "#include <cmath>", "",
         "namespace strata::gist::recorded {", ""]
for name, (dtype, largest) in FORMATS.items():
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float().tolist()
    lines.append(f"inline const float k_{name}[256] = {{{', '.join(literal(v) for v in values)}}};")
    exponents = torch.rand(400) * 40 - 30
    floats = (torch.randn(400) * 2.0 ** exponents).clamp(-largest, largest)
    codes = floats.to(dtype).view(torch.uint8).tolist()
    lines.append(f"inline const float k_{name}_from[400] = {{{', '.join(float(v).hex() + 'f' for v in floats.tolist())}}};")
    lines.append(f"inline const unsigned char k_{name}_to[400] = {{{', '.join(str(c) for c in codes)}}};")
    lines.append("")
lines += ["}  // namespace strata::gist::recorded", ""]
path = pathlib.Path(__file__).resolve().parents[2] / "plugins/gist/fp8_recorded.h"
path.write_text("\n".join(lines))
