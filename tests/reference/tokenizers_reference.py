#!/usr/bin/env python3
"""Small tokenizers as published ones are built, mixed text, and the tokens that the library `tokenizers` gives for it.

tests/reference/tokenizers_reference.py makes tests/reference/data/tokenizers (needs `tokenizers` 0.23 from PyPI): for each
family NAME.json with a tokenizer.json, the text in NAME.text and its tokens; text.bin is the text that all of them encode.
tools/bench/tokenizers uses the same families with larger vocabularies.
"""
import json
import os
import random
import sys

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers

HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = os.path.join(HERE, "data", "tokenizers")
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SPACE = "\u2581"


def mixed_text(size, seed=1):
    """Bytes: prose, code, emoji, Chinese, Arabic, Devanagari, combining marks, white space of all kinds, special tokens,
    and bytes that are no UTF-8."""
    rng = random.Random(seed)
    words = ("the quick brown Fox's jumps OVER it'll they'RE 'S 12345 3.14 naïve café Ω≈ç√ été ſ 'ſ K straße I'D "
             "für İstanbul e\u0301te\u0301 o\u0302\u0323 \u1112\u1161\u11ab 각 ﬁne ½ ² \u00a0x \u3000y a\u200bb a\u180eb \u0085 \u2028").split(" ")
    code = ["for (int i = 0; i < n; ++i) {\n\tsum += a[i]; // total\n}\n\n", "def f(x):\n    return x**2 + 1\n\n\n",
            "<html>\r\n  <p class=\"x\">&amp;</p>\r\n</html>\r\n", "#include <vector>\n\n\n", "x = {'a': [1, 2, 33, 4444]}\n"]
    special = ["<|endoftext|>", " <|im_start|>user\n", "<|im_end|>  ", "<s>", "</s> next", "<mask>", " wordy ", "<unk>",
               "<0x41>", "\n\n\n\n", SPACE + SPACE, "[PAD]"]
    broken = [b"\xff", b"\xe4\xb8", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf0\x9f\x98", b"\x80\x80", b"\xf4\x90\x80\x80", b"caf\xe9 "]
    out = bytearray()
    letter = {
        "chinese": lambda: chr(rng.randrange(0x4E00, 0x9FA5)), "arabic": lambda: chr(rng.randrange(0x621, 0x653)),
        "hindi": lambda: chr(rng.randrange(0x904, 0x94E)), "emoji": lambda: rng.choice("😀👍🏽👨‍👩‍👧🇩🇪❤️🤖🧪"),
        "marks": lambda: rng.choice("aeonz") + "".join(chr(rng.randrange(0x300, 0x370)) for _ in range(rng.randrange(3))),
        "korean": lambda: chr(rng.randrange(0xAC00, 0xD7A4)), "any": lambda: chr(rng.randrange(0x20, 0x800)),
    }
    kinds = list(letter)
    while len(out) < size:
        what = rng.random()
        if what < 0.5:
            out += " ".join(rng.choice(words) for _ in range(rng.randrange(1, 12))).encode()
        elif what < 0.6:
            out += rng.choice(code).encode()
        elif what < 0.85:
            make = letter[rng.choice(kinds)]
            out += "".join(make() for _ in range(rng.randrange(1, 9))).encode()
        elif what < 0.9:
            out += rng.choice(special).encode()
        elif what < 0.92:
            out += rng.choice(broken)
        else:
            out += "".join(rng.choice(" \n\t\r\u00a0\u2003") for _ in range(rng.randrange(1, 6))).encode()
        out += rng.choice(["", " ", " ", ", ", ".\n", "\n"]).encode()
    return bytes(out)


def trained(pre_tokenizer, normalizer, corpus, vocabulary, byte_level):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, show_progress=False, limit_alphabet=400 if vocabulary > 2000 else 110,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if byte_level else [])
    tokenizer.train_from_iterator(corpus, trainer)
    return json.loads(tokenizer.to_str())


def added(result, *tokens):
    """Appends added tokens: (content, options)."""
    vocabulary = result["model"]["vocab"]
    next_id = max(vocabulary.values()) + 1
    for content, options in tokens:
        id = vocabulary.get(content)
        if id is None:
            id, next_id = next_id, next_id + 1
        entry = {"id": id, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                 "special": True}
        entry.update(options)
        result["added_tokens"].append(entry)
    result["added_tokens"].sort(key=lambda entry: entry["id"])
    return result


