"""Random models of transformers through `strata import` and `strata export`: check_external.py STRATA [CASES [SEED]].
Needs torch and transformers (see make.py).

Each case saves a GPT-2, Llama, Qwen, Mistral, Phi-3 or Gemma of odd sizes in f32, bf16 or f16, in one file or many, tied or not, with extra
tensors and tokenizer files, imports it, exports it in some dtype and shard size, and compares: every tensor bit for bit
with what torch's rounding makes of the saved one, the tokenizer's files byte for byte, and the logits of what
transformers loads from the export with those of the model that was saved.
"""
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
TOKENIZER = {"tokenizer.json": '{"version": "1.0"}', "tokenizer_config.json": '{"model_max_length": 1e30}\n',
             "merges.txt": "#version: 0.2\na b\n", "vocab.json": '{"a": 0}', "generation_config.json": '{"eos_token_id": [3, 5]}'}


def random_model(r):
    family = r.choice(["gpt2", "llama", "llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3"])
    heads = r.choice([1, 2, 3, 4])
    head = r.choice([2, 6, 20, 16])
    vocabulary, layers, context, tied = r.randint(7, 300), r.randint(1, 3), r.randint(17, 60), r.random() < 0.5
    if family == "gpt2":
        config = transformers.GPT2Config(vocab_size=vocabulary, n_positions=context, n_embd=heads * head, n_layer=layers, n_head=heads,
                                         n_inner=r.choice([None, r.randint(3, 90)]), resid_pdrop=(dropout := r.choice([0.0, 0.1, 0.25])),
                                         embd_pdrop=dropout, attn_pdrop=r.choice([0.0, 0.1, 0.3]), activation_function=r.choice(["gelu_new", "relu", "gelu_pytorch_tanh", "gelu"]),
                                         tie_word_embeddings=tied, eos_token_id=r.randrange(vocabulary), initializer_range=0.2)
        return transformers.GPT2LMHeadModel(config)
    hidden = r.choice([heads * head, 60, 11 * heads])
    settings = dict(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=r.randint(3, 90), num_hidden_layers=layers,
                    num_attention_heads=heads, num_key_value_heads=r.choice([k for k in range(1, heads + 1) if heads % k == 0]),
                    head_dim=head, max_position_embeddings=context, rms_norm_eps=r.choice([1e-6, 1e-5]), tie_word_embeddings=tied,
                    eos_token_id=r.randrange(vocabulary), initializer_range=0.2,
                    rope_parameters={"rope_type": "default", "rope_theta": r.choice([10000.0, 500000.0])})
    settings["pad_token_id"] = None
    settings["attention_dropout"] = r.choice([0.0, 0.0, 0.2])
    theta = settings["rope_parameters"]["rope_theta"]
    if family in ("llama", "mistral", "qwen3") and (kind := r.choice(["default", "linear", "dynamic", "llama3", "yarn"])) != "default":
        rope = {"rope_type": kind, "rope_theta": theta, "factor": r.choice([1.5, 4.0, 32.0])}
        if kind in ("llama3", "yarn"):
            rope["original_max_position_embeddings"] = r.randint(8, context)
        if kind == "llama3":
            rope.update(low_freq_factor=1.0, high_freq_factor=r.choice([2.0, 4.0]))
        if kind == "yarn":
            rope.update(r.choice([{}, {"attention_factor": 1.25}, {"mscale": 0.7, "mscale_all_dim": 1.3}, {"beta_fast": 16.0, "beta_slow": 0.5}]))
        if kind != "dynamic" or head > 2:
            settings["rope_parameters"] = rope
    window = r.choice([1, 3, 16, 100])
    if family == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, attention_bias=r.random() < 0.5, mlp_bias=r.random() < 0.5,
                                                                      hidden_act=r.choice(["silu", "gelu", "gelu_pytorch_tanh"])))
    if family == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**settings, sliding_window=r.choice([None, window])))
    if family == "phi3":
        settings["hidden_size"] = heads * head
        del settings["head_dim"]
        part = r.choice([1.0, 0.5]) if head % 4 == 0 else 1.0
        settings["rope_parameters"]["partial_rotary_factor"] = part
        if r.random() < 0.6:
            pairs = int(head * part) // 2
            factors = lambda most: [r.choice([1.0, 1.0800000429153442, r.uniform(1, most)]) for _ in range(pairs)]
            settings["rope_parameters"].update(rope_type="longrope", short_factor=factors(3), long_factor=factors(40),
                                               **r.choice([{}, {}, {"attention_factor": 1.25}, {"factor": 3.0}]))
            settings["original_max_position_embeddings"] = r.choice([context // 2, context, 4, 2])
        return transformers.Phi3ForCausalLM(transformers.Phi3Config(**settings, sliding_window=r.choice([None, window])))
    if family.startswith("gemma"):
        settings.update(sliding_window=window, query_pre_attn_scalar=r.choice([head, 7]),
                        final_logit_softcapping=r.choice([None, 2.0]), attn_logit_softcapping=r.choice([None, 3.0]),
                        layer_types=[r.choice(["sliding_attention", "full_attention"]) for _ in range(layers)])
        if family == "gemma2":
            return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**settings))
        settings["rope_parameters"] = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": theta},
                                       "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
        return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**settings))
    if r.random() < 0.5:
        settings.update(use_sliding_window=True, sliding_window=window, max_window_layers=r.randint(0, layers))
    if family == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings, attention_bias=r.random() < 0.5))
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**settings))


