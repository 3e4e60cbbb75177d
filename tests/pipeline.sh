#!/usr/bin/env bash
# Stages of a pipeline as a user starts them: reproducible runs equal one rank bit for bit, checkpoints go from any number
# of stages to any, faults end every stage, bad input is one message. pipeline.sh BUILD_FOLDER
set -euo pipefail
set -- "$(realpath "$1")"
strata=$1/bin/strata
build=$1
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
# Sanitizers, which are slow, run a third of the cases of a kind.
case=0
runs_here() {
  case=$((case + 1))
  [[ $(basename "$build") == build || $((case % 3)) == 1 ]]
}

for micro_batch in 1 6; do
  expect 0 '' "$strata" train plain.toml --set run.directory=plain$micro_batch --set data.micro_batch=$micro_batch
done
# Threads take many more of such cases: Pipeline.RandomStagesAgreeWithOneRank.
train_stages() {  # STAGES SCHEDULE MICRO_BATCH
  runs_here || return 0
  local run=run$1$2$3
  expect 0 '' "$strata" train pipeline.toml --set run.directory=$run --set mesh.pipeline=$1 \
    --set plugins.pipeline.schedule=\"$2\" --set data.micro_batch=$3
  losses plain$3/log.jsonl | cmp - <(losses $run/log.jsonl) ||
    fail "$1 stages, $2, micro_batch $3: $(losses $run/log.jsonl)"
  "$strata" export plain.toml exported-$run --checkpoint $run >out
  [[ -d exported$3 ]] || "$strata" export plain.toml exported$3 --checkpoint plain$3 >out
  cmp exported$3/model.safetensors exported-$run/model.safetensors || fail "the export of $run differs"
}
for schedule in gpipe 1f1b zero_bubble_h1 zero_bubble_h2; do train_stages 3 $schedule 1; done
train_stages 2 zero_bubble_h2 1
train_stages 5 1f1b 1
train_stages 2 1f1b 6
train_stages 3 gpipe 6

# Several chunks a stage, which no stage count needs to divide; few microbatches, and more than stages.
chunked() {  # STAGES SCHEDULE CHUNKS MICRO_BATCH
  runs_here || return 0
  local run=chunks$1$2$3$4 layers="--set model.layers=9 --set data.global_batch=12"
  [[ -d nine$4 ]] || expect 0 '' "$strata" train plain.toml $layers --set run.directory=nine$4 --set data.micro_batch=$4
  expect 0 '' "$strata" train pipeline.toml $layers --set run.directory=$run --set mesh.pipeline=$1 \
    --set plugins.pipeline.schedule=$2 --set plugins.pipeline.chunks=$3 --set data.micro_batch=$4
  losses nine$4/log.jsonl | cmp - <(losses $run/log.jsonl) || fail "$run: $(losses $run/log.jsonl)"
}
chunked 2 interleaved 2 1
chunked 2 interleaved 4 3
chunked 2 breadth_first 4 1
chunked 3 interleaved 3 1
chunked 4 interleaved 2 12
chunked 4 breadth_first 2 4
for stages in 2 4; do chunked $stages zero_bubble_v 0 1; done
chunked 3 zero_bubble_v 2 6
chunked 2 auto 0 1
chunked 3 auto 2 2

