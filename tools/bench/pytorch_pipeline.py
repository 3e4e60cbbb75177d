"""Trains GPT's shape in a pipeline with torch.distributed.pipelining on gloo: the peer that tools/bench/pipeline compares with.

Started once for all ranks; rank 0 prints one JSON line. fp32, fused attention, fused AdamW, untied embeddings, as Strata's side;
the model is cut at the blocks that --boundaries names.
"""
import argparse
import json
import os
import statistics
import tempfile
import time

import torch
from torch import nn
from torch.distributed import pipelining
from torch.nn import functional as F

from pytorch_step import Block

SCHEDULES = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B,
             "interleaved": pipelining.ScheduleInterleaved1F1B, "zero_bubble_v": pipelining.ScheduleZBVZeroBubble}


class Chunk(nn.Module):
    """Blocks of the model, with the embedding in front of the first and the head behind the last."""

    def __init__(self, a, first, end):
        super().__init__()
        self.tokens = nn.Embedding(a.vocabulary, a.hidden) if first == 0 else None
        self.positions = nn.Embedding(a.time, a.hidden) if first == 0 else None
        self.blocks = nn.ModuleList(Block(a.hidden, a.heads) for _ in range(first, end))
        self.norm = nn.LayerNorm(a.hidden) if end == a.layers else None
        self.head = nn.Linear(a.hidden, a.vocabulary, bias=False) if end == a.layers else None

    def forward(self, x):
        if self.tokens is not None:
            x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def own_chunks(schedule, rank, ranks, chunks):
    if schedule == "zero_bubble_v":
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * c for c in range(chunks)]


def run(rank, a):
    torch.set_num_threads(a.threads)
    torch.manual_seed(rank)
    torch.distributed.init_process_group("gloo", init_method=f"file://{a.meeting}", rank=rank, world_size=a.ranks)
    firsts = [0] + a.boundaries + [a.layers]
    own = own_chunks(a.schedule, rank, a.ranks, (len(firsts) - 1) // a.ranks)
    modules = [Chunk(a, firsts[g], firsts[g + 1]) for g in own]
    stages = [pipelining.PipelineStage(module, g, len(firsts) - 1, torch.device("cpu")) for module, g in zip(modules, own)]
    loss_of = lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    made = SCHEDULES[a.schedule]
    several = a.schedule in ("interleaved", "zero_bubble_v")
    schedule = made(stages if several else stages[0], a.microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=3e-4, betas=(0.9, 0.95),
                                  weight_decay=0.1, fused=True)
    first, last = 0 in own, len(firsts) - 2 in own
    seconds = []
    for _ in range(a.steps):
        tokens = torch.randint(a.vocabulary, (a.microbatches * a.batch, a.time + 1))
        torch.distributed.barrier()
        begin = time.perf_counter()
        inputs = [tokens[:, :-1].contiguous()] if first else []
        schedule.step(*inputs, **({"target": tokens[:, 1:].contiguous()} if last else {}))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.distributed.barrier()
        seconds.append(time.perf_counter() - begin)
    if rank == 0:
        print(json.dumps({"seconds": statistics.median(seconds[2:] or seconds), "torch": torch.__version__}), flush=True)
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may otherwise wait for each other at the end


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", required=True, choices=list(SCHEDULES))
    for name, default in dict(ranks=2, threads=1, steps=6, microbatches=8, batch=1, time=256, layers=12, hidden=768, heads=12, vocabulary=50257).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--boundaries", type=int, nargs="+", required=True, help="the first block of each chunk but the first")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        a.meeting = f"{folder}/meeting"
        torch.multiprocessing.spawn(run, (a,), nprocs=a.ranks)


if __name__ == "__main__":
    main()
