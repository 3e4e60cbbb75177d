#!/usr/bin/env bash
# Programs under tools/bench say on stderr what they are at, and stopped they show what they have: benchmarks.sh BUILD_FOLDER
set -euo pipefail
build=$(realpath "$1")
bench=$(dirname "$(dirname "$(realpath "$0")")")/tools/bench
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. "$(dirname "$(realpath "$0")")/common.sh"
cd "$work"
export PYTHONDONTWRITEBYTECODE=1

for program in "$bench"/*; do
  [[ -x $program && -f $program && $(head -1 "$program") == *python3 ]] || continue
  grep -q '^from progress import' "$program" || fail "$program neither shows progress nor can be stopped"
done

# stopped SIGNAL COLUMN PROGRAM...: exit code 1, each measurement begun is named, and rows of what was done are shown
stopped() {
  local signal=$1 row=$2 status=0
  shift 2
  python3 - "$signal" "$@" >out 2>error <<'PY' || status=$?
import re, signal, subprocess, sys
child = subprocess.Popen(sys.argv[2:], stderr=subprocess.PIPE, text=True, start_new_session=True)
said = ""
while not re.search(r"\[3 of \d+\] ", said) and (more := child.stderr.read(1)):
    said += more
child.send_signal(getattr(signal, sys.argv[1]))
said += child.stderr.read()
print(said, file=sys.stderr)
sys.exit(child.wait())
PY
  [[ $status == 1 ]] || fail "$*: exit $status: $(cat error)"
  grep -q 'stopped after 2 of ' error || fail "$* does not say that it was stopped: $(cat error)"
  ! grep -q Traceback error || fail "$*: $(cat error)"
  grep -qE "$row" out || fail "$* shows nothing of what it has: $(cat out)"
}
stopped SIGINT '^ *7.5B +1 +2 ' "$bench/zero_table" --check --build "$build"
stopped SIGTERM '^budget +[0-9.]+ +[0-9.]+ ' "$bench/curve" "$bench/../../configs/quickstart.toml" --build "$build"
finish benchmarks
