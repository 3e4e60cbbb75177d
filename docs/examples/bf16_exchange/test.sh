#!/usr/bin/env bash
# Two ranks with the exchange in bf16 against full precision, under data_parallel and every stage of zero: test.sh
# STRATA PLUGIN_FOLDER
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
train() {  # NAME OPTIONS...
  local name=$1
  shift
  "$strata" train config.toml --set "run.directory=\"$name\"" "$@" >/dev/null
}
for strategy in data_parallel.enabled=true zero.stage=1 zero.stage=2 zero.stage=3; do
  options=(--set "plugins.$strategy" --set plugins.bf16_exchange.enabled=true)
  exchange=all_reduce
  [[ $strategy == zero* ]] && exchange=reduce_scatter
  "$strata" plan config.toml "${options[@]}" --program >program
  grep -q ":bf16(.* = $exchange(" program
  if grep -q ":f32([0-9]*, .* = $exchange(" program; then
    echo "$strategy: matrices cross in f32"
    exit 1
  fi
  train "$strategy" "${options[@]}"
done
train exact --set plugins.data_parallel.enabled=true
python3 - <<'PYTHON'
import json
log = lambda directory: [json.loads(line)["loss"] for line in open(f"{directory}/log.jsonl")]
exact = log("exact")
for directory in ("data_parallel.enabled=true", "zero.stage=1", "zero.stage=2", "zero.stage=3"):
    bf16 = log(directory)
    assert len(exact) == 10 and abs(exact[0] - bf16[0]) < 1e-6 * exact[0] and exact != bf16, (exact, bf16)
    assert all(abs(a - b) < 2e-2 * a for a, b in zip(exact, bf16)), (directory, exact, bf16)
PYTHON
echo "bf16_exchange: as expected"
