#!/usr/bin/env bash
# The folder of a run: one run at a time, a disk that is full, checkpoints that are damaged, readers that are gone.
# run_directory.sh BUILD_FOLDER
set -euo pipefail
set -- "$(realpath "$1")"
strata=$1/bin/strata
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. "$(dirname "$(realpath "$0")")/common.sh"
cd "$work"
prepare_data
cat >config.toml <<TOML
[run]
steps = 6
directory = "run"
[mesh]
data = 1
[device]
threads = 1
[model]
plugin = "gpt"
layers = 2
hidden = 32
heads = 2
[data]
train = ["data/train_*.bin"]
sequence_length = 16
global_batch = 4
micro_batch = 2
[plugins.adamw]
[plugins.zero]
stage = 1
TOML
# Five minutes until a command is true.
await() { for _ in $(seq 6000); do ! "$@" || return 0; sleep 0.05; done; return 1; }
status_of() { status=0; wait "$1" 2>/dev/null || status=$?; }

# Two at once: one trains, the other is refused, whichever of them looks or locks first.
for ranks in 1 2; do
  for i in 1 2 3; do
    for twin in a b; do
      "$strata" train config.toml --set run.directory=both --set mesh.data=$ranks >out-$twin 2>error-$twin </dev/null &
      run[$((16#$twin))]=$!
    done
    status_of ${run[10]}; a=$status
    status_of ${run[11]}; b=$status
    [[ "$a $b" == '0 2' || "$a $b" == '2 0' ]] || fail "two at once, $ranks ranks: exits $a and $b: $(cat error-a error-b)"
    refused=error-$([[ $a == 2 ]] && echo a || echo b)
    [[ $(grep -cE 'is in use by another run \((process [0-9]+ )?holds strata-run.lock\)|already holds checkpoints' $refused) == 1 ]] || fail "two at once: $(cat $refused)"
    [[ $(grep -c '^strata: \|^\[rank' $refused) == 1 ]] || fail "two at once: more than one error: $(cat $refused)"
    [[ $(wc -l <both/log.jsonl) == 6 && $(ls -A both | sort | tr '\n' ' ') == 'log.jsonl step-00000006 ' ]] || fail "two at once: $(ls -A both)"
    rm -r both
  done
done

# While one is on: train, train --resume and check say who, and change nothing. Killed, it is no longer in the way.
"$strata" train config.toml --set run.steps=1000000 --set run.checkpoint_every=1 >/dev/null 2>&1 </dev/null &
pid=$!
await compgen -G 'run/step-*/manifest.json' >/dev/null || fail "no checkpoint"
for command in train 'train --resume' check 'check --resume'; do
  expect 2 "is in use by another run (process $pid holds strata-run.lock)" "$strata" $command config.toml
done
expect 2 "process $pid holds strata-run.lock" "$strata" train config.toml --resume --set mesh.data=2
kill -9 $pid 2>/dev/null || true
status_of $pid
expect 2 'continue it with --resume' "$strata" train config.toml
expect 2 'continue it with --resume' "$strata" check config.toml
expect 2 'raise run.steps' "$strata" check config.toml --resume --set run.steps=1
expect 0 '' "$strata" check config.toml --resume --set run.steps=1000000
next=$((10#$(ls -d run/step-* | tail -n 1 | tr -dc 0-9) + 2))
expect 0 'resuming after step' "$strata" train config.toml --resume --set run.steps=$next
rm -r run

# What check and train refuse alike before they make a folder.
expect 2 'no checkpoint to resume from' "$strata" check config.toml --resume
expect 2 'no checkpoint to resume from' "$strata" train config.toml --resume
: >file
for command in check train; do
  expect 2 'File name too long' "$strata" $command config.toml --set run.directory="$(printf '%05000d' 0)a"
  expect 2 'run.directory is empty' "$strata" $command config.toml --set 'run.directory=""'
  expect 2 'is not a directory' "$strata" $command config.toml --set run.directory=file
  expect 2 'is not a directory' "$strata" $command config.toml --set run.directory=file/run
done
if (($(id -u))); then
  mkdir readonly && chmod a-w readonly
  for command in check train; do expect 2 'readonly' "$strata" $command config.toml --set run.directory=readonly/run; done
fi
[[ ! -e run ]] || fail "a refusal left a folder"
# Rank 0's refusal is the only message, and its exit code stays.
for broken in '--set run.directory=file' '--trace nodir/trace.json' '--resume' '--set run.directory=log'; do
  mkdir -p log/log.jsonl
  expect 2 '' "$strata" train config.toml --set mesh.data=2 $broken
  [[ $(grep -vc "^measuring this machine's rates" error) == 1 ]] || fail "rank 0 refuses ($broken): $(cat error)"
done
rm -rf log

# A disk that is full. A limit on file size stands for it; where a file system may be mounted it is one.
limited=(bash -c 'ulimit -f "$0"; exec "$@"')
for ranks in 1 2; do  # over tcp: shared memory is a file, too
  for behind in false true; do
    expect 1 'the run ended after step 6, which was not saved: ' "${limited[@]}" 16 "$strata" train config.toml --set run.directory=full --set run.checkpoint_every=2 --set mesh.data=$ranks --set run.save_behind=$behind --set network.provider=\"tcp\"
    [[ $(grep -c 'warning: a checkpoint was not saved' error) == 2 && $(wc -l <full/log.jsonl) == 6 && -z $(ls -A full | grep -v log.jsonl) ]] || fail "a full disk: $(cat error; ls -A full)"
    rm -r full
  done
done
if unshare -rm true 2>/dev/null; then
  # SIZE COMMAND: with a disk of this size at disk/, filled to its last page
  on_disk=(unshare -rm bash -c 'mount -t tmpfs -o size="$0" tmpfs disk || exit 77
      cat /dev/zero >disk/filler 2>/dev/null
      "$@" </dev/null; status=$?
      ls -A disk/run >left; cp disk/run/log.jsonl log-left; exit $status')
  mkdir disk
  expect 1 'which was not saved' "${on_disk[@]}" 64k "$strata" train config.toml --set run.directory=disk/run
  [[ $(grep -c 'log.jsonl: cannot write the log: No space left on device' error) == 1 && $(grep -c 'lacks 6 lines' error) == 1 ]] || fail "a disk without room for a log: $(cat error)"
  [[ $(cat left) == log.jsonl && ! -s log-left ]] || fail "a full disk: left: $(cat left)"
  # Room for one checkpoint and a half: the first stays and the run goes on from it once there is room.
  expect 0 '' "$strata" train config.toml --set run.directory=size
  size=$(($(du -sk size/step-00000006 | cut -f1) * 3 / 2 + 8))k
  one_fits=(unshare -rm bash -c 'mount -t tmpfs -o size="$0" tmpfs disk || exit 77
      "$@" </dev/null; status=$?
      mount -o remount,size=100m disk && "$@" --resume >again 2>&1 </dev/null || echo "does not go on: $(cat again)" >&2
      exit $status')
  expect 1 'The last good checkpoint is disk/run/step-00000002; --resume goes on from there.' "${one_fits[@]}" $size "$strata" train config.toml --set run.directory=disk/run --set run.checkpoint_every=2
  grep -q 'resuming after step 2' again && ! grep -q 'does not go on' error || fail "a disk with room for one checkpoint: $(cat error again)"
fi

# Damaged checkpoints: which older one is whole, and how to take it.
for ranks in 1 2; do
  "$strata" train config.toml --set run.directory=kept --set run.checkpoint_every=2 --set run.keep=3 --set mesh.data=$ranks >/dev/null 2>&1
  damage() { printf '\x55\xaa' | dd of="$(ls kept/step-0000000$1/tensors-* | tail -n 1)" bs=1 seek=2000 conv=notrunc 2>/dev/null; }
  resume=(config.toml --resume --set run.directory=kept --set run.steps=8 --set mesh.data=$ranks)
  damage 6
  for command in train check; do
    expect 2 'kept/step-00000004 is whole: to go on from it, move the damaged one away (mv kept/step-00000006 kept/damaged-step-00000006)' "$strata" $command "${resume[@]}"
    [[ $(grep -c "^strata: " error) == 1 ]] || fail "a damaged checkpoint: more than one error: $(cat error)"
  done
  damage 4
  sed -i 's/"step": 6/"step": 7/' kept/step-00000006/manifest.json
  expect 2 'kept/step-00000002 is whole: to go on' "$strata" train "${resume[@]}"
  damage 2
  expect 2 'No older checkpoint in kept is whole.' "$strata" train "${resume[@]}"
  rm -r kept
  "$strata" train config.toml --set run.directory=kept --set run.checkpoint_every=2 --set run.keep=3 --set mesh.data=$ranks >/dev/null 2>&1
  damage 6
  "$strata" train "${resume[@]}" >out 2>error || true
  eval "$(sed -n 's/.*(\(mv [^)]*\)).*/\1/p' error)"
  expect 0 'resuming after step 4' "$strata" train "${resume[@]}"
  # Another model's is not damaged.
  expect 2 '' "$strata" train config.toml --resume --set run.directory=kept --set run.steps=10 --set mesh.data=$ranks --set model.hidden=64
  ! grep -q 'is whole' error || fail "another model's checkpoint is called damaged: $(cat error)"
  rm -r kept
done

# Readers that are gone: the run goes on to its end.
for ranks in 1 2; do
  rm -rf run
  { "$strata" train config.toml --set mesh.data=$ranks --set run.log_every=1 || echo $? >status; } 2>&1 </dev/null | head -c 1 >/dev/null
  [[ ! -e status && -e run/step-00000006 ]] || fail "a reader that is gone ($ranks ranks): $(ls run)"
done

finish run_directory
