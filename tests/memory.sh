#!/usr/bin/env bash
# The memory of the process against what `strata plan` says of it, in thirteen combinations and three first runs on a machine: at most 30 MiB and 2% apart.
# And what planning takes: at most 250 bytes an op. memory.sh BUILD_FOLDER
set -euo pipefail
strata=$(realpath "$1")/bin/strata
if [[ $(ldd "$strata" "$(dirname "$strata")/../lib/libstrata.so") =~ lib(a|t|ub)san ]]; then
  echo "skipped: a sanitizer's allocator takes memory of its own"
  exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. "$(dirname "$(realpath "$0")")/common.sh"
cd "$work"
prepare_data

# One tensor, the embedding, is larger than what may be beyond the plan, and so is the scratch memory of products were it
# not planned: of many layers together, and of one (oneDNN's own) together with the other.
cat >config.toml <<TOML
[run]
steps = 2
directory = "run"
[model]
plugin = "gpt"
layers = 4
hidden = 256
heads = 4
vocabulary = 50000
[data]
train = ["data/train_*.bin"]
sequence_length = 64
global_batch = 4
micro_batch = 2
[device]
threads = 2
[plugins.adamw]
TOML

# measured NAME SET...: plans, trains, and again from the checkpoint; the most that the process of rank 0 took each time.
# With cache=new nothing is known about the machine when training starts, and with cache=none nothing is kept of it.
cache=kept
measured() {
  local name=$1 set sets=()
  shift
  for set in "$@"; do sets+=(--set "$set"); done
  rm -rf run nvme
  mkdir nvme
  "$strata" plan config.toml --json "${sets[@]}" >plan.json || return 1
  python3 - "$name" "$strata" "$cache" "${sets[@]}" <<'PYTHON' || fail "$name"
import json, os, re, subprocess, sys, tempfile
name, strata, cache, sets = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]
plan = json.load(open("plan.json"))
planned = plan.get("stages", [plan])[0]["process"]
right = True
for what, words in (("started", ["--set", "run.steps=2"]), ("resumed", ["--set", "run.steps=3", "--resume"])):
    places = {} if cache == "none" else {"XDG_CACHE_HOME": tempfile.mkdtemp(dir=".")} if cache == "new" else dict(os.environ)
    environment = {**{name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}, **places}
    process = subprocess.run([strata, "train", "config.toml", *sets, *words], capture_output=True, text=True, env=environment)
    if cache != "kept" and "measuring this machine" not in process.stderr:
        print("  nothing was measured")
        right = False
    # Its own high-water mark, as the kernel keeps it: not that of a process beside it which measures the machine.
    found = re.search(r"^process, peak +[0-9.]+ [KMG]iB +([0-9.]+) ([KMG])iB$", process.stdout, re.MULTILINE)
    total = planned["total"]
    taken = int(float(found[1]) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[found[2]]) if found else 0
    allowed = (30 << 20) + 0.02 * total
    print(f"{name}, {what}: planned {total >> 20} MiB, taken {taken >> 20} MiB")
    if process.returncode != 0 or abs(taken - total) > allowed:
        print(f"  exit {process.returncode}; planned in detail: {planned}; allowed beside: {int(allowed) >> 20} MiB")
        print(process.stderr)
        right = False
sys.exit(not right)
PYTHON
}

nvme=(plugins.offload.{optimizer,parameters,gradients,activations}=nvme plugins.offload.directory=nvme)
ranks=(mesh.data=2 device.threads=1)
bf16=plugins.mixed_precision.enabled=true
deep=(model.layers=24 model.vocabulary=256 data.sequence_length=128)

measured "plain"
measured "16 bits" $bf16
measured "16 bits in many layers" $bf16 "${deep[@]}"
measured "many layers" "${deep[@]}"
measured "everything on NVMe" "${nvme[@]}"
measured "everything on NVMe, 16 bits" "${nvme[@]}" $bf16
measured "saved behind training" run.save_behind=true
measured "recomputed, clipped, with validation" plugins.recompute.enabled=true plugins.clip.enabled=true \
  'data.validation=["data/validation_*.bin"]' run.validate_batches=1
measured "states on the host" plugins.offload.optimizer=host
measured "two ranks" "${ranks[@]}" plugins.data_parallel.enabled=true
measured "two ranks over tcp" "${ranks[@]}" plugins.data_parallel.enabled=true network.provider=tcp
measured "three stages over tcp" mesh.pipeline=3 device.threads=1 plugins.pipeline.enabled=true network.provider=tcp
measured "two ranks, ZeRO 3, 16 bits, on NVMe" "${ranks[@]}" plugins.zero.stage=3 $bf16 "${nvme[@]}"
cache=new measured "first run" "${nvme[@]}"
cache=none measured "nothing kept" "${nvme[@]}"
cache=new measured "first run of two ranks" "${ranks[@]}" plugins.data_parallel.enabled=true

# Planning itself, by the ops of a step: what one of them takes, between programs of 192 and 766 thousand.
export XDG_CACHE_HOME=$work/rates  # measured with the first plan, which is not counted
python3 - "$strata" <<'PYTHON' || fail "planning"
import os, re, subprocess, sys
text = """[model]
plugin = "gpt"
layers = 16
hidden = 64
heads = 4
vocabulary = 256
[data]
train = ["none"]
sequence_length = 16
global_batch = {}
micro_batch = 1
[device]
threads = 1
[plugins.adamw]
"""
def plan(microbatches):
    open("planning.toml", "w").write(text.format(microbatches))
    process = subprocess.Popen([sys.argv[1], "plan", "planning.toml"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit("planning failed")
    return int(re.search(r"^ops a step +(\d+)$", output, re.MULTILINE)[1]), usage.ru_maxrss << 10
plan(4)
(few, before), (many, after) = plan(512), plan(2048)
bytes = (after - before) / (many - few)
print(f"planning {many} ops: {after >> 20} MiB, {bytes:.0f} bytes an op")
sys.exit(bytes > 250)
PYTHON

finish memory
