"""Trains GPT-2 124M's shape with PyTorch on this CPU and prints one JSON line: the peer that tools/bench/step compares with.

The best reasonable form PyTorch has for it: fused scaled_dot_product_attention (never time x time), fused AdamW,
gradients set to None, tied embeddings, one cross-entropy over all tokens. fp32, as Strata's side. With --ranks: one process
a rank over gloo, as DDP, DDP with ZeroRedundancyOptimizer (stage 1), or FSDP2 (stage 2: parameters stay gathered
between forward and backward pass; stage 3: they do not), or DeepSpeed's ZeRO (pip install deepspeed). Rank 0 prints.
"""
import argparse
import json
import os
import statistics
import tempfile
import time

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, self.heads, C // self.heads).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(C, dim=2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers, hidden, heads, vocabulary, context):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(context, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x, targets):
        y = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            y = block(y)
        logits = F.linear(self.norm(y), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def spread(model, mode):
    """What computes the loss, and what steps, as the mode wants them."""
    adamw = dict(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    if mode in ("ddp", "zero1"):
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        if mode == "zero1":
            from torch.distributed.optim import ZeroRedundancyOptimizer
            return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **adamw)
    elif mode.startswith("deepspeed"):
        import deepspeed
        deepspeed.init_distributed(dist_backend="gloo")
        config = {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": int(mode[-1])}}
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), **adamw), config=config)
        return engine, engine
    elif mode != "alone":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=mode == "fsdp3")
        fully_shard(model, mesh=mesh, reshard_after_forward=mode == "fsdp3")
    return model, torch.optim.AdamW(model.parameters(), **adamw)


def run(rank, arguments):
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if arguments.mode.startswith("deepspeed"):
        os.environ.update(DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(arguments.ranks), LOCAL_SIZE=str(arguments.ranks))
    if arguments.ranks > 1:
        torch.distributed.init_process_group("gloo", init_method=f"file://{arguments.meeting}", rank=rank, world_size=arguments.ranks)
    model, optimizer = spread(Gpt(12, 768, 12, 50257, 1024), arguments.mode)
    step_of = torch.compile(model) if arguments.compile else model
    seconds = []
    torch.manual_seed(rank)
    for _ in range(arguments.steps):
        tokens = torch.randint(50257, (arguments.batch, arguments.time + 1))
        begin = time.perf_counter()
        loss = step_of(tokens[:, :-1], tokens[:, 1:])
        if optimizer is model:  # DeepSpeed's engine
            model.backward(loss)
            model.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss.item()
        seconds.append(time.perf_counter() - begin)
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    median = statistics.median(seconds[2:])  # the first steps allocate and compile
    if rank == 0:
        print(json.dumps({"seconds": median, "tokens_per_second": arguments.ranks * arguments.batch * arguments.time / median,
                          "peak_bytes": peak, "torch": torch.__version__}), flush=True)
    if arguments.ranks > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank")
    parser.add_argument("--time", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--mode", default="alone", choices=["alone", "ddp", "zero1", "fsdp2", "fsdp3", "deepspeed1", "deepspeed2", "deepspeed3"])
    arguments = parser.parse_args()
    if arguments.ranks == 1:
        run(0, arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.meeting = folder + "/meeting"
        torch.multiprocessing.spawn(run, (arguments,), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
