#!/usr/bin/env bash
# `strata verify` names the mistaken one of three plugins, its first wrong step and tensor: test.sh STRATA PLUGIN_FOLDER
set -euo pipefail
strata=$1 plugins=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
cat >config.toml <<TOML
[run]
plugin_path = ["$plugins"]
[model]
plugin = "gpt"
layers = 2
hidden = 32
heads = 2
vocabulary = 61
[data]
train = ["none.bin"]      # made-up tokens will do
sequence_length = 16
global_batch = 4
micro_batch = 2
[plugins.adamw]
[plugins.recompute]
[plugins.clip]
[plugins.mistaken]
TOML
code=0
"$strata" verify config.toml --steps 3 >out 2>&1 || code=$?
expected='^mistaken + adamw (one rank) differs from the plain program first in step 2, in block.1.mlp.down.weight: by '
[[ $code == 1 ]] && grep -q "$expected" out || { echo "exit code $code, expected 1, and \"$expected\" in:"; cat out; exit 1; }
[[ $(grep -c ' differs from ' out) == 1 ]] || { echo "others are told of, too:"; cat out; exit 1; }
grep -q '^recompute + clip + adamw .*bit for bit' out || { echo "the others are not bit for bit:"; cat out; exit 1; }
"$strata" verify config.toml --steps 1 >out 2>&1 || { echo "the first step is right, but:"; cat out; exit 1; }
echo "mistaken: as expected"
