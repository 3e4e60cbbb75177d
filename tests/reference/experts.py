#!/usr/bin/env python3
"""Writes engine/ops/experts_recorded.h: results, balancing loss and gradients of the blocks of experts of transformers' Mixtral
and Qwen3-MoE (without normalized weights), for inputs that test and program both make by formula; the test says them.

    python tests/reference/experts.py        # needs torch and transformers (5.23)
"""
import pathlib

import torch
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

TOKENS, HIDDEN, EXPERTS, CHOSEN, INNER = 12, 5, 4, 2, 3
AUXILIARY = 0.15
torch.set_default_dtype(torch.float64)  # transformers takes the router's softmax in f32 all the same


def grid(rows, columns, function):
    return function(torch.arange(rows)[:, None].double(), torch.arange(columns)[None, :].double())


def numbers(function):  # (expert, hidden, inner), as we keep all three matrices of an expert
    return function(torch.arange(EXPERTS * HIDDEN * INNER).double()).reshape(EXPERTS, HIDDEN, INNER)


def record(block):
    x = grid(TOKENS, HIDDEN, lambda t, c: torch.sin(1 + 7 * t + 3 * c)).requires_grad_()
    gate, up, down = (numbers(f) for f in (lambda i: torch.sin(0.7 * i + 1), lambda i: torch.cos(0.9 * i + 2),
                                           lambda i: torch.sin(1.3 * i + 3)))
    with torch.no_grad():
        block.gate.weight.copy_(grid(EXPERTS, HIDDEN, lambda e, c: torch.cos(2 + 5 * e + 11 * c)))
        block.experts.gate_up_proj.copy_(torch.cat([gate, up], 2).transpose(1, 2))
        block.experts.down_proj.copy_(down)
    y = block(x[None])[0]
    loss = AUXILIARY * load_balancing_loss_func((block.gate(x)[0],), EXPERTS, CHOSEN)
    (y * grid(TOKENS, HIDDEN, lambda t, c: torch.cos(5 * t + 3 * c))).sum().add(loss).backward()
    both = block.experts.gate_up_proj.grad.transpose(1, 2)
    return [y, loss, x.grad, block.gate.weight.grad, both[..., INNER:], both[..., :INNER], block.experts.down_proj.grad]


def listed(name, tensors):
    text = f"inline const std::vector<std::vector<double>> {name} = {{\n"
    for tensor in tensors:
        text += "    {" + ", ".join(repr(float(v)) for v in tensor.detach().flatten()) + "},\n"
    return text + "};\n"


common = dict(hidden_size=HIDDEN, num_experts_per_tok=CHOSEN)
mixtral = MixtralSparseMoeBlock(MixtralConfig(intermediate_size=INNER, num_local_experts=EXPERTS, **common))
qwen = Qwen3MoeSparseMoeBlock(
    Qwen3MoeConfig(moe_intermediate_size=INNER, num_experts=EXPERTS, norm_topk_prob=False, **common))
text = "// Written by tests/reference/experts.py from transformers' blocks; do not edit.\n#pragma once\n#include <vector>\n\n"
text += "namespace strata::recorded_experts {\n\n// y, loss, then the gradients of x, router, up, gate and down.\n"
text += "// clang-format off\n" + listed("kMixtral", record(mixtral)) + listed("kQwen3", record(qwen))
text += "// clang-format on\n\n}  // namespace strata::recorded_experts\n"
(pathlib.Path(__file__).resolve().parents[2] / "engine/ops/experts_recorded.h").write_text(text)
