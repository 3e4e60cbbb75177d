#!/usr/bin/env bash
# The optimizer against its formula, by training a tiny model: test.sh STRATA PLUGIN_FOLDER
# First step: momentum is zero, so each parameter moves by learning_rate · sign(gradient), and m = (1 − beta2) · gradient.
set -euo pipefail
strata=$1 plugins=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
for i in $(seq 200); do echo "the quick brown fox jumps over the lazy dog $i"; done >text
"$strata" data prepare text --output data >/dev/null
cat >config.toml <<TOML
[run]
steps = 1
directory = "run"
plugin_path = ["$plugins"]
reproducible = true
[model]
plugin = "gpt"
layers = 1
hidden = 32
heads = 2
[data]
train = ["data/train_*.bin"]
sequence_length = 16
global_batch = 4
micro_batch = 2
[plugins.lion]
weight_decay = 0.0
TOML
train() { "$strata" train config.toml --set "run.directory=\"$1\"" "${@:2}" >/dev/null; }  # DIRECTORY SETTINGS...
train one --set plugins.lion.learning_rate=0.125
train two --set plugins.lion.learning_rate=0.25
train ranks --set plugins.lion.learning_rate=0.125 --set mesh.data=2 --set plugins.zero.stage=2
train long --set plugins.lion.learning_rate=0.003 --set run.steps=30
python3 - <<'PYTHON'
import glob, json, struct
def tensors(directory):
    found = {}
    for name in glob.glob(f"{directory}/step-*/*.safetensors"):
        with open(name, "rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
            base = file.tell()
            for key, entry in header.items():
                if entry.get("dtype") != "F32":
                    continue
                begin, end = entry["data_offsets"]
                file.seek(base + begin)
                found[key] = struct.unpack(f"<{(end - begin) // 4}f", file.read(end - begin))
    return found
one, two = tensors("one"), tensors("two")
parameters = [name for name in one if name + ".lion.m" in one]
assert len(parameters) > 10, list(one)
moved = 0
for name in parameters:
    for a, b, m in zip(one[name], two[name], one[name + ".lion.m"]):
        step = (m > 0) - (m < 0)
        assert abs((a - b) - 0.125 * step) < 1e-5, (name, a, b, m)
        moved += step != 0
assert moved > 1000
log = lambda directory: [json.loads(line)["loss"] for line in open(f"{directory}/log.jsonl")]
assert log("ranks") == log("one"), (log("ranks"), log("one"))
losses = log("long")
assert losses[-1] < 0.7 * losses[0], losses
PYTHON
echo "lion: as expected"
