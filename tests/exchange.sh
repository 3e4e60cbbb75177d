#!/usr/bin/env bash
# `import` and `export` as a user runs them: what they give back, what they refuse, memory, full disks, Ctrl-C, two at
# once. Whatever goes wrong is one message, and nothing half-written has the final name. exchange.sh BUILD_FOLDER
set -euo pipefail
set -- "$(realpath "$1")"
strata=$1/bin/strata
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tests=$(dirname "$(realpath "$0")")
. "$tests/common.sh"
cd "$work"

# folder NAME LAYERS HIDDEN VOCABULARY: a Llama of zeros; its weights are holes and take no disk
folder() {
  mkdir "$1"
  python3 - "$@" <<'PY'
import json, sys
folder, layers, hidden, vocabulary = sys.argv[1], *map(int, sys.argv[2:])
shapes = {"model.embed_tokens.weight": [vocabulary, hidden], "model.norm.weight": [hidden]}
for i in range(layers):
    p = f"model.layers.{i}."
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"): shapes[p + f"self_attn.{name}.weight"] = [hidden, hidden]
    for name in ("gate_proj", "up_proj"): shapes[p + f"mlp.{name}.weight"] = [2 * hidden, hidden]
    shapes[p + "mlp.down_proj.weight"] = [hidden, 2 * hidden]
    for name in ("input_layernorm", "post_attention_layernorm"): shapes[p + name + ".weight"] = [hidden]
header, end = {}, 0
for name, shape in shapes.items():
    begin, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
    header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
text = json.dumps(header).encode()
with open(folder + "/model.safetensors", "wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    file.truncate(8 + len(text) + end)
json.dump({"model_type": "llama", "num_hidden_layers": layers, "num_attention_heads": 4, "hidden_size": hidden,
           "intermediate_size": 2 * hidden, "vocab_size": vocabulary, "tie_word_embeddings": True, "eos_token_id": 5},
          open(folder + "/config.json", "w"))
PY
}
# Nothing that is only half there: neither hidden folders nor folders that were made for nothing.
clean() { [[ -z $(find . -name '.unfinished-*' -o -name '.saving-*' -o -name '*.tmp-*') ]] || fail "left behind: $(find . -name '.*')"; }
absent() { clean; [[ ! -e $1 ]] || fail "left behind: $(find "$1")"; }

folder small 2 32 50
echo '{"chat": "as it came"}' >small/tokenizer_config.json
echo '{"eos_token_id": [5, 6]}' >small/generation_config.json
echo weights >small/pytorch_model.bin
mkdir linked && for file in small/*; do ln -s "../$file" linked/; done  # as the hub's cache has them

# There and back, with what is beside the weights, in folders with spaces and behind links; no [data] table.
expect 0 '' "$strata" import linked 'an import'
cmp small/tokenizer_config.json 'an import/external/tokenizer_config.json' || fail "the tokenizer was not kept"
expect 0 '' "$strata" export 'an import/model.toml' 'an export' --checkpoint 'an import' --dtype bf16 --shard-size 10KB
[[ $(ls 'an export' | grep -c 'model-0000.-of-0000..safetensors') -gt 2 ]] || fail "no shards: $(ls 'an export')"
for file in tokenizer_config.json generation_config.json; do cmp small/$file "an export/$file" || fail "$file differs"; done
python3 - 'an export' <<'PY' || fail "index or configuration"
import json, os, sys
index = json.load(open(sys.argv[1] + "/model.safetensors.index.json"))
assert {f for f in os.listdir(sys.argv[1]) if f.endswith(".safetensors")} == set(index["weight_map"].values())
config = json.load(open(sys.argv[1] + "/config.json"))
assert config["eos_token_id"] == 5 and config.get("dtype", config.get("torch_dtype")) == "bfloat16", config
PY

# A folder of another model: refused; replaced whole when told to, so that old shards do not outlive it.
expect 2 'replace that model with --overwrite' "$strata" export 'an import/model.toml' 'an export' --checkpoint 'an import'
touch 'an export/README.md' 'an export/vocab.json'
expect 0 '' "$strata" export 'an import/model.toml' 'an export' --checkpoint 'an import' --overwrite
[[ $(ls -A 'an export' | xargs) == "README.md config.json generation_config.json model.safetensors tokenizer_config.json" ]] || fail "after --overwrite: $(ls -A 'an export')"
expect 2 'replace it with --overwrite' "$strata" import small 'an import'
expect 0 '' "$strata" import 'an export' 'an import' --overwrite
ln -s 'an export' link
expect 0 '' "$strata" export 'an import/model.toml' link --checkpoint 'an import' --overwrite
[[ -L link && -f 'an export/config.json' ]] || fail "a link to a folder was replaced"
clean

# Training from it hands the tokenizer on.
prepare_data
{ cat 'an import/model.toml'; cat <<'TOML'
[run]
steps = 1
directory = "run"
initialize = "an import"
[data]
train = ["data/train_*.bin"]
sequence_length = 8
global_batch = 1
micro_batch = 1
[plugins.adamw]
TOML
} >config.toml
sed -i 's/^vocabulary = .*/vocabulary = 256/' config.toml
expect 2 'is a checkpoint of another model' "$strata" train config.toml
rm -rf run
folder bytes 1 32 256
cp small/tokenizer_config.json bytes/
expect 0 '' "$strata" import bytes 'an import' --overwrite
sed -i 's/^layers = .*/layers = 1/' config.toml
expect 0 '' "$strata" train config.toml
expect 0 '' "$strata" export config.toml trained
cmp small/tokenizer_config.json trained/tokenizer_config.json || fail "the tokenizer did not come along through training"
expect 2 'Turn it into one with: strata import small' "$strata" train config.toml --set run.directory=other --set run.initialize=small
expect 2 'holds checkpoints of a run' "$strata" import small run --overwrite

# Ranks that share the work start from what was imported as one rank does, and export what it exports: the same bits
# where nothing was learned, and after steps what sums in another order leave alike.
sed '/^initialize/d' config.toml >random.toml
expect 0 '' "$strata" train random.toml --set run.directory=seeded
expect 0 '' "$strata" export random.toml seeded-export --checkpoint seeded
expect 0 '' "$strata" import seeded-export seeded-import
sed 's/^initialize.*/initialize = "seeded-import"/; s/^steps.*/steps = 4/' config.toml >one.toml
for sequence in false true; do
  { cat one.toml; printf '[mesh]\ntensor = 2\n[plugins.tensor_parallel]\nsequence = %s\n' $sequence; } >divided-$sequence.toml
  expect 0 '' "$strata" train divided-$sequence.toml --set run.directory=still --set plugins.adamw.learning_rate=1e-60
  expect 0 '' "$strata" export divided-$sequence.toml still-export --checkpoint still --overwrite
  cmp seeded-export/model.safetensors still-export/model.safetensors || fail "two ranks export other weights than were imported"
  rm -rf still
  expect 0 '' "$strata" train divided-$sequence.toml --set run.directory=divided-$sequence
  expect 0 '' "$strata" export divided-$sequence.toml export-$sequence --checkpoint divided-$sequence
done
expect 0 '' "$strata" train one.toml --set run.directory=one
expect 0 '' "$strata" export one.toml export-one --checkpoint one
python3 - <<'PY' || fail "two ranks learned otherwise than one"
import array, json
def weights(folder):
    with open(folder + "/model.safetensors", "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    header.pop("__metadata__", None)
    assert {t["dtype"] for t in header.values()} == {"F32"}
    return {name: array.array("f", data[slice(*t["data_offsets"])]) for name, t in header.items()}
def differ(a, b): return max(abs(x - y) for name in a for x, y in zip(a[name], b[name], strict=True))
before, one = weights("seeded-export"), weights("export-one")
assert differ(before, one) > 1e-4, differ(before, one)
for sequence in ("false", "true"):
    other = weights("export-" + sequence)
    assert other.keys() == one.keys() and differ(other, one) < 1e-5, (sequence, differ(other, one))  # a fraction of a step
PY

# Adapters beside the imported model: merged into an export, which is then another model; written alone, and read again.
{ cat one.toml; printf '[plugins.lora]\nrank = 3\n'; } >lora.toml
expect 0 '' "$strata" train lora.toml --set run.directory=adapted
expect 0 '' "$strata" export lora.toml merged --checkpoint adapted
cmp -s seeded-export/model.safetensors merged/model.safetensors && fail "the adapter was not merged"
expect 0 '' "$strata" export lora.toml adapter --checkpoint adapted --adapter
[[ $(ls -A adapter | xargs) == "adapter_config.json adapter_model.safetensors" ]] || fail "an adapter's folder: $(ls -A adapter)"
expect 2 'of another adapter; choose another folder, or replace it with --overwrite' "$strata" export lora.toml adapter --checkpoint adapted --adapter
expect 2 'no enabled plugin adds to the model what could be exported alone; leave out --adapter' "$strata" export one.toml nothing --checkpoint one --adapter
absent nothing
expect 0 '' "$strata" train lora.toml --set run.directory=again --set plugins.lora.adapter=adapter --set run.steps=1 --set plugins.adamw.learning_rate=1e-60
expect 0 '' "$strata" export lora.toml merged-again --checkpoint again
cmp merged/model.safetensors merged-again/model.safetensors || fail "an adapter that was written and read is another one"
expect 2 'adapter/adapter_config.json: "r" is 3, but plugins.lora.rank = 4' "$strata" train lora.toml --set run.directory=wrong --set plugins.lora.adapter=adapter --set plugins.lora.rank=4
expect 2 'is a checkpoint of another model' "$strata" export one.toml nothing --checkpoint adapted
absent nothing

# Dropout of attention is read and written, and is no difference between models.
cp -r "$tests/reference/data/gpt2" dropout && sed -i 's/"attn_pdrop": 0.0/"attn_pdrop": 0.25/' dropout/config.json
expect 0 '' "$strata" import dropout with-dropout
grep -q '^attention_dropout = 0.25$' with-dropout/model.toml || fail "attn_pdrop was not read"
rm -r with-dropout/external
expect 0 '' "$strata" export with-dropout/model.toml without --checkpoint with-dropout
grep -q '"attn_pdrop": 0.25' without/config.json || fail "attn_pdrop was not written"

# What cannot be imported.
wrong() { sed "s/$1/$2/" small/config.json >bad/config.json; }
cp -r small bad
wrong '"num_attention_heads": 4' '"num_attention_heads": 0'
expect 2 '"num_attention_heads" is 0; expected 1 to' "$strata" import bad target
wrong llama mamba
expect 2 'is of an architecture (mamba) that' "$strata" import bad target
wrong '{' '{"quantization_config": {}, '
expect 2 'sets "quantization_config"' "$strata" import bad target
: >bad/config.json
expect 2 'is not JSON' "$strata" import bad target
expect 2 'there is no such folder' "$strata" import nowhere target
expect 2 'holds neither model.safetensors nor' bash -c 'mkdir none; echo {} >none/config.json; exec "$0" import none target' "$strata"
: >file
expect 2 'file/target: cannot make the folder: Not a directory' "$strata" import small file/target
expect 2 'cannot write into it: Not a directory' "$strata" export 'an import/model.toml' file --checkpoint 'an import'
expect 2 '/proc/target: cannot make the folder' "$strata" import small /proc/target
expect 2 '--shard-size' "$strata" export 'an import/model.toml' target --checkpoint 'an import' --shard-size 0
expect 2 '--dtype' "$strata" export 'an import/model.toml' target --checkpoint 'an import' --dtype f8
absent target

# A damaged checkpoint, and a disk that is full (a limit on file size stands for it).
cp -r 'an import' damaged
shard=$(ls damaged/step-00000000/*.safetensors)
printf '\x55' | dd of="$shard" bs=1 seek=$(($(stat -c %s "$shard") - 100)) conv=notrunc 2>/dev/null
expect 2 'checksum does not match' "$strata" export config.toml target --checkpoint damaged
absent target
expect 1 'cannot write it: File too large' bash -c 'trap "" XFSZ; ulimit -f 16; exec "$0" import small target' "$strata"
absent target
expect 1 'cannot write it: File too large' bash -c 'trap "" XFSZ; ulimit -f 16; exec "$0" export config.toml target' "$strata"
absent target

# Ctrl-C and two at once, while the target is being made: a FIFO among the tokenizer's files would not do (it is refused),
# so a model large enough to be caught at it; that it ends before is legal as well.
folder large 6 512 256  # 16M parameters
unfinished() { compgen -G "$1/.unfinished-*" >/dev/null; }
for signal in INT TERM; do
  "$strata" import large interrupted >out 2>error & pid=$!
  until unfinished interrupted || ! kill -0 $pid 2>/dev/null; do :; done
  kill -$signal $pid 2>/dev/null || true
  status=0; wait $pid || status=$?
  if ((status == 0 || status > 128)); then  # ended before the signal came, or by it when all was done
    clean
    [[ -f interrupted/model.toml && -f interrupted/step-00000000/manifest.json ]] || fail "a finished import is not whole"
  else
    [[ $status == 1 ]] && grep -q 'interrupted; nothing was left half-written' error || fail "$signal: exit $status: $(cat error)"
    absent interrupted
  fi
  rm -rf interrupted
done
pids=()
for i in 1 2 3; do { code=0; "$strata" import large together >out.$i 2>error.$i || code=$?; echo $code >status.$i; } & pids+=($!); done
wait "${pids[@]}"
good=0
for i in 1 2 3; do
  case $(cat status.$i) in
    0) good=$((good + 1)) ;;
    1) grep -q 'another strata command is writing into this folder' error.$i || fail "two at once: $(cat error.$i)" ;;
    2) grep -q 'of an import before' error.$i || fail "two at once: $(cat error.$i)" ;;  # the first had ended
    *) fail "two at once: exit $(cat status.$i): $(cat error.$i)" ;;
  esac
done
[[ $good == 1 ]] || fail "of three imports at once $good succeeded"
clean
"$strata" export together/model.toml large-again --checkpoint together --dtype bf16 >out
[[ $(stat -c %s large-again/model.safetensors) -gt 30000000 ]] || fail "the imported model is not whole"

# Memory: beyond the process itself no more than the largest tensor and little (32 MiB here) for a model of 63 MB, and
# running out of it is a message. Sanitizers need address space without end.
if [[ $1 == *build ]]; then
  limit=65536
  until (ulimit -v $limit; exec "$strata" import small enough >/dev/null 2>&1); do
    rm -rf enough; limit=$((limit + 8192))
    ((limit < 8 << 20)) || { fail "no address space is enough"; break; }
  done
  expect 0 '' bash -c "ulimit -v $((limit + 32768)); exec \"\$0\" import large little" "$strata"
  expect 0 '' bash -c "ulimit -v $((limit + 32768)); exec \"\$0\" export little/model.toml little-again --checkpoint little" "$strata"
  folder wide 1 32 2000000  # an embedding of 256 MB
  expect 1 'out of memory' bash -c "ulimit -v $((limit + 32768)); exec \"\$0\" import wide target" "$strata"
  absent target
  expect 0 '' "$strata" import wide wide-imported
  expect 1 'out of memory' bash -c "ulimit -v $((limit + 32768)); exec \"\$0\" export wide-imported/model.toml target --checkpoint wide-imported" "$strata"
  absent target
fi

finish exchange
