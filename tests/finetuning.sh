#!/usr/bin/env bash
# Conversations from a file to a model, through the command: prepared with masks, packed, trained for epochs within a budget
# on several ranks, evaluated; and what is wrong with them told in one message. finetuning.sh BUILD_FOLDER
set -euo pipefail
strata=$(realpath "$1")/bin/strata
reference=$(dirname "$(realpath "$0")")/reference/data
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. "$(dirname "$(realpath "$0")")/common.sh"
cd "$work"
mkdir model
python3 - "$reference" <<'PY'
import json, sys
with open(sys.argv[1] + "/tokenizers/qwen2.json", encoding="utf-8") as file:
    described = json.load(file)["tokenizer"]
with open("model/tokenizer.json", "w", encoding="utf-8") as file:
    json.dump(described, file)
with open("chats.jsonl", "w") as file:
    for i in range(80):
        turns = [turn for k in range(i % 3 + 1) for turn in (
            {"role": "user", "content": f"What is {i} plus {k}?"}, {"role": "assistant", "content": f"It is {i + k}."})]
        file.write(json.dumps({"messages": turns}) + "\n")
PY
cat >model/chat_template.jinja <<'JINJA'
{% for message in messages %}{{ '<|im_start|>' + message.role + '
' + message.content + '<|im_end|>
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}
JINJA
"$strata" data prepare chats.jsonl --output data --tokenizer model --validation 0.1 >prepared
grep -q '^[0-9]* of the tokens count: what the assistant says' prepared || fail "prepare says: $(cat prepared)"
[[ $(ls data | tr '\n' ' ') == "tokenizer.json train_000.bin train_000.documents train_000.mask validation_000.bin validation_000.documents validation_000.mask " ]] ||
  fail "files: $(ls data)"
cat >config.toml <<'TOML'
[run]
epochs = 2.5
directory = "run"
[model]
plugin = "gpt"
layers = 2
hidden = 32
heads = 2
vocabulary = 563
context = 64
[data]
train = ["data/train_*.bin"]
validation = ["data/validation_*.bin"]
packed = true
sequence_length = 64
global_batch = 8
micro_batch = 2
[plugins.adamw]
learning_rate = 1e-2
TOML
expect 0 "" "$strata" check config.toml
expect 0 "% padding; " "$strata" train config.toml
grep -q '^data: [0-9]* sequences of 64 tokens, [0-9.]*% padding; [0-9]* steps take [0-9]*: 2\.[0-9]* epochs, so each is seen up to 3 times' error ||
  fail "train says: $(grep '^data' error)"
steps=$(wc -l <run/log.jsonl)
expect 0 "" "$strata" train config.toml --set run.directory=\"two\" --set mesh.data=2 --set plugins.zero.stage=2
python3 - <<'PY' || fail "two ranks have other losses"
import json
one, two = ([json.loads(line)["loss"] for line in open(name + "/log.jsonl")] for name in ("run", "two"))
assert len(one) == len(two) and all(abs(a - b) < 1e-3 * a for a, b in zip(one, two)), (one, two)
assert one[-1] < 0.7 * one[0], one
PY
# What counts is what is counted.
expect 0 "" "$strata" evaluate config.toml data/validation_000.bin --json
python3 - out <<'PY' || fail "evaluate: $(cat out)"
import json, struct, sys
score = json.load(open(sys.argv[1]))[0]
mask, documents = (open("data/validation_000" + end, "rb").read() for end in (".mask", ".documents"))
tokens = struct.unpack("<q", mask[8:16])[0]
starts = struct.unpack(f"<{(len(documents) - 16) // 8}q", documents[16:])
counts = [mask[16 + i // 8] >> i % 8 & 1 for i in range(tokens)]
assert starts[0] == 0 and score["tokens"] == sum(counts) - sum(counts[i] for i in starts), (score, sum(counts))
PY
expect 0 "" "$strata" evaluate config.toml data/validation_000.bin --set data.packed=false

# One message each.
"$strata" data prepare prepared --output bytes-of-text --validation 0 >/dev/null
expect 2 "bytes-of-text/train_000.bin: was made with another tokenizer than data/train_000.bin" "$strata" check config.toml --set data.packed=false --set 'data.validation=["bytes-of-text/train_*.bin"]'
expect 2 "run.steps and run.epochs both say how long to train" "$strata" check config.toml --set run.steps=5
expect 2 "data.train and [sources.NAME] both say what to train on" "$strata" check config.toml --set 'sources.a.files=["data/train_000.bin"]'
sed '/^train =/d' config.toml >sources.toml
cat >>sources.toml <<'TOML'
[sources.chats]
files = ["data/train_*.bin"]
weight = 3.0
[sources.more]
files = ["data/validation_000.bin"]
TOML
expect 2 "run.epochs counts passes over data.train, but there are several sources" "$strata" check sources.toml
sed -i 's/^epochs.*/steps = 4/' sources.toml
expect 0 "data more: " "$strata" train sources.toml --set run.directory=\"sources\"
expect 2 "data.train is missing" "$strata" check <(sed '/^\[sources/,$d' sources.toml)
cp data/train_000.mask whole
head -c 20 whole >data/train_000.mask
expect 2 "data/train_000.mask: says that it is of" "$strata" train config.toml --set run.directory=\"none\"
rm data/train_000.mask
cp data/validation_000.bin data/train_001.bin
cp data/validation_000.mask data/train_001.mask
expect 2 "data/train_000.bin: has no loss mask (data/train_000.mask), but data/train_001.bin has one" "$strata" check config.toml
rm data/train_001.*
cp whole data/train_000.mask
rm data/train_000.documents
expect 2 "data/train_000.bin: does not say where its documents begin" "$strata" check config.toml
expect 0 "" "$strata" check config.toml --set data.packed=false --set run.directory=\"none\"
printf '{%% for m in messages %%}{%% if not loop.last %%}x{%% endif %%}{{ m.content }}{%% endfor %%}' >model/chat_template.jinja
expect 2 "chats.jsonl:1: model/chat_template.jinja:1: what the assistant says in messages[1] cannot be told" "$strata" data prepare chats.jsonl --output other --tokenizer model
expect 0 "" "$strata" data prepare chats.jsonl --output other --tokenizer model --train-on all
[[ ! -e other/train_000.mask ]] || fail "a mask where all counts"
finish "fine-tuning"
