"""Run converted notebooks on two GPUs, and each notebook as it is on one: SFT, vision, DPO, GRPO, loops by hand.

    python -m benchmarks.correctness.converted_notebooks prepare --out DIR --sft Llama3.1_8B-Alpaca.ipynb --vision
    Qwen2_VL_7B-Vision.ipynb python -m benchmarks.correctness.converted_notebooks run --out DIR --json results.json

`prepare` needs the kit's environment and no GPU: it changes copies of the two notebooks given (hub names become
folders, fewer steps, a cell that counts saves), adds the kit's own (notebooks/sft_chat_lora.ipynb and those in
notebook_cells.py beside this file), converts them and writes the scripts, and beside each the notebook's cells as they
are. `run` needs two GPUs and no network: it makes models with random weights and rows of their kinds, starts every
script with two processes and every notebook with one, and writes the losses of both. A run passes where it ends well,
its loss falls (GRPO: its rewards are logged), and every folder was saved once, by rank 0.
"""

import argparse
import importlib.util
import json
import os
import random
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common.models import write_model
from benchmarks.common.runs import REPO, run_logged, torchrun
from benchmarks.correctness.notebook_cells import NOTEBOOKS

EXAMPLE = REPO / "notebooks" / "sft_chat_lora.ipynb"
COUNT_SAVES = """\
import os, peft
_save = peft.PeftModel.save_pretrained
def _counted(self, folder, *args, **kwargs):
    with open("saves.log", "a") as log:
        log.write(os.environ.get("RANK", "0") + " " + str(folder) + chr(10))
    return _save(self, folder, *args, **kwargs)
peft.PeftModel.save_pretrained = _counted
"""
# What stands in the notebooks, and what it becomes; each must be found.
CHANGES = {
    "example": {"max_steps=6": "max_steps=20"},
    "sft": {
        '"unsloth/Llama-3.1-8B"': '"local/llama"',
        '"unsloth/alpaca-cleaned"': '"local/alpaca"',
        "max_steps = 60": "max_steps = 12",
        "learning_rate = 2e-4": "learning_rate = 5e-3",
    },
    "vision": {
        '"unsloth/Qwen2-VL-7B-Instruct"': '"local/qwen2_vl"',
        '"unsloth/LaTeX_OCR"': '"local/formulas"',
        "load_in_4bit = True": "load_in_4bit = False",
        "max_steps = 30": "max_steps = 12",
        "learning_rate = 2e-4": "learning_rate = 5e-3",
    },
    **{name: {} for name in NOTEBOOKS},
}


def own_notebook(name: str, out: Path) -> Path:
    """Write one of the kit's small notebooks."""
    cells = [
        {"cell_type": "code", "metadata": {}, "source": source, "outputs": [], "execution_count": None}
        for source in NOTEBOOKS[name]
    ]
    path = out / f"{name}_own.ipynb"
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}))
    return path


def plain_script(notebook: dict[str, Any]) -> str:
    """Return the notebook's cells as they are, with `pass` for the lines that only IPython runs."""
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    lines = [line for cell in cells for line in [*cell.splitlines(), ""]]
    return "\n".join(re.sub(r"^(\s*)[!%].*", r"\1pass", line) for line in lines) + "\n"


def prepare(out: Path, notebooks: dict[str, Path]) -> None:
    """Write a script for each notebook, from a changed copy of it."""
    from unsloth_ddp.notebook.convert import convert

    out.mkdir(parents=True, exist_ok=True)
    for name, path in notebooks.items():
        copy = out / f"{name}.ipynb"
        copy.write_text(json.dumps(changed(json.loads(path.read_text()), CHANGES[name])))
        (out / f"{name}_plain.py").write_text(plain_script(json.loads(copy.read_text())))
        conversion = convert(copy)
        (out / f"{name}.py").write_text(conversion.script)
        print(f"{name}: {len(conversion.report.edits)} edits, {len(conversion.report.warnings)} warnings")


