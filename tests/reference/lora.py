"""Records what PEFT computes with adapters beside the two tiny models of make.py, for tests/lora_test.cpp.

Needs: the packages of make.py, and peft
Run:   ref/bin/python tests/reference/lora.py

Writes, for gpt2 and qwen2, tests/reference/data/NAME/lora/: adapter_config.json and adapter_model.safetensors as PEFT
writes them before training (with second matrices that are not zero), and expected.safetensors with
  losses  (20) f32: of 20 AdamW steps of the adapters alone, on the train_tokens of make.py
  logits  (2, 16, V) f32: of the tokens of make.py, with the trained adapters merged
  lora_A, lora_B  of one module, trained
Everything is computed in double. AdamW: lr 1e-2, betas 0.9 and 0.999, eps 1e-8, weight decay 0.1, gradients clipped to a
global norm of 1.
"""
import json
import pathlib

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = pathlib.Path(__file__).parent / "data"
SETTINGS = {
    "gpt2": dict(r=4, lora_alpha=12, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True),
    "qwen2": dict(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"]),
}
KEPT = {"gpt2": "transformer.h.1.attn.c_attn", "qwen2": "model.layers.1.self_attn.v_proj"}


def record(name):
    folder = HERE / name
    torch.manual_seed(3)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **SETTINGS[name]))
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            parameter.data = 0.05 * torch.randn_like(parameter)
    target = folder / "lora"
    model.save_pretrained(target)
    (target / "README.md").unlink(missing_ok=True)
    config = json.loads((target / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = None  # a path of this machine
    (target / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    model = model.double()
    model.train()
    recorded = load_file(folder / "expected.safetensors")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    losses = []
    for tokens in recorded["train_tokens"]:
        optimizer.zero_grad()
        logits = model(input_ids=tokens[:, :-1].long()).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].long().flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
    out = {"losses": torch.tensor(losses, dtype=torch.float32)}
    for key, parameter in model.named_parameters():
        for part in ("lora_A", "lora_B"):
            if f"{KEPT[name]}.{part}" in key:
                out[part] = parameter.detach().float()
    merged = model.merge_and_unload()
    merged.eval()
    with torch.no_grad():
        out["logits"] = merged(input_ids=recorded["tokens"].long()).logits.float()
    save_file({k: v.contiguous() for k, v in out.items()}, target / "expected.safetensors")
    print(name, losses[0], losses[-1])


if __name__ == "__main__":
    for name in SETTINGS:
        record(name)
    print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
