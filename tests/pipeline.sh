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
tied = true
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

for micro_batch in 1 6; do
  expect 0 '' "$strata" train plain.toml --set run.directory=plain$micro_batch --set data.micro_batch=$micro_batch
done
for stages in 2 3 5; do
  for schedule in gpipe 1f1b zero_bubble_h1 zero_bubble_h2; do
    for micro_batch in 1 6; do
      run=run$stages$schedule$micro_batch
      expect 0 '' "$strata" train pipeline.toml --set run.directory=$run --set mesh.pipeline=$stages \
        --set plugins.pipeline.schedule=\"$schedule\" --set data.micro_batch=$micro_batch
      losses plain$micro_batch/log.jsonl | cmp - <(losses $run/log.jsonl) ||
        fail "$stages stages, $schedule, micro_batch $micro_batch: $(losses $run/log.jsonl)"
    done
    "$strata" export plain.toml exported-$run --checkpoint $run >out
    [[ -d exported ]] || "$strata" export plain.toml exported --checkpoint plain6 >out
    cmp exported/model.safetensors exported-$run/model.safetensors || fail "the export of $run differs"
  done
done

# Beside other strategies, bit for bit. composed NAME PLUGINS SETS...: [plugins.NAME] tables and what else is set of the pipeline
mkdir disk
composed() {
  local name=$1 plugins=$2
  shift 2
  set -- --set data.global_batch=8 "$@"
  cat plain.toml - >of_one.toml <<<"$plugins"
  cat pipeline.toml - >of_stages.toml <<<"$plugins"
  [[ $name != *optimizer* ]] || sed -i '/plugins.adamw\]/,/learning_rate/d' of_one.toml of_stages.toml
  [[ $name != untied ]] || sed -i 's/tied = true/tied = false/' of_one.toml
  expect 0 '' "$strata" train of_one.toml --set run.directory=one-$name --set data.global_batch=8
  expect 0 '' "$strata" train of_stages.toml --set run.directory=stages-$name --set mesh.pipeline=3 "$@"
  losses one-$name/log.jsonl | cmp - <(losses stages-$name/log.jsonl) || fail "pipeline and $name: $(losses stages-$name/log.jsonl)"
}
data="--set mesh.data=2"
composed data_parallel '[plugins.data_parallel]' $data
for stage in 1 2 3; do composed zero$stage "[plugins.zero]
stage = $stage" $data; done
composed bf16 '[plugins.mixed_precision]'
composed fp16_zero2 '[plugins.mixed_precision]
dtype = "fp16"
[plugins.zero]
stage = 2' $data
composed reversible '[plugins.reversible]
invert = false'
composed untied '' --set model.tied=false --set plugins.pipeline.schedule=\"gpipe\"
composed recompute '[plugins.recompute]'
composed gist '[plugins.gist]'
composed nvme '[plugins.offload]
optimizer = "nvme"
parameters = "nvme"
activations = "nvme"
directory = "disk"'
composed nvme_zero3 '[plugins.zero]
stage = 3
[plugins.offload]
optimizer = "nvme"
parameters = "host"
directory = "disk"' $data --set host.threads=1
composed optimizer_adafactor_zero2 '[plugins.adafactor]
[plugins.zero]
stage = 2' $data
composed optimizer_sm3 '[plugins.sm3]'
composed optimizer_adamw8bit '[plugins.adamw8bit]'

# Beside tensor parallelism: sums of products in another order.
close() { python3 - "$1/log.jsonl" "$2/log.jsonl" <<'CODE'
import json, sys
a, b = ([json.loads(line)["loss"] for line in open(path)] for path in sys.argv[1:])
assert len(a) == len(b) and all(abs(x - y) <= 1e-5 for x, y in zip(a, b)), (a, b)
CODE
}
for more in '' 'plugins.tensor_parallel.sequence = true'; do
  cat pipeline.toml - >tensor.toml <<<"[plugins.zero]
stage = 3
[plugins.tensor_parallel]
${more:+sequence = true}"
  expect 0 '' "$strata" train tensor.toml --set run.directory="tensor$more" --set run.reproducible=false $data \
    --set data.sequence_length=18 --set mesh.pipeline=2 --set mesh.tensor=3
  [[ -d plain18 ]] || expect 0 '' "$strata" train plain.toml --set run.directory=plain18 --set data.sequence_length=18
  close plain18 "tensor$more" || fail "pipeline, tensor_parallel and zero $more"
done

