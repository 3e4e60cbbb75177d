"""The peer of collectives_bench.cpp over PyTorch's gloo: the same calls, sizes and batches. RANKS BYTES..."""
import os
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def median_seconds(call):
    call()
    dist.barrier()
    began = time.perf_counter()
    call()
    calls = torch.tensor(min(max(0.05 / (time.perf_counter() - began), 1), 2000))
    dist.all_reduce(calls, dist.ReduceOp.MAX)
    batches = []
    for _ in range(7):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(int(calls)):
            call()
        dist.barrier()
        batches.append((time.perf_counter() - began) / int(calls))
    return sorted(batches)[3]


def run(rank, size, sizes):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["PORT"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    for count in sizes:
        part = count // size // 64 * 16
        data, own = torch.ones(count // 4), torch.ones(part)
        whole = torch.ones(part * size)
        calls = {"all_reduce": lambda: dist.all_reduce(data),
                 "reduce_scatter": lambda: dist.reduce_scatter_tensor(own, whole),
                 "all_gather": lambda: dist.all_gather_into_tensor(whole, own)}
        for name, call in calls.items():
            try:
                seconds = median_seconds(call)
            except RuntimeError as error:  # gloo has no such collective in this release
                seconds = float("nan")
                if rank == 0:
                    print(error, file=sys.stderr)
            if rank == 0:
                print(name, count, f"{seconds:.9f}", flush=True)
            data.fill_(1), whole.fill_(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    size = int(sys.argv[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["PORT"] = str(free.getsockname()[1])
    mp.spawn(run, (size, [int(word) for word in sys.argv[2:]]), nprocs=size)