def randomize(model, r):
    """Biases and norms away from their first values, and numbers that round in every way."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
            flat = parameter.view(-1)
            for value in (0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 6e-8, -3e-8, 1e-40):
                flat[r.randrange(flat.numel())] = value


def rewrite(folder, r):
    """Tensors that nobody needs, as older transformers left them; returns what the output layer was made to be, if anything."""
    path = folder / "model.safetensors"
    if not path.exists():
        return None
    tensors = load_file(path)
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    layer = "transformer.h.0." if family == "gpt2" else "model.layers.0."
    if r.random() < 0.5:
        tensors[layer + ("attn.bias" if family == "gpt2" else "self_attn.rotary_emb.inv_freq")] = torch.ones(4, 4)
        tensors["model.position_ids"] = torch.arange(9)
        tensors["mask"] = torch.ones(3, dtype=torch.bool)
    apart = None
    if "lm_head.weight" not in tensors and r.random() < 0.5:
        embedding = tensors["transformer.wte.weight" if family == "gpt2" else "model.embed_tokens.weight"]
        tensors["lm_head.weight"] = embedding.clone()
        if r.random() < 0.5:
            tensors["lm_head.weight"][-1, -1] += 1
            apart = tensors["lm_head.weight"]
    elif r.random() < 0.3 and config["tie_word_embeddings"]:  # of a base model the names are shorter
        tensors = {name.split(".", 1)[1] if name.startswith(("transformer.", "model.")) else name: t for name, t in tensors.items()}
    save_file(tensors, path, {"format": "pt"})
    return apart


def check(strata, case, seed):
    r = random.Random(seed)
    torch.manual_seed(seed)
    stored, wanted = r.choice(list(DTYPES)), r.choice(list(DTYPES))
    model = random_model(r)
    randomize(model, r)
    model = model.to(DTYPES[stored]).eval()
    with tempfile.TemporaryDirectory(prefix="a folder of ") as work:
        work = pathlib.Path(work)
        model.save_pretrained(work / "theirs", max_shard_size=r.choice(["5GB", "20KB"]))
        for name, text in TOKENIZER.items():
            (work / "theirs" / name).write_text(text)
        expected = {name: tensor for name, tensor in model.state_dict().items()}
        apart = rewrite(work / "theirs", r)
        if apart is not None:
            expected["lm_head.weight"] = apart
        elif model.config.tie_word_embeddings:
            expected.pop("lm_head.weight")

        def run(*words):
            done = subprocess.run([strata, *map(str, words)], capture_output=True, text=True)
            assert done.returncode == 0, f"{words}: {done.returncode}: {done.stderr}"
        run("import", work / "theirs", work / "imported")
        run("export", work / "imported/model.toml", work / "ours", "--checkpoint", work / "imported", "--dtype", wanted,
            "--shard-size", r.choice(["5GB", "20KB", "1MiB"]))
        got = {}
        for path in (work / "ours").glob("*.safetensors"):
            got.update(load_file(path))
        assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
        for name, tensor in expected.items():
            want = tensor.float().to(DTYPES[wanted])
            assert got[name].dtype == want.dtype and got[name].shape == want.shape, name
            bits = torch.int32 if wanted == "f32" else torch.int16
            assert torch.equal(got[name].view(bits), want.view(bits)), f"{name} differs"
        for name, text in TOKENIZER.items():
            assert (work / "ours" / name).read_text() == text, name
        theirs, ours = (json.loads((work / f / "config.json").read_text()) for f in ("theirs", "ours"))
        assert ours.get("dtype", ours.get("torch_dtype")) == str(DTYPES[wanted]).split(".")[1]
        for key in theirs:
            if key not in ("dtype", "torch_dtype", "architectures", "tie_word_embeddings"):
                assert theirs[key] == ours[key], key
        assert ours["tie_word_embeddings"] == (model.config.tie_word_embeddings and apart is None)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(work / "ours", dtype=torch.float32).double().eval()
        with torch.no_grad():
            config = model.config  # a fresh model: rounding the saved one has rounded its rotary frequencies too
            config.tie_word_embeddings = ours["tie_word_embeddings"]
            reference = type(model)(config).eval()
            reference.load_state_dict({name: t.float().to(DTYPES[wanted]) for name, t in expected.items()}, strict=False)
            reference = reference.double()
            tokens = torch.randint(model.config.vocab_size, (2, 16))
            difference = (loaded(tokens).logits - reference(tokens).logits).abs().max().item()
            assert difference <= 1e-9 * max(1.0, reference(tokens).logits.abs().max().item()), f"logits differ by {difference}"
    return f"{model.config.model_type} {stored} to {wanted}"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    cases, first = int(sys.argv[2]) if len(sys.argv) > 2 else 200, int(sys.argv[3]) if len(sys.argv) > 3 else 1
    for case in range(cases):
        try:
            print(f"case {case + 1} of {cases}: {check(sys.argv[1], case, first + case)}", flush=True)
        except Exception:
            print(f"FAILED: seed {first + case}", flush=True)
            raise
