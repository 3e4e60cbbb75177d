"""Imports the recorded models, exports them again, and compares what transformers makes of the result with the recorded
logits, under the config.json that came with it and under the one that is written without that: check_export.py STRATA.
Needs torch and transformers (see make.py)."""
import pathlib
import shutil
import subprocess
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file

DATA = pathlib.Path(__file__).parent / "data"

for name in sorted(folder.name for folder in DATA.iterdir() if (folder / "config.json").exists()):
    with tempfile.TemporaryDirectory() as work:
        run = lambda *words: subprocess.run([sys.argv[1], *words], check=True, stdout=subprocess.DEVNULL)
        run("import", str(DATA / name), f"{work}/imported")
        config = pathlib.Path(work, "config.toml")
        config.write_text(pathlib.Path(work, "imported/model.toml").read_text() + f'[run]\ndirectory = "{work}/imported"\n'
                          '[data]\ntrain = ["none"]\nsequence_length = 16\nglobal_batch = 1\nmicro_batch = 1\n[plugins.adamw]\n')
        expected = load_file(DATA / name / "expected.safetensors")
        for configuration in ("kept", "own"):
            if configuration == "own":
                shutil.rmtree(f"{work}/imported/external")
            run("export", str(config), f"{work}/{configuration}")
            # Grouped products of experts take no double.
            model = transformers.AutoModelForCausalLM.from_pretrained(
                f"{work}/{configuration}", attn_implementation="eager", experts_implementation="eager")
            with torch.no_grad():
                logits = model.double().eval()(expected["tokens"].long()).logits.float()
            difference = (logits - expected["logits"]).abs().max().item()
            print(f"{name}: {type(model).__name__}, {configuration} config.json, largest difference of logits {difference:g}")
            assert difference <= 1e-5 * expected["logits"].abs().max().item()
