"""Trains GPT-2's shape with DeepSpeed's ZeRO-Infinity on this CPU and prints one JSON line: the peer that
tools/bench/infinity compares with.

As DeepSpeed's documentation sets it up: ZeRO stage 3, parameters, gradients, masters and moments on NVMe through
async_io, DeepSpeedCPUAdam; with --pipelined, tiles read and written behind the update of others, which needs twelve
buffers as large as the largest parameter (with fewer it ends in an assertion, pipelined_optimizer_swapper.py). The
model is made under zero.Init, so it is never whole in memory. zero.Init is not told the type: 0.19.8 makes bf16 of
whatever is passed to it where the processor has no fp16 (`dtype or torch.float16 if ... else ...`,
partition_parameters.py). Weights and tokens come from files (--weights: safetensors with GPT-2's names, --tokens: llm.c's format).
"""
import argparse
import json
import logging
import os
import pathlib
import statistics
import struct
import sys
import time

# Before torch and deepspeed are imported: one rank, no launcher, and the ninja beside this Python.
os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1",
                  MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "29533"),
                  PATH=f"{pathlib.Path(sys.executable).parent}:{os.environ.get('PATH', '')}")

import torch

from pytorch_step import Gpt


def build():
    """Compiles what DeepSpeed compiles when it is used first, so that no measurement does."""
    import deepspeed
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder, CPUAdamBuilder
    if not AsyncIOBuilder().is_compatible(verbose=True):
        raise SystemExit("DeepSpeed's async_io cannot be built here: install libaio-dev, or name its folders in CFLAGS "
                         "and LDFLAGS.")
    AsyncIOBuilder().load(verbose=False)
    CPUAdamBuilder().load(verbose=False)
    print(f"deepspeed {deepspeed.__version__}, torch {torch.__version__}")


def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def settings(arguments):
    largest = max(arguments.vocabulary, 4 * arguments.hidden) * arguments.hidden
    nvme = {"device": "nvme", "nvme_path": arguments.directory, "pin_memory": False}
    return {"train_micro_batch_size_per_gpu": arguments.batch, "gradient_accumulation_steps": 1,
            "bf16": {"enabled": arguments.dtype == "bf16"},
            "zero_optimization": {"stage": 3, "sub_group_size": arguments.sub_group,
                                  "stage3_param_persistence_threshold": 0,
                                  "stage3_max_live_parameters": largest, "stage3_prefetch_bucket_size": largest,
                                  "offload_param": {**nvme, "buffer_count": 5, "buffer_size": largest},
                                  "offload_optimizer": {**nvme, "buffer_count": 12 if arguments.pipelined else 4,
                                                        "pipeline_read": arguments.pipelined,
                                                        "pipeline_write": arguments.pipelined}},
            "aio": {"block_size": 1 << 20, "queue_depth": 16, "intra_op_parallelism": 1, "single_submit": False,
                    "overlap_events": True}}


def load(model, path, gathered):
    """Whole parameters of a file with GPT-2's names, whose matrices are (in, out), one at a time."""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        start = file.tell()

        def tensor(name):
            begin, end = header[name]["data_offsets"]
            file.seek(start + begin)
            return torch.frombuffer(bytearray(file.read(end - begin)), dtype=torch.float32).view(header[name]["shape"])

        def fill(parameter, name, turned=False):
            with gathered(parameter, modifier_rank=0):
                parameter.data.copy_(tensor(name).T if turned else tensor(name))

        fill(model.tokens.weight, "wte.weight")
        fill(model.positions.weight, "wpe.weight")
        modules = [(model.norm, "ln_f")]
        for i, block in enumerate(model.blocks):
            modules += [(block.norm1, f"h.{i}.ln_1"), (block.norm2, f"h.{i}.ln_2"), (block.qkv, f"h.{i}.attn.c_attn"),
                        (block.out, f"h.{i}.attn.c_proj"), (block.up, f"h.{i}.mlp.c_fc"),
                        (block.down, f"h.{i}.mlp.c_proj")]
        for module, name in modules:
            fill(module.weight, name + ".weight", isinstance(module, torch.nn.Linear))
            fill(module.bias, name + ".bias")


def run(arguments):
    torch.set_num_threads(arguments.threads)
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo")
    config = settings(arguments)
    with open(arguments.tokens, "rb") as file:
        file.seek(1024)
        count = arguments.batch * arguments.time + 1  # one batch, again and again
        line = torch.tensor(struct.unpack(f"<{count}H", file.read(2 * count)))
    x = line[:-1].view(arguments.batch, arguments.time)
    targets = line[1:].view(arguments.batch, arguments.time)
    base = status("VmHWM")
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Gpt(arguments.layers, arguments.hidden, arguments.heads, arguments.vocabulary, arguments.context)
    load(model, arguments.weights, deepspeed.zero.GatheredParameters)
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    seconds, losses = [], []
    for _ in range(arguments.steps):
        begin = time.perf_counter()
        loss = engine(x, targets)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
        seconds.append(time.perf_counter() - begin)
    files = [path for path in pathlib.Path(arguments.directory).rglob("*") if path.is_file()]
    print(json.dumps({"seconds": statistics.median(seconds[2:]), "peak_bytes": status("VmHWM"), "base_bytes": base,
                      "nvme_bytes": sum(path.stat().st_blocks * 512 for path in files), "losses": losses,
                      "all_seconds": seconds, "torch": torch.__version__, "deepspeed": deepspeed.__version__}),
          flush=True)


def main():
    parser = argparse.ArgumentParser()
    for name, default in [("steps", 10), ("threads", 2), ("batch", 4), ("time", 256), ("layers", 12), ("hidden", 768),
                          ("heads", 12), ("vocabulary", 50257), ("context", 1024), ("sub-group", 20_000_000)]:
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--pipelined", action="store_true", help="read and write tiles behind the update of others")
    parser.add_argument("--weights")
    parser.add_argument("--tokens")
    parser.add_argument("--directory")
    parser.add_argument("--build", action="store_true", help="only compile DeepSpeed's extensions")
    arguments = parser.parse_args()
    if arguments.build:
        build()
    else:
        run(arguments)


if __name__ == "__main__":
    main()