def around(result, begin=None, end=None):
    """A template with these tokens around a text."""
    ids = {entry["content"]: entry["id"] for entry in result["added_tokens"]}
    names = [name for name in (begin, end) if name]
    single = ([{"SpecialToken": {"id": begin, "type_id": 0}}] if begin else []) + [{"Sequence": {"id": "A", "type_id": 0}}] + \
        ([{"SpecialToken": {"id": end, "type_id": 0}}] if end else [])
    result["post_processor"] = {
        "type": "TemplateProcessing", "single": single,
        "pair": single + [{"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in names}}
    return result


def byte_level(corpus, vocabulary, expression=None, normalizer=None, ignore_merges=False):
    step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=expression is None)
    if expression:
        step = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(expression), "isolated"), step])
    result = trained(step, normalizer, corpus, vocabulary, True)
    result["model"]["ignore_merges"] = ignore_merges
    result["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return result


def characters(corpus, vocabulary):
    """A SentencePiece-like vocabulary: <unk>, <s>, </s>, 256 bytes, then merged pieces and characters."""
    result = trained(pre_tokenizers.Metaspace(), None, corpus, vocabulary - 259, False)
    first = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    learned = sorted(result["model"]["vocab"], key=result["model"]["vocab"].get)
    result["model"]["vocab"] = {text: id for id, text in enumerate(first + [t for t in learned if t not in first])}
    result["model"].update(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    result["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    result["pre_tokenizer"] = None
    return added(result, ("<unk>", {}), ("<s>", {}), ("</s>", {}))


def families(corpus, vocabulary):
    """Name and tokenizer.json of each."""
    from tokenizers import normalizers
    chat = [("<|endoftext|>", {}), ("<|im_start|>", {}), ("<|im_end|>", {})]
    yield "gpt2", added(byte_level(corpus, vocabulary), ("<|endoftext|>", {}), ("<mask>", {"lstrip": True}),
                        ("word", {"single_word": True, "special": False, "normalized": True}), ("[PAD]", {"rstrip": True}))
    result = around(added(byte_level(corpus, vocabulary, LLAMA3, ignore_merges=True), *chat), begin="<|endoftext|>")
    result["post_processor"] = {"type": "Sequence", "processors": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}, result["post_processor"]]}
    yield "llama3", result
    yield "qwen2", added(byte_level(corpus, vocabulary, QWEN2, normalizers.NFC()), *chat)
    result = added(byte_level(corpus, vocabulary, O200K, normalizers.NFKC()), *chat)
    result["model"]["merges"] = [" ".join(pair) for pair in result["model"]["merges"]]  # as older files have them
    yield "tekken", result
    result = around(characters(corpus, vocabulary), begin="<s>")
    result["normalizer"] = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": SPACE}, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]}
    yield "llama2", result
    result = around(characters(corpus, vocabulary), begin="<s>", end="</s>")
    result["pre_tokenizer"] = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
    result["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "ByteFallback"}, {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}]}
    yield "mistral", result
    result = characters(corpus, vocabulary)
    result["pre_tokenizer"] = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
    result["model"].update(byte_fallback=False, fuse_unk=False)
    yield "metaspace", result
    result = added(characters(corpus, vocabulary), ("\n\n", {"special": False}), ("\n\n\n", {"special": False}),
                   (SPACE * 2, {"special": False}), ("<mask>", {"rstrip": True, "lstrip": True}))
    result["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    result["pre_tokenizer"] = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    result["decoder"]["decoders"].pop()
    yield "gemma", result
    result = byte_level(corpus, vocabulary)
    result["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "[\r\n]"}, "behavior": "MergedWithNext", "invert": False},
        {"type": "Split", "pattern": {"Regex": "\\s?\\p{L}+"}, "behavior": "Contiguous", "invert": True},
        {"type": "Split", "pattern": {"String": "="}, "behavior": "Removed", "invert": False},
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}]}
    yield "sequence", result


def corpus_of(text):
    return text.decode("utf-8", "replace").splitlines(keepends=True)


def main():
    os.makedirs(FOLDER, exist_ok=True)
    text = mixed_text(5000, seed=5)
    with open(os.path.join(FOLDER, "text.bin"), "wb") as file:
        file.write(text)
    for name, tokenizer in families(corpus_of(mixed_text(60000, seed=6)), 560):
        whole = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
        loaded = Tokenizer.from_str(whole)
        ids = loaded.encode(text.decode("utf-8", "replace")).ids
        recorded = {"tokenizer": tokenizer, "ids": ids, "text": loaded.decode(ids, skip_special_tokens=False)}
        with open(os.path.join(FOLDER, name + ".json"), "w", encoding="utf-8") as file:
            json.dump(recorded, file, ensure_ascii=False, separators=(",", ":"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
