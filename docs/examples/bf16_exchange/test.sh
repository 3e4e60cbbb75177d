#!/usr/bin/env bash
# Two ranks with the exchange in bf16 against data_parallel: test.sh STRATA PLUGIN_FOLDER
set -euo pipefail
strata=$1 plugins=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
for i in $(seq 200); do echo "the quick brown fox jumps over the lazy dog $i"; done >text
"$strata" data prepare text --output data >/dev/null
cat >config.toml <<TOML
[run]
steps = 10
directory = "run"
plugin_path = ["$plugins"]
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
[mesh]
data = 2
[plugins.sm3]
[plugins.clip]
TOML
"$strata" plan config.toml --set plugins.bf16_exchange.enabled=true --program >program
grep -q ':bf16(.* = all_reduce(' program
"$strata" train config.toml --set plugins.data_parallel.enabled=true --set 'run.directory="exact"' >/dev/null
"$strata" train config.toml --set plugins.bf16_exchange.enabled=true --set 'run.directory="bf16"' >/dev/null
status=0
"$strata" plan config.toml --set plugins.bf16_exchange.enabled=true --set plugins.zero.stage=1 >out 2>error || status=$?
[[ $status == 2 ]] && grep -q 'cannot work together' error
python3 - <<'PYTHON'
import json
log = lambda directory: [json.loads(line)["loss"] for line in open(f"{directory}/log.jsonl")]
exact, bf16 = log("exact"), log("bf16")
assert len(exact) == 10 and exact[0] == bf16[0] and exact != bf16, (exact, bf16)
assert all(abs(a - b) < 2e-2 * a for a, b in zip(exact, bf16)), (exact, bf16)
PYTHON
echo "bf16_exchange: as expected"
