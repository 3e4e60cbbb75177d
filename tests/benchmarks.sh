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

# Results that are read back are drawn and not planned again; a plan that loses to a simpler setting is exit code 1.
result() { echo "[{\"name\": \"$1\", \"whole\": {\"bytes\": 8e9, \"seconds\": 1, \"assumed\": []},
  \"curve\": [{\"budget\": 2e9, \"bytes\": 2e9, \"seconds\": 2}, {\"budget\": 8e9, \"bytes\": 8e9, \"seconds\": 1}],
  \"simple\": [{\"name\": \"blocks\", \"bytes\": 4e9, \"seconds\": $2}]}]"; }
result "A & B" 2.5 >a.json
result C 1.5 >c.json
"$bench/curve" a.json --picture a.svg >out 2>error || fail "curve of results: $(cat error)"
grep -q 'A &amp; B' a.svg && python3 -c 'import xml.dom.minidom as x; x.parse("a.svg")' || fail "curve --picture"
"$bench/curve" a.json c.json --picture both.svg >out 2>error && fail "curve does not see that blocks are faster"
grep -q 'slower under a budget than blocks (C' error || fail "curve: $(cat error)"
[[ $(grep -c '<path' both.svg) == 3 ]] || fail "curve does not draw two panels: $(cat both.svg)"
finish benchmarks