def changed(notebook: dict[str, Any], changes: dict[str, str]) -> dict[str, Any]:
    """Return the notebook with its strings replaced, and a cell that counts saves below the import of Unsloth."""
    missing = set(changes)
    cells = []
    counted = False
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            for old, new in changes.items():
                if old in source:
                    missing.discard(old)
                    source = source.replace(old, new)
        cells.append({**cell, "source": source})
        if cell["cell_type"] == "code" and "from unsloth import Fast" in source and not counted:
            counted = True
            cells.append(
                {"cell_type": "code", "metadata": {}, "source": COUNT_SAVES, "outputs": [], "execution_count": None}
            )
    if missing:
        raise SystemExit(f"the notebook has none of {sorted(missing)}; give the one that CHANGES is written for")
    return {**notebook, "cells": cells}


# Models and rows ------------------------------------------------------------------------------------------------------


def make_llama(folder: Path) -> None:
    """Write a small Llama."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 512, "num_hidden_layers": 4, "intermediate_size": 1536, "vocab_size": 1024}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    write_model(LlamaConfig(**sizes, **heads, max_position_embeddings=4096, dtype="bfloat16"), folder)


VISION_TOKENS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"]
VISION_TOKENS += ["<|image_pad|>", "<|video_pad|>"]
VISION_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_qwen2_vl(folder: Path) -> None:
    """Write a small Qwen2-VL with random weights, its processor, and the demo's tokenizer with the model's tokens."""
    import torch
    from transformers import (
        AutoTokenizer,
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
    )

    tokenizer = AutoTokenizer.from_pretrained(REPO / "demo" / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": VISION_TOKENS, "eos_token": "<|im_end|>"})
    number = tokenizer.convert_tokens_to_ids
    torch.manual_seed(0)
    config = Qwen2VLConfig(
        text_config={
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 1024,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e6},
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={"depth": 2, "embed_dim": 128, "num_heads": 4, "hidden_size": 256, "patch_size": 14},
        vision_start_token_id=number("<|vision_start|>"),
        vision_end_token_id=number("<|vision_end|>"),
        vision_token_id=number("<|vision_pad|>"),
        image_token_id=number("<|image_pad|>"),
        video_token_id=number("<|video_pad|>"),
    )
    Qwen2VLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=VISION_TEMPLATE,
    ).save_pretrained(folder)


def make_alpaca(folder: Path) -> None:
    """Write instructions that ask for a sum, with the answer."""
    draw = random.Random(0)
    folder.mkdir(parents=True)
    with (folder / "train.jsonl").open("w") as file:
        for _ in range(400):
            a, b = draw.randrange(100), draw.randrange(100)
            row = {"instruction": "Add the numbers.", "input": f"{a} and {b}", "output": f"The sum is {a + b}."}
            file.write(json.dumps(row) + "\n")


def make_formulas(folder: Path) -> None:
    """Write small pictures with a text each, as Parquet."""
    from datasets import Dataset, Features, Image, Value
    from PIL import Image as Picture

    draw = random.Random(0)
    rows: dict[str, list[Any]] = {"image": [], "text": []}
    for _ in range(200):
        shade = draw.randrange(256)
        rows["image"].append(Picture.new("RGB", (112, 84), (shade, 255 - shade, shade // 2)))
        rows["text"].append(f"x = {shade}")
    folder.mkdir(parents=True)
    Dataset.from_dict(rows, features=Features({"image": Image(), "text": Value("string")})).to_parquet(
        folder / "train.parquet"
    )


MAKERS = {
    "example": [],
    "sft": [("local/llama", make_llama), ("local/alpaca", make_alpaca)],
    "vision": [("local/qwen2_vl", make_qwen2_vl), ("local/formulas", make_formulas)],
    **{name: [("local/llama", make_llama)] for name in NOTEBOOKS},
}


# Runs -----------------------------------------------------------------------------------------------------------------


def run(out: Path, names: list[str], seconds: float) -> list[dict[str, Any]]:
    """Run the prepared scripts with two processes and the notebooks with one, one after the other."""
    results = []
    for name in names:
        result = run_one(out, name, seconds, several=True)
        plain = run_one(out, name, seconds, several=False) if "error" not in result else {"losses": [], "exit": None}
        pairs = list(zip(result.get("losses", []), plain["losses"], strict=False))
        result |= {
            "notebook_losses": plain["losses"],
            "notebook_exit": plain["exit"],
            "notebook_tail": plain.get("tail", ""),
        }
        result["largest_difference"] = max((abs(loss - other) for loss, other in pairs), default=None)
        results.append(result)
    return results


def run_one(out: Path, name: str, seconds: float, *, several: bool) -> dict[str, Any]:
    """Make what a script needs, run it with two processes, or the notebook with one, and judge what it left."""
    folder = out.absolute() / (f"run_{name}" if several else f"run_{name}_plain")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "demo").symlink_to(REPO / "demo")
    result: dict[str, Any] = {"name": name, "processes": 2 if several else 1}
    try:
        for path, make in MAKERS[name]:
            make(folder / path)
    except Exception as error:
        message = f"{path}: {type(error).__name__}: {error}"
        return {**result, "losses": [], "exit": None, "passes": False, "error": message}
    launcher = torchrun(2) if several else [sys.executable]
    environment = {"HF_HUB_OFFLINE": "1", "UNSLOTH_COMPILE_LOCATION": str(folder / "compiled")}
    environment["HF_DATASETS_CACHE"] = str(folder / "datasets_cache")
    if not several:
        environment["CUDA_VISIBLE_DEVICES"] = "0"
    if importlib.util.find_spec("IPython") is None:
        stand_in_for_ipython(folder / "stand_in")
        environment["PYTHONPATH"] = f"{folder / 'stand_in'}:{os.environ.get('PYTHONPATH', '')}"
    started = time.time()
    log = folder / "log.txt"
    script = out.absolute() / (f"{name}.py" if several else f"{name}_plain.py")
    code = run_logged([*launcher, str(script)], log, seconds, environment, cwd=folder)
    text = log.read_text(errors="replace")
    return {**result, "seconds": round(time.time() - started, 1), "exit": code, **judge(folder, text, code, name)}


def stand_in_for_ipython(folder: Path) -> None:
    """Write an empty IPython package for machines without it: displays are not under test."""
    package = folder / "IPython"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    names = ("display", "Math", "Latex", "Audio", "HTML", "Markdown", "Image")
    (package / "display.py").write_text("".join(f"def {name}(*a, **k):\n    return None\n\n\n" for name in names))


def judge(folder: Path, text: str, code: int | str, name: str) -> dict[str, Any]:
    """Read the verdict from a run's log and folder."""
    losses = [float(number) for number in re.findall(r"'loss': '?(-?[\d.]+(?:e-?\d+)?)", text)]
    log = folder / "saves.log"
    saves = [line.split(" ", 1) for line in log.read_text().splitlines()] if log.exists() else []
    by_script = [where for _, where in saves if "outputs" not in where]
    third = max(1, len(losses) // 3)
    falls = len(losses) >= 3 and sum(losses[-third:]) < sum(losses[:third])
    if name == "grpo":  # its loss starts at zero and says little
        falls = len(re.findall(r"'reward': ", text)) >= 3
    once = len(by_script) == 1 and all(rank == "0" for rank, _ in saves)
    return {
        "losses": losses,
        "loss_falls": falls,
        "saves": saves,
        "one_save": once,
        "train_runtime_lines": text.count("'train_runtime'"),
        "batch": sorted(set(re.findall(r"(?:Total batch size|Global batch)[^\n]*", text))),
        "passes": code == 0 and falls and once,
        "tail": text[-1500:] if code else "",
    }


def main() -> int:
    """Prepare or run; return 1 if a run did not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("prepare", "run"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the scripts and runs")
    parser.add_argument("--sft", type=Path, help="the Alpaca notebook for Llama 3.1")
    parser.add_argument("--vision", type=Path, help="the vision notebook for Qwen2-VL")
    parser.add_argument("--only", choices=tuple(CHANGES), action="append", help="run only this one")
    parser.add_argument("--seconds", type=float, default=110, help="limit of one run")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    if options.step == "prepare":
        options.out.mkdir(parents=True, exist_ok=True)
        notebooks = {"example": EXAMPLE, "sft": options.sft, "vision": options.vision}
        notebooks |= {name: own_notebook(name, options.out) for name in NOTEBOOKS}
        prepare(options.out, {name: path for name, path in notebooks.items() if path is not None})
        return 0
    names = options.only or [name for name in CHANGES if (options.out / f"{name}.py").exists()]
    results = run(options.out, names, options.seconds)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    for result in results:
        print(json.dumps({key: value for key, value in result.items() if key not in ("saves", "losses")}))
    return 0 if results and all(result["passes"] for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
