#!/usr/bin/env bash
# Stages of a pipeline as a user starts them: reproducible runs equal one rank bit for bit, checkpoints go from any number
# of stages to any, faults end every stage, bad input is one message. pipeline.sh BUILD_FOLDER
set -euo pipefail
strata=$1/bin/strata
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. "$(dirname "$(realpath "$0")")/common.sh"
cd "$work"
prepare_data
cat >plain.toml <<TOML
[run]
steps = 4
directory = "run"
reproducible = true
[device]
threads = 1
[network]
silence = 2
timeout = 60
join_timeout = 20
[model]
plugin = "gpt"
layers = 5
hidden = 36
heads = 3
dropout = 0.1
tied = false
[data]
train = ["data/train_*.bin"]
validation = ["data/validation_*.bin"]
sequence_length = 17
global_batch = 6
micro_batch = 1
[plugins.adamw]
learning_rate = 1e-3
[plugins.clip]
max_norm = 0.1
TOML
cat plain.toml - >pipeline.toml <<<'[plugins.pipeline]'

for micro_batch in 1 2 6; do
  expect 0 '' "$strata" train plain.toml --set run.directory=plain$micro_batch --set data.micro_batch=$micro_batch
done
for stages in 2; do
  for schedule in gpipe 1f1b zero_bubble_h1; do
    for micro_batch in 1 2 6; do
      run=run$stages$schedule$micro_batch
      expect 0 '' "$strata" train pipeline.toml --set run.directory=$run --set mesh.pipeline=$stages \
        --set plugins.pipeline.schedule=\"$schedule\" --set data.micro_batch=$micro_batch
      losses plain$micro_batch/log.jsonl | cmp - <(losses $run/log.jsonl) ||
        fail "$stages stages, $schedule, micro_batch $micro_batch: $(losses $run/log.jsonl)"
      "$strata" export plain.toml exported-$run --checkpoint $run >out
      [[ -d exported-$micro_batch ]] || "$strata" export plain.toml exported-$micro_batch --checkpoint plain$micro_batch >out
      cmp exported-$micro_batch/model.safetensors exported-$run/model.safetensors || fail "the export of $run differs"
    done
  done
done

# A checkpoint goes from two stages to one and back.
expect 0 '' "$strata" train pipeline.toml --set run.directory=half --set mesh.pipeline=2 --set run.steps=2
expect 0 '' "$strata" train plain.toml --set run.directory=half --set run.steps=3 --resume
expect 0 '' "$strata" train pipeline.toml --set run.directory=half --set mesh.pipeline=2 --resume
losses half/log.jsonl | grep -v '^[23] ' | cmp - <(losses plain1/log.jsonl | grep -v '^[23] ') ||
  fail "a run that changed its stages differs: $(losses half/log.jsonl)"
expect 0 '' "$strata" generate pipeline.toml --set mesh.pipeline=2 --checkpoint half --prompt hello --tokens 3

# Bad input: one message, exit code 2.
bad="--set run.directory=bad"
expect 2 'the model has 5 blocks' "$strata" train pipeline.toml $bad --set mesh.pipeline=6
expect 2 'which has one; set mesh.pipeline' "$strata" train pipeline.toml $bad
expect 2 'no enabled plugin splits anything over them' "$strata" train plain.toml $bad --set mesh.pipeline=2
expect 2 'Set tied = false' "$strata" train pipeline.toml $bad --set mesh.pipeline=2 --set model.tied=true
expect 2 'more than two stages' "$strata" train pipeline.toml $bad --set mesh.pipeline=3
expect 2 'beside other axes' "$strata" train pipeline.toml $bad --set mesh.pipeline=2 --set mesh.data=2 --set run.reproducible=false
expect 2 'several stages' "$strata" plan pipeline.toml --set mesh.pipeline=2
[[ ! -e bad ]] || fail "a run that was refused left a folder"
finish pipeline
