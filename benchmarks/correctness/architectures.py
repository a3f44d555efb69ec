"""Train today's architectures with Unsloth on a GPU, and load what it saved in plain Transformers and PEFT.

    python -m benchmarks.correctness.architectures --work /tmp/kinds --json
    benchmarks/results/correctness/architectures.json

Small random models, in the class that the Hub's checkpoints name, take a few steps on the demo's rows: LoRA and every
parameter with Unsloth, and LoRA with Transformers. The adapter, loaded with PEFT in the Hub's class, has to give the
run's evaluation loss, the merged model that of the adapter, both backends the same adapted modules, and no tensor of
the checkpoint may be lost.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.runs import REPO, reload, train, write_results

KINDS = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "gpt_oss": "GptOssForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
}
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "moe_intermediate_size": 256, "out_hidden_size": 256,
    "projection_dim": 256, "conv_dim": 256,
    "sliding_window": 128,
}  # fmt: skip
STEPS = (
    "--max_steps 8 --global_batch_size 8 --per_device_train_batch_size 4 --learning_rate 2e-3 "
    "--lr_scheduler_type constant"
)
PLAIN = (
    "--gradient_checkpointing none --packing off --cuda_graphs off --report_to none --precision bf16 --max_length 256"
)
RUNS = {
    "lora-unsloth": "--backend unsloth --merge",
    "lora-transformers": "--backend transformers --merge",
    "full-unsloth": "--backend unsloth --method full --weight_decay 0.5",
}


def make_model(kind: str, folder: Path) -> None:
    """Write a random model as it is downloaded, with two tensors that Transformers does not model."""
    import torch

    from tests.tiny_models import save_tiny

    extra = {"mtp.fc.weight": torch.randn(8, 8), "mtp.layers.0.norm.weight": torch.ones(8)}
    save_tiny(kind, KINDS[kind], folder, extra, SIZES)


def shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor in a folder's weight files."""
    from safetensors import safe_open

    shapes_by_name = {}
    for path in sorted(folder.glob("*model*.safetensors")):
        with safe_open(path, "numpy") as file:
            shapes_by_name |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return shapes_by_name


def look_at(run: dict[str, Any], base: Path, work: Path) -> dict[str, Any]:
    """Return what a run has written: its evaluation loss when loaded again, and the tensors that are missing."""
    folder = work / "outputs" / run["name"]
    if run["exit_code"]:
        return {}
    full = "full" in run["name"]
    whole = folder if full else folder / "merged"
    base_shapes, after = shapes(base), shapes(whole)
    report: dict[str, Any] = {
        "reloaded": reload(folder),
        "lost": sorted(base_shapes.keys() - after.keys()),
        "other_shapes": sorted(name for name in base_shapes.keys() & after.keys() if base_shapes[name] != after[name]),
        "architectures": json.loads((whole / "config.json").read_text())["architectures"],
        "processor": (whole / "preprocessor_config.json").exists() == (base / "preprocessor_config.json").exists(),
    }
    if not full:
        report["merged"] = reload(folder / "merged-run")
        report["adapted"] = sorted(name for name in shapes(folder) if ".lora_A." in name)
    return report


def prepare_merged(folder: Path) -> None:
    """Lay the merged model of a run out as a run of full training, which the reload reads."""
    if (folder / "merged").is_dir():
        shutil.copytree(folder / "merged", folder / "merged-run")
        settings = (folder / "settings.yaml").read_text().replace("method: lora", "method: full")
        (folder / "merged-run" / "settings.yaml").write_text(settings)
        shutil.copyfile(folder / "summary.json", folder / "merged-run" / "summary.json")


def main() -> None:
    """Read the command line, train, and look at the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # Unsloth takes an error whose text, and so whose path, holds the word architecture for a model that is not known.
    parser.add_argument("--work", type=Path, default=Path("/tmp/kinds"))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(KINDS))
    parser.add_argument("--parts", nargs="*", default=list(RUNS))
    parser.add_argument("--eager", action="store_true", help="without Unsloth's compiled modules")
    parser.add_argument("--side_by_side", type=int, default=5)
    options = parser.parse_args()
    for kind in options.only:
        make_model(kind, options.work / kind)
    rows = (
        f"--dataset {REPO}/demo/train.jsonl --eval_dataset {REPO}/demo/eval.jsonl --eval_strategy steps --eval_steps 8"
    )
    results: dict[str, Any] = {}

    def run_job(job: tuple[str, str]) -> None:
        kind, part = job
        name = f"{kind}-{part}"
        words = f"{REPO}/train_ddp.py --model {options.work}/{kind} {rows} {STEPS} {PLAIN} {RUNS[part]}"
        # Compiling for each length of these few rows would take longer than all the rest.
        cache = {"UNSLOTH_COMPILE_LOCATION": str(options.work / f"cache-{name}")}
        cache |= {"UNSLOTH_COMPILE_DISABLE": "1"} if options.eager else {}
        run = train([sys.executable, *words.split()], name, options.work, 420, cache)
        prepare_merged(options.work / "outputs" / name)
        results[name] = {**run, **look_at(run, options.work / kind, options.work)}
        write_results(options.json, results=results)
        print(name, run["exit_code"], run["seconds"], run.get("losses"), results[name].get("reloaded"), flush=True)

    with ThreadPoolExecutor(options.side_by_side) as pool:
        list(pool.map(run_job, [(kind, part) for part in options.parts for kind in options.only]))


if __name__ == "__main__":
    main()