cat pipeline.toml - >context.toml <<<'[plugins.context_parallel]'
expect 0 '' "$strata" train plain.toml --set run.directory=plain16 --set data.sequence_length=16
expect 0 '' "$strata" train context.toml --set run.directory=context --set run.reproducible=false \
  --set data.sequence_length=16 --set mesh.pipeline=3 --set mesh.sequence=2
close plain16 context || fail "pipeline and context_parallel: $(losses context/log.jsonl)"

# A checkpoint goes from three stages to one and to two.
expect 0 '' "$strata" train pipeline.toml --set run.directory=half --set mesh.pipeline=3 --set run.steps=2
expect 0 '' "$strata" train plain.toml --set run.directory=half --set run.steps=3 --resume
expect 0 '' "$strata" train pipeline.toml --set run.directory=half --set mesh.pipeline=2 --resume
losses half/log.jsonl | grep -v '^[23] ' | cmp - <(losses plain1/log.jsonl | grep -v '^[23] ') ||
  fail "a run that changed its stages differs: $(losses half/log.jsonl)"
expect 0 '' "$strata" generate pipeline.toml --set mesh.pipeline=2 --checkpoint half --prompt hello --tokens 3

# A plan is of every stage, and what the run takes.
"$strata" plan pipeline.toml --set mesh.pipeline=3 --json >plan.json
"$strata" train pipeline.toml --set mesh.pipeline=3 --set run.directory=as_planned >out 2>error
python3 - "$(grep '^arena ' out)" <<'CODE' || fail "the plan of three stages: $(cat out)"
import json, sys
stages = json.load(open("plan.json"))["stages"]
arenas = [sum(tier["arena_bytes"] for tier in stage["tiers"].values()) for stage in stages]
assert len(stages) == 3 and all(arenas), arenas
unit, value = sys.argv[1].split()[2], float(sys.argv[1].split()[1])
assert abs(arenas[0] / {"KiB": 2**10, "MiB": 2**20}[unit] - value) < 0.01, (arenas, sys.argv[1])
CODE
expect 0 '' "$strata" check pipeline.toml --set mesh.pipeline=3 --set run.directory=new
grep -q 'no errors.*in 3 stages' out || fail "check of a pipeline: $(cat out)"
expect 0 '' "$strata" plan pipeline.toml --set mesh.pipeline=3 --html plan.html
[[ $(grep -o 'stage [012] of the pipeline' plan.html | sort -u | wc -l) == 3 ]] || fail "the page does not show three stages"

# A rank that is lost or stands still in mid-pipeline ends the others with its name and stage.
for signal in KILL STOP; do
  "$strata" train pipeline.toml --set run.directory=lost$signal --set mesh.pipeline=3 --set run.steps=1000000 >out 2>error &
  launcher=$!
  for _ in $(seq 3000); do [[ ! -s lost$signal/log.jsonl ]] || break; sleep 0.02; done
  victim=$(pgrep -P $launcher -f 'strata train' | sed -n 2p)
  kill -$signal "$victim"
  for _ in $(seq 600); do kill -0 $launcher 2>/dev/null || break; sleep 0.05; done
  kill -0 $launcher 2>/dev/null && fail "SIG$signal: the job still runs" && pkill -9 -P $launcher
  status=0
  wait $launcher || status=$?
  [[ $status == 1 ]] || fail "SIG$signal: exit $status: $(cat error)"
  grep -q 'rank 1 (pipeline stage 1)' error || fail "SIG$signal: the rank is not named: $(cat error)"
  kill -KILL "$victim" 2>/dev/null || true
done

# Bad input: one message, exit code 2.
bad="--set run.directory=bad"
expect 2 'the model has 5 blocks' "$strata" train pipeline.toml $bad --set mesh.pipeline=6
expect 2 'which has one; set mesh.pipeline' "$strata" train pipeline.toml $bad
expect 2 'no enabled plugin splits anything over them' "$strata" train plain.toml $bad --set mesh.pipeline=2
expect 2 'no enabled plugin splits anything over them' "$strata" train pipeline.toml $bad --set mesh.pipeline=2 --set mesh.sequence=2
expect 2 'has as many; --html shows them all' "$strata" plan pipeline.toml --set mesh.pipeline=2 --trace trace.json
expect 2 'stage 0 of the pipeline' "$strata" plan pipeline.toml --set mesh.pipeline=2 --set device.memory=10KiB
[[ ! -e bad ]] || fail "a run that was refused left a folder"
finish pipeline
