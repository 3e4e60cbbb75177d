"""Trains GPT-2's shape with PyTorch's tensor and sequence parallelism on this CPU and prints one JSON line: the peer that
tools/bench/tensor compares with.

As PyTorch's own tutorial and torchtitan lay it out: queries, keys, values and the up projection column by column, the
output and down projections row by row, norms and the residual stream split along the sequence, the vocabulary of the
embedding and of the loss divided (loss_parallel: logits are not gathered). Fused scaled_dot_product_attention and AdamW,
fp32, gloo. Initial weights and tokens come from files (--weights: safetensors with GPT-2's names, --tokens: llm.c's
format). Rank 0 prints.
"""
import argparse
import json
import statistics
import struct
import tempfile
import time

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
                                               loss_parallel, parallelize_module)
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, hidden, head_size):
        super().__init__()
        self.head_size = head_size
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x):
        q, k, v = (y.unflatten(2, (-1, self.head_size)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, hidden, head_size):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention, self.feed_forward = Attention(hidden, head_size), FeedForward(hidden)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, layers, hidden, heads, vocabulary, context):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(context, hidden)
        self.blocks = nn.ModuleList(Block(hidden, hidden // heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, x):
        y = self.tokens(x) + self.positions(torch.arange(x.shape[1]).expand_as(x))
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y))


def load(model, path):
    """Whole parameters of a file with GPT-2's names, whose matrices are (in, out)."""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = file.read()

    def tensor(name):
        begin, end = header[name]["data_offsets"]
        return torch.frombuffer(bytearray(data[begin:end]), dtype=torch.float32).view(header[name]["shape"])

    def fill(module, name, turned=False):
        module.weight.data.copy_(tensor(name + ".weight").T if turned else tensor(name + ".weight"))
        if getattr(module, "bias", None) is not None:
            module.bias.data.copy_(tensor(name + ".bias"))

    model.tokens.weight.data.copy_(tensor("wte.weight"))
    model.positions.weight.data.copy_(tensor("wpe.weight"))
    fill(model.norm, "ln_f")
    for i, block in enumerate(model.blocks):
        fill(block.norm1, f"h.{i}.ln_1")
        fill(block.norm2, f"h.{i}.ln_2")
        fill(block.attention.out, f"h.{i}.attn.c_proj", True)
        fill(block.feed_forward.up, f"h.{i}.mlp.c_fc", True)
        fill(block.feed_forward.down, f"h.{i}.mlp.c_proj", True)
        weights = tensor(f"h.{i}.attn.c_attn.weight").T.chunk(3)
        biases = tensor(f"h.{i}.attn.c_attn.bias").chunk(3)
        for module, weight, bias in zip((block.attention.q, block.attention.k, block.attention.v), weights, biases):
            module.weight.data.copy_(weight)
            module.bias.data.copy_(bias)


def spread(model, mesh):
    whole, split = Replicate(), Shard(1)  # of (batch, time, hidden)
    parallelize_module(model, mesh, {
        "tokens": RowwiseParallel(input_layouts=whole, output_layouts=split),
        "positions": RowwiseParallel(input_layouts=whole, output_layouts=split),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=split, output_layouts=Shard(-1), use_local_output=False)})
    for block in model.blocks:
        parallelize_module(block, mesh, {
            "norm1": SequenceParallel(), "norm2": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(split,), desired_input_layouts=(whole,)),
            "attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(), "attention.v": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=split),
            "feed_forward": PrepareModuleInput(input_layouts=(split,), desired_input_layouts=(whole,)),
            "feed_forward.up": ColwiseParallel(), "feed_forward.down": RowwiseParallel(output_layouts=split)})
    model.head.weight = model.tokens.weight  # tied: both have rows of the vocabulary


def run(rank, arguments):
    torch.set_num_threads(arguments.threads)
    torch.distributed.init_process_group("gloo", init_method=f"file://{arguments.meeting}", rank=rank, world_size=arguments.ranks)
    mesh = init_device_mesh("cpu", (arguments.ranks,))
    model = Gpt(arguments.layers, arguments.hidden, arguments.heads, arguments.vocabulary, arguments.context)
    load(model, arguments.weights)
    spread(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0, fused=arguments.fused)
    with open(arguments.tokens, "rb") as file:
        file.seek(1024)
        count = arguments.batch * arguments.time + 1  # one batch, again and again
        line = torch.tensor(struct.unpack(f"<{count}H", file.read(2 * count)))
    x = line[:-1].view(arguments.batch, arguments.time)
    targets = line[1:].view(arguments.batch, arguments.time)
    seconds, losses = [], []
    for _ in range(arguments.steps):
        begin = time.perf_counter()
        with loss_parallel():
            loss = F.cross_entropy(model(x).flatten(0, 1), targets.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss))
        seconds.append(time.perf_counter() - begin)
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    if rank == 0:
        print(json.dumps({"seconds": statistics.median(seconds[2:]), "peak_bytes": peak, "losses": losses,
                          "torch": torch.__version__}), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    for name, default in [("steps", 8), ("threads", 1), ("batch", 4), ("time", 256), ("ranks", 2), ("layers", 12), ("hidden", 768),
                          ("heads", 12), ("vocabulary", 50257), ("context", 1024)]:
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--no-fused", dest="fused", action="store_false")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments.meeting = folder + "/meeting"
        torch.multiprocessing.spawn(run, (arguments,), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
