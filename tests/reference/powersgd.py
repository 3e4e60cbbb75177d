#!/usr/bin/env python3
"""Records what PowerSGD (Vogels, Karimireddy and Jaggi, arXiv 1905.13727, algorithms 1 and 2) makes of made-up gradients
of several ranks, step by step: a plain NumPy program of the paper, in f64, into plugins/powersgd/powersgd_recorded.h.

With --torch it also runs PyTorch's powerSGD_hook on gloo, with the same ranks and the same first factors, and asserts
that sums and errors are the same (needs torch; nothing is recorded from it).
"""
import sys

import numpy as np

RANKS, STEPS, ROWS, COLUMNS, RANK = 3, 4, 13, 7, 2


def gradient(rank, step):
    i, j = np.meshgrid(np.arange(ROWS), np.arange(COLUMNS), indexing="ij")
    return np.float32(np.sin(1.7 * i + 2.3 * j * (rank + 1) + 0.9 * step) + 0.5 * np.cos(i * j + step)).astype(np.float64)


def first_query():
    j, k = np.meshgrid(np.arange(COLUMNS), np.arange(RANK), indexing="ij")
    return np.float32(np.cos(1.1 * j + 2.9 * k)).astype(np.float64)


def orthogonalized(p):
    p = p.copy()
    for k in range(p.shape[1]):
        p[:, k] /= np.linalg.norm(p[:, k])
        for l in range(k + 1, p.shape[1]):
            p[:, l] -= (p[:, k] @ p[:, l]) * p[:, k]
    return p


def power_sgd():
    """Per step: the mean's approximation, and each rank's error after it."""
    query = first_query()
    errors = [np.zeros((ROWS, COLUMNS)) for _ in range(RANKS)]
    for step in range(STEPS):
        deltas = [gradient(w, step) + errors[w] for w in range(RANKS)]
        p = orthogonalized(np.mean([d @ query for d in deltas], axis=0))
        query = np.mean([d.T @ p for d in deltas], axis=0)
        approximation = p @ query.T
        errors = [d - approximation for d in deltas]
        yield approximation, errors


def hook_rank(rank, port, queue):
    import os

    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.set_default_dtype(torch.float64)
    weight = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    model = torch.nn.parallel.DistributedDataParallel(weight)
    # Two steps are the fewest that it lets pass before compression begins; their gradients are 0.
    state = hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2, min_compression_rate=0.1,
                               use_error_feedback=True, warm_start=True, orthogonalization_epsilon=0)
    model.register_comm_hook(state, hook.powerSGD_hook)
    real = hook.torch.randn

    def first(*shape, **more):
        q = torch.tensor(first_query())
        assert tuple(shape) in ((COLUMNS, RANK), ((COLUMNS, RANK),)) or shape[-2:] == (COLUMNS, RANK), shape
        return q.reshape(real(*shape, **more).shape)

    hook.torch.randn = first
    seen = []
    for step in range(-2, STEPS):
        g = torch.zeros(ROWS, COLUMNS) if step < 0 else torch.tensor(gradient(rank, step))
        model.zero_grad()
        # d/dW of sum((W x) * y) summed over unit vectors x is the matrix itself.
        (model(torch.eye(COLUMNS)) * g.T).sum().backward()
        if step >= 0:
            seen.append((weight.weight.grad.numpy().copy(), state.error_dict[0].numpy().reshape(ROWS, COLUMNS).copy()))
    queue.put((rank, seen))
    dist.barrier()
    dist.destroy_process_group()


def compare_with_torch():
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=hook_rank, args=(r, 29571, queue)) for r in range(RANKS)]
    for p in processes:
        p.start()
    seen = dict(queue.get(timeout=120) for _ in processes)
    for p in processes:
        p.join()
    worst = 0
    for step, (approximation, errors) in enumerate(power_sgd()):
        for r in range(RANKS):
            worst = max(worst, np.abs(seen[r][step][0] - approximation).max(), np.abs(seen[r][step][1] - errors[r]).max())
    print(f"PyTorch's hook: the largest difference of means and errors over {STEPS} steps is {worst:.3g}")
    assert worst < 1e-9


def list_of(values):
    return "{" + ", ".join(f"{x:.9g}" for x in np.asarray(values).ravel()) + "}"


def record(path):
    with open(path, "w") as out:
        out.write(f"""// Recorded by tests/reference/powersgd.py: PowerSGD of made-up gradients, by a NumPy program of the paper in f64.
#pragma once

// clang-format off
namespace strata::powersgd::recorded {{
constexpr int kRanks = {RANKS}, kSteps = {STEPS}, kRows = {ROWS}, kColumns = {COLUMNS}, kRank = {RANK};
// The mean's approximation after each step, and the errors of all ranks.
constexpr double kMean[kSteps][kRows * kColumns] = {{
""")
        steps = list(power_sgd())
        for approximation, _ in steps:
            out.write(list_of(approximation) + ",\n")
        out.write("};\nconstexpr double kErrors[kSteps][kRanks][kRows * kColumns] = {\n")
        for _, errors in steps:
            out.write("{" + ",\n".join(list_of(e) for e in errors) + "},\n")
        out.write("};\n}  // namespace strata::powersgd::recorded\n// clang-format on\n")


if __name__ == "__main__":
    if "--torch" in sys.argv:
        compare_with_torch()
    else:
        record("plugins/powersgd/powersgd_recorded.h")
