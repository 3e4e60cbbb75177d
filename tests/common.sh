# What tests of the command share; sourced in a folder of their own, with $strata set.
failures=0
fail() { echo "FAILED: $*"; failures=$((failures + 1)); }
finish() {  # NAME: the end of a test
  ((failures == 0)) && echo "$1: as expected"
  exit "$((failures > 0))"
}

# A little text as token files in data/.
prepare_data() {
  for i in $(seq 400); do echo "line $i: all work and no play makes a dull model, said the fox to the dog"; done >text
  "$strata" data prepare text --output data >/dev/null
}
# Step, loss and validation loss of each line of a log.
losses() { python3 -c 'import json,sys
for line in open(sys.argv[1]): r = json.loads(line); print(r["step"], r["loss"], r.get("validation_loss"))' "$1"; }

# expect CODE TEXT COMMAND...: exit code, and TEXT (fixed) once in what is printed to stderr. What takes so long hangs.
expect() {
  local code=$1 text=$2 status=0
  shift 2
  timeout 500 "$@" >out 2>error </dev/null || status=$?
  [[ $status == "$code" ]] || fail "$*: exit $status, expected $code: $(cat error)"
  [[ -z $text || $(grep -cF -- "$text" error) == 1 ]] || fail "$*: expected \"$text\" once, got: $(cat error)"
}