# Beside other strategies, bit for bit. composed NAME PLUGINS SETS...: [plugins.NAME] tables and what else is set of the pipeline
mkdir disk
composed() {
  runs_here || return 0
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
# And with two chunks a stage, the schedule from the table.
of_chunks() {  # NAME SCHEDULE PLUGINS SETS...
  runs_here || return 0
  local name=$1 plugins=$3
  cat plain.toml - >of_one.toml <<<"$plugins"
  cat plain.toml - >of_stages.toml <<<"[plugins.pipeline]
schedule = \"$2\"
chunks = 2
$plugins"
  shift 3
  set -- --set model.layers=7 --set data.global_batch=8 "$@"
  expect 0 '' "$strata" train of_one.toml --set run.directory=one-$name --set model.layers=7 --set data.global_batch=8
  expect 0 '' "$strata" train of_stages.toml --set run.directory=stages-$name --set mesh.pipeline=3 "$@"
  losses one-$name/log.jsonl | cmp - <(losses stages-$name/log.jsonl) || fail "chunks and $name: $(losses stages-$name/log.jsonl)"
}
of_chunks chunked_recompute interleaved '[plugins.recompute]'
of_chunks chunked_zero3 breadth_first '[plugins.zero]
stage = 3' $data
of_chunks chunked_zero1 zero_bubble_v '[plugins.zero]
stage = 1' $data
of_chunks chunked_nvme interleaved '[plugins.offload]
optimizer = "nvme"
parameters = "nvme"
activations = "nvme"
directory = "disk"'
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

# Without flush: a run that is resumed in the middle of flight, behind a checkpoint without one of its own, and in
# between; what a checkpoint with microbatches under way is good for.
flushless() {  # SCHEDULE STAGES
  runs_here || return 0
  local run=$1$2 sets="--set plugins.pipeline.schedule=$1 --set mesh.pipeline=$2 --set model.tied=false"
  expect 0 '' "$strata" train pipeline.toml $sets --set run.directory=$run --set run.steps=6 --set run.validate_every=4
  expect 0 '' "$strata" train pipeline.toml $sets --set run.directory=$run-twice --set run.steps=3
  expect 0 '' "$strata" train pipeline.toml $sets --set run.directory=$run-twice --set run.steps=6 --resume
  losses $run/log.jsonl | cut -d' ' -f1,2 | cmp - <(losses $run-twice/log.jsonl | cut -d' ' -f1,2) ||
    fail "$run resumed: $(losses $run-twice/log.jsonl)"
  for which in $run $run-twice; do
    "$strata" export plain.toml exported-$which --set model.tied=false --checkpoint $which >out
  done
  cmp exported-$run/model.safetensors exported-$run-twice/model.safetensors || fail "$run: the export differs"
  expect 0 '' "$strata" generate pipeline.toml $sets --checkpoint $run --prompt hello --tokens 3
}
flushless 2bw 2
flushless pipedream 3
flushless 2bw 4
if [[ -d 2bw2 ]]; then
  sets="--set run.directory=2bw2 --set run.steps=7 --set model.tied=false --resume"
  expect 2 'did not leave the same of its last step' "$strata" train pipeline.toml $sets --set mesh.pipeline=3 \
    --set plugins.pipeline.schedule=2bw
  expect 0 'under way that this run does not end' "$strata" train pipeline.toml $sets --set mesh.pipeline=2
fi
if [[ -d run31f1b1 ]]; then
  expect 2 'did not leave the same of its last step' "$strata" train pipeline.toml --set run.directory=run31f1b1 \
    --set run.steps=7 --resume --set mesh.pipeline=3 --set plugins.pipeline.schedule=2bw
fi

# A plan is of every stage, and what the run takes.
"$strata" plan pipeline.toml --set mesh.pipeline=3 --json >plan.json
"$strata" train pipeline.toml --set mesh.pipeline=3 --set run.directory=as_planned >out 2>error
grep -Eq '^bubble +-?[0-9.]+% +-?[0-9.]+%$' out || fail "no bubble at the end of a run: $(cat out)"
python3 - "$(grep '^arena ' out)" <<'CODE' || fail "the plan of three stages: $(cat out)"
import json, sys
stages = json.load(open("plan.json"))["stages"]
arenas = [sum(tier["arena_bytes"] for tier in stage["tiers"].values()) for stage in stages]
assert len(stages) == 3 and all(arenas), arenas
together = json.load(open("plan.json"))["pipeline"]
steps = {stage["predicted"]["seconds"] for stage in stages}
assert steps == {together["seconds"]} and together["bubble"] > 0.05, (steps, together["bubble"])
for stage in together["stages"]:
    assert abs(stage["busy_seconds"] + stage["waiting_seconds"] - together["seconds"]) < 1e-9, stage
    assert sum(stage["at_peak"].values()) == stage["peak_bytes"] and stage["busy_seconds"] > 0, stage
unit, value = sys.argv[1].split()[2], float(sys.argv[1].split()[1])
assert abs(arenas[0] / {"KiB": 2**10, "MiB": 2**20}[unit] - value) < 0.01, (arenas, sys.argv[1])
CODE
expect 0 '' "$strata" check pipeline.toml --set mesh.pipeline=3 --set run.directory=new
grep -q 'no errors.*in 3 stages' out || fail "check of a pipeline: $(cat out)"
expect 0 '' "$strata" plan pipeline.toml --set mesh.pipeline=3 --html plan.html
[[ $(grep -o 'stage [012] of the pipeline' plan.html | sort -u | wc -l) == 3 ]] || fail "the page does not show three stages"
[[ $(grep -o 'text-anchor="end">stage [012]<' plan.html | sort -u | wc -l) == 3 ]] || fail "the stages are not rows of one timeline"
expect 0 '' "$strata" plan pipeline.toml --set mesh.pipeline=3 --trace trace.json
grep -q '^pipeline of 3 stages: predicted step ' out || fail "the plan does not begin with all stages: $(head -n 3 out)"
python3 - <<'CODE' || fail "the trace of three stages"
import json
events = json.load(open("trace.json"))["traceEvents"]
ops = [event for event in events if event["ph"] == "X"]
assert {event["pid"] for event in ops} == {1, 2, 3}, {event["pid"] for event in ops}
begin = {pid: min(event["ts"] for event in ops if event["pid"] == pid and event["cat"] == "forward" and event["name"] != "receive") for pid in (1, 2, 3)}
assert begin[1] < begin[2] < begin[3], begin
CODE

# Blocks go where the time is: the head of a large vocabulary takes as long as many blocks. Boundaries say otherwise.
parameters_of() {  # STAGE SETS...: blocks of a stage
  local stage=$1
  shift
  "$strata" plan pipeline.toml --set model.layers=8 --set model.vocabulary=4000 --set mesh.pipeline=2 --json "$@" | python3 -c '
import json, sys
print(json.load(sys.stdin)["stages"][int(sys.argv[1])]["parameters"])' "$stage"
}
even=$(parameters_of 0 --set plugins.pipeline.boundaries='[4]')
balanced=$(parameters_of 0)
((balanced > even + 12 * 36 * 36)) || fail "the first of two stages has $balanced parameters, with half of the blocks $even"
for first in 1 7; do
  [[ -d nine1 ]] || break
  expect 0 '' "$strata" train pipeline.toml --set run.directory=cut$first --set mesh.pipeline=2 --set model.layers=9 --set data.global_batch=12 \
    --set plugins.pipeline.boundaries="[$first]"
  losses nine1/log.jsonl | cmp - <(losses cut$first/log.jsonl) || fail "cut at $first: $(losses cut$first/log.jsonl)"
done

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
expect 2 'has 1 chunk a stage, not 2' "$strata" train pipeline.toml $bad --set mesh.pipeline=2 --set plugins.pipeline.chunks=2
expect 2 '3 stages of 2 chunks each, but the model has 5 blocks' "$strata" train pipeline.toml $bad --set mesh.pipeline=3 \
  --set plugins.pipeline.schedule=interleaved
expect 2 'Did you mean "interleaved"' "$strata" train pipeline.toml $bad --set mesh.pipeline=2 \
  --set plugins.pipeline.schedule=interleafed
expect 2 'names 2 blocks, and 2 stages of 1 chunk have 1 boundaries' "$strata" train pipeline.toml $bad --set mesh.pipeline=2 \
  --set plugins.pipeline.boundaries='[1, 2]'
for wrong in '[3, 3]' '[3, 2]' '[0, 2]' '[2, 5]' '[1, 288230376151711744]'; do
  expect 2 'boundaries ascend, from 1 to 4' "$strata" train pipeline.toml $bad --set mesh.pipeline=3 --set plugins.pipeline.boundaries="$wrong"
done
expect 2 'stage 0 of the pipeline' "$strata" plan pipeline.toml --set mesh.pipeline=2 --set device.memory=10KiB
[[ ! -e bad ]] || fail "a run that was refused left a folder"
finish pipeline
