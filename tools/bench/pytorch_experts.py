"""Trains a transformers MixtralForCausalLM of random weights on random tokens on this CPU and prints one JSON line: the peer
that tools/bench/experts compares with. Fused scaled_dot_product_attention and AdamW, fp32.
"""
import argparse
import json
import statistics
import time

import torch
from transformers import MixtralConfig, MixtralForCausalLM

parser = argparse.ArgumentParser(description=__doc__)
for name in ("steps", "threads", "batch", "time", "layers", "hidden", "heads", "vocabulary", "experts", "k", "ffn"):
    parser.add_argument("--" + name, type=int, required=True)
arguments = parser.parse_args()

torch.set_num_threads(arguments.threads)
torch.manual_seed(1)
model = MixtralForCausalLM(MixtralConfig(
    vocab_size=arguments.vocabulary, hidden_size=arguments.hidden, intermediate_size=arguments.ffn,
    num_hidden_layers=arguments.layers, num_attention_heads=arguments.heads, num_key_value_heads=arguments.heads,
    max_position_embeddings=arguments.time, num_local_experts=arguments.experts, num_experts_per_tok=arguments.k,
    output_router_logits=True, router_aux_loss_coef=0.01, use_cache=False, attn_implementation="sdpa")).float().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
seconds = []
for step in range(arguments.steps):
    tokens = torch.randint(arguments.vocabulary, (arguments.batch, arguments.time))
    began = time.perf_counter()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    seconds.append(time.perf_counter() - began)
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"seconds": statistics.median(seconds[2:]), "peak_bytes": peak}))
