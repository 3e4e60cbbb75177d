"""What both sides of a comparison start from: the tokens of one batch, and GPT-2's weights. `arguments` has the sizes as
numbers: batch, time, vocabulary, layers, hidden, heads, context."""
import array
import json
import random
import struct


def write_tokens(path, arguments):
    """One batch and the token after it: every step sees the same, whatever the order in which files are read."""
    count = arguments.batch * arguments.time + 1
    random.seed(1)
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", 20240520, 1, count, *([0] * 253)))
        file.write(struct.pack(f"<{count}H", *(random.randrange(arguments.vocabulary) for _ in range(count))))


def write_model(folder, arguments):
    """GPT-2 as Hugging Face keeps it, with normal weights of deviation 0.02 from a table of them."""
    h, shapes = arguments.hidden, {}
    shapes["wte.weight"], shapes["wpe.weight"] = [arguments.vocabulary, h], [arguments.context, h]
    for i in range(arguments.layers):
        for name, shape in [("ln_1", [h]), ("attn.c_attn", [h, 3 * h]), ("attn.c_proj", [h, h]), ("ln_2", [h]),
                            ("mlp.c_fc", [h, 4 * h]), ("mlp.c_proj", [4 * h, h])]:
            shapes[f"h.{i}.{name}.weight"], shapes[f"h.{i}.{name}.bias"] = shape, shape[-1:]
    shapes["ln_f.weight"], shapes["ln_f.bias"] = [h], [h]
    random.seed(2)
    table = array.array("f", (random.gauss(0, 0.02) for _ in range(1_000_003)))
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        at = 0
        for name in shapes:
            begin, end = header[name]["data_offsets"]
            left = (end - begin) // 4
            if len(shapes[name]) == 1:
                file.write(array.array("f", [1.0 if name.endswith("weight") else 0.0]) * left)
            while len(shapes[name]) > 1 and left > 0:
                count = min(left, len(table) - at)
                file.write(table[at:at + count])
                at, left = (at + count) % len(table), left - count
    (folder / "config.json").write_text(json.dumps({
        "model_type": "gpt2", "n_layer": arguments.layers, "n_embd": h, "n_head": arguments.heads, "vocab_size": arguments.vocabulary,
        "n_positions": arguments.context, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": True}))
