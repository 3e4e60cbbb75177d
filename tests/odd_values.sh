#!/usr/bin/env bash
# Odd and huge values of every numeric option, alone and two at once, through `check` and `plan`: each ends in 0, or in 2
# with one message, within memory and time. odd_values.sh BUILD_FOLDER; STRATA_SEED and STRATA_CASES draw others.
set -euo pipefail
set -- "$(realpath "$1")"
strata=$1/bin/strata
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. "$(dirname "$(realpath "$0")")/common.sh"
cd "$work"
prepare_data
cat >config.toml <<'TOML'
[run]
directory = "run"
[model]
plugin = "gpt"
layers = 2
hidden = 32
heads = 2
[data]
train = ["data/train_*.bin"]
validation = ["data/validation_*.bin"]
sequence_length = 16
global_batch = 4
micro_batch = 2
TOML
# Sizes that were once multiplied without a look at the product, and programs that were once built to the last op.
limit="ulimit -v 12000000;"
[[ $1 == *build ]] || limit=""  # sanitizers need address space of their own
python3 - "$strata" "$limit" <<'PY' || failures=$((failures + 1))
import json, os, random, subprocess, sys

strata, limit = sys.argv[1:]
seed, cases = int(os.environ.get("STRATA_SEED", 7)), int(os.environ.get("STRATA_CASES", 20))
schema = json.loads(subprocess.run([strata, "plugins", "--schema"], capture_output=True, check=True).stdout)


def numeric(options, prefix):
    kinds = {"integer", "number"}
    return [prefix + name for name, option in options.items()
            if kinds & set(option["type"] if isinstance(option.get("type"), list) else [option.get("type")])]


tables = schema["properties"]
own = [key for table in ("run", "data", "device", "host", "mesh", "network")
       for key in numeric(tables[table]["properties"], table + ".")]
gpt = [key for model in tables["model"]["oneOf"] if model["properties"]["plugin"]["const"] == "gpt"
       for key in numeric(model["properties"], "model.")]
plugins = {}
for name, node in tables["plugins"]["properties"].items():
    plugins[name] = numeric(node.get("properties", {}), f"plugins.{name}.")
assert len(own) > 20 and len(plugins) > 8, (own, plugins)
keys = own + gpt + [key for keys in plugins.values() for key in keys]
values = [0, -1, 1, 2, 3, 7, 1000, 65536, 10**6] + [2**n + d for n in (24, 31, 32, 40, 58, 62) for d in (-1, 0, 1)]
values += [2**63 - 1, -2**63, 1e300, -1e300, 1e-300, 0.5, float("nan"), float("inf")]
optimizers = ["adamw", "adafactor", "sm3", "adamw8bit"]


def text(value):
    return repr(value) if isinstance(value, float) else str(value)


# Each of these once crashed, never ended, or planned what is too much for 64 bits.
known = [{"model.vocabulary": 2**58}, {"model.context": 2**58}, {"model.hidden": 2**32}, {"model.layers": 10**6},
         {"data.global_batch": 2**24, "data.micro_batch": 1}, {"model.head_size": 2**62}, {"model.ffn": 2**61},
         {"model.heads": 2**62, "model.kv_heads": 2**62}, {"run.keep": 2**32},
         {"data.sequence_length": 2**24, "model.context": 2**24, "data.micro_batch": 2**24, "data.global_batch": 2**24}]
draw = random.Random(seed)


def value_for(key):
    while True:
        value = draw.choice(values)
        # Programs of millions of ops are allowed and take minutes.
        if key not in ("model.layers", "data.global_batch") or not 100 < value <= 65536:
            return value


drawn = known + [{key: value_for(key) for key in draw.sample(keys, draw.choice([1, 1, 2, 3]))} for _ in range(cases)]
failures = 0
for number, sets in enumerate(drawn):
    command = "check" if number % 2 else "plan"
    words = [strata, command, "config.toml"]
    asked = {key.split(".")[1] for key in sets if key.startswith("plugins.")}
    optimizer = (asked & set(optimizers) or {draw.choice(optimizers)}).pop()
    words += ["--set", f"plugins.{optimizer}={{}}"]
    if "mesh.data" in sets:
        words += ["--set", "plugins.zero={}"]
    for key, value in sets.items():
        words += ["--set", f"{key}={text(value)}"]
    try:
        done = subprocess.run(["bash", "-c", limit + 'exec "$@"', "-"] + words, capture_output=True, text=True,
                              timeout=500, stdin=subprocess.DEVNULL)
        messages = [line for line in done.stderr.splitlines() if line.startswith("strata: ")]
        right = done.returncode == 0 or (done.returncode == 2 and len(messages) == 1)
        right = right and "bad_alloc" not in done.stderr and "internal error" not in done.stderr
        what = f"exit {done.returncode}: {done.stderr[-2000:]}"
    except subprocess.TimeoutExpired:
        right, what = False, "does not end"
    if number < len(known) and right and done.returncode != 2:
        right, what = False, "was taken: " + done.stdout[-300:]
    if not right:
        failures += 1
        print("FAILED:", " ".join(words[1:]), what)
print(f"{len(drawn)} configurations, {failures} failed")
sys.exit(failures > 0)
PY
finish odd_values
