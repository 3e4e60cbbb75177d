"""Records what transformers computes of documents one by one, for tests/finetuning_test.cpp, which packs them.

Needs: the packages of make.py
Run:   ref/bin/python tests/reference/packed.py

Writes, for some of the models of make.py, tests/reference/data/NAME/packed.safetensors with
  tokens, targets, documents (20, 2, 16) i32: sequences of several documents, of each token where its document begins;
                   targets -100 where they do not count (half of them at random, and the last one of each document)
  losses (20) f32: of 20 AdamW steps, each the mean over all targets of the step that count, of documents alone
All is computed in double, with the optimizer of make.py. The same documents in one sequence, with transformers' own
attention mask, positions and labels, give the same to 1e-6 (transformers has norms and angles in single
precision), which is checked here.
"""
import pathlib

import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = pathlib.Path(__file__).parent / "data"
TIME, STEPS, IGNORED = 16, 20, -100


def sequences(tokens):
    """Targets, and where documents begin, of sequences of TIME + 1 tokens."""
    batch = tokens.shape[0]
    targets, documents = tokens[:, 1:].clone(), torch.zeros(batch, TIME, dtype=torch.int32)
    for row in range(batch):
        begin = 0
        for t in range(TIME):
            if t > 0 and torch.rand(()) < 0.2:
                begin = t
                targets[row, t - 1] = IGNORED
            documents[row, t] = begin
    targets[torch.rand(targets.shape) < 0.5] = IGNORED
    return targets, documents


def sum_alone(model, tokens, targets, documents):
    loss = 0
    for row in range(tokens.shape[0]):
        for begin in documents[row].unique().tolist():
            part = documents[row] == begin
            logits = model(input_ids=tokens[row:row + 1, :-1][:, part].long()).logits[0]
            loss += torch.nn.functional.cross_entropy(logits, targets[row][part].long(), ignore_index=IGNORED,
                                                      reduction="sum")
    return loss


def sum_packed(model, tokens, targets, documents):
    positions = torch.arange(TIME) - documents.long()
    same = documents[:, :, None] == documents[:, None, :]
    seen = torch.tril(torch.ones(TIME, TIME, dtype=torch.bool)) & same
    window = getattr(model.config, "sliding_window", None)
    types = getattr(model.config, "layer_types", None) or ["full_attention"]
    near = torch.arange(TIME)[:, None] - torch.arange(TIME)[None, :] < (window or TIME)
    mask = lambda allowed: torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -1e30)[:, None]
    masks = {"full_attention": mask(seen), "sliding_attention": mask(seen & near)}
    given = masks if len(set(types)) > 1 or "sliding_attention" in types else masks["full_attention"]
    logits = model(input_ids=tokens[:, :-1].long(), attention_mask=given, position_ids=positions).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.long().flatten(), ignore_index=IGNORED,
                                             reduction="sum")


def record(name):
    torch.manual_seed(4)
    folder = HERE / name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    kept = {key: buffer.clone() for key, buffer in model.named_buffers()}
    model = model.float()
    for key, buffer in model.named_buffers():
        buffer.data = kept[key]
    model = model.double()
    model.train()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
                                  lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    batches = load_file(folder / "expected.safetensors")["train_tokens"]
    out, losses = {"tokens": [], "targets": [], "documents": []}, []
    for step in range(STEPS):
        tokens = batches[step]
        targets, documents = sequences(tokens)
        counted = int((targets >= 0).sum())
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 5)
        optimizer.zero_grad()
        loss = sum_alone(model, tokens, targets, documents) / counted
        with torch.no_grad():
            packed = sum_packed(model, tokens, targets, documents) / counted
        assert abs(packed.item() - loss.item()) < 1e-6 * loss.item(), (name, step, packed.item(), loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        for key, value in (("tokens", tokens[:, :-1]), ("targets", targets), ("documents", documents)):
            out[key].append(value.to(torch.int32))
    out = {key: torch.stack(value).contiguous() for key, value in out.items()}
    out["losses"] = torch.tensor(losses, dtype=torch.float32)
    save_file(out, folder / "packed.safetensors")
    print(name, losses[0], losses[-1])


if __name__ == "__main__":
    for name in ("gpt2", "qwen2", "qwen2_window"):
        record(name)
    print("torch", torch.__version__, "transformers", transformers.__version__)
