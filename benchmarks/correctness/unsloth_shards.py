"""Train LoRA with FSDP2 on a model that Unsloth loads whole, that Unsloth loads in shards, and that Transformers loads.

    python -m benchmarks.correctness.unsloth_shards --work /tmp/unsloth_shards --json FILE

Three steps of SGD on two GPUs, of the demo's model in fp32 and bf16, of a small model whose output head is not tied, and
of an 8B shape in bf16. The run in shards is also resumed from its checkpoint at step 2. Prints the losses, the difference
of the adapters' update from that of Unsloth on the whole model, and the peak of the fullest GPU while loading and while
training. Runs share the GPUs, so no times are measured.
"""

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.models import write_model
from benchmarks.common.rows import full_rows
from benchmarks.common.runs import REPO, have_model, torchrun, train, train_here, update_difference, write_results

STEPS = "--optim sgd --learning_rate 0.1 --lr_scheduler_type constant --warmup_steps 0 --max_grad_norm 0 --max_steps 3"
STEPS += " --compare_answers 0 --logging_steps 1 --seed 5 --save_steps 2 --gradient_checkpointing torch --packing off"
# Model, precision, tokens in a row.
MODELS = {
    "tied_fp32": ("demo", "fp32", 128),
    "tied_bf16": ("demo", "bf16", 128),
    "untied_bf16": ("small", "bf16", 128),
    "8b_bf16": ("qwen3_8b", "bf16", 1024),
}
LOADED = {"whole": "unsloth", "shards": "unsloth", "resumed": "unsloth", "transformers": "transformers"}
UNINTERRUPTED = ("whole", "shards", "transformers")
PROCESSES = 2


def one(folder: Path, kind: str, argv: list[str]) -> None:
    """Run train_ddp.py as one rank, and write what loading took; with `shards` as if the model did not fit on a GPU."""
    import torch

    from unsloth_ddp.model.loading import load

    if kind in ("shards", "resumed"):
        load.short_of_memory = lambda *_: (1, 0)

    def load_measured(load_model: Any, run: Any) -> Any:
        loaded = load_model(run)
        found = {"gib_loading": torch.cuda.max_memory_allocated() / 2**30}
        found["gib_loaded"] = torch.cuda.memory_allocated() / 2**30
        base = loaded[0].get_base_model() if hasattr(loaded[0], "get_base_model") else loaded[0]
        found["fused_layers"] = getattr(loaded[0], "_unsloth_fsdp2_fused_lora", None)
        found["tied"] = base.get_input_embeddings().weight is base.get_output_embeddings().weight
        (folder / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(found))
        return loaded

    train_here(argv, load_model=load_measured)


def small_model(folder: Path) -> None:
    """Write a Qwen3 model of two layers with untied embeddings."""
    from transformers import Qwen3Config

    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512, "vocab_size": 884}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    write_model(Qwen3Config(**sizes, **heads, tie_word_embeddings=False, dtype="bfloat16"), folder)


def measure(name: str, kind: str, work: Path, limit: float) -> dict[str, Any]:
    """Launch one run and return what it came to."""
    shape, precision, tokens = MODELS[name]
    folder = work / f"{name}_{kind}"
    folder.mkdir(parents=True, exist_ok=True)
    model = REPO / "demo/model" if shape == "demo" else work / shape
    argv = f"--model {model} --dataset {work}/rows.jsonl --method lora --backend {LOADED[kind]} --precision {precision}"
    argv += f" --max_length {tokens} --per_device_train_batch_size 1 --global_batch_size 4 {STEPS}"
    checkpoint = work / "outputs" / f"{name}_shards" / "checkpoint-2"
    argv += f" --resume {checkpoint} --trust_checkpoint" if kind == "resumed" else " --overwrite"
    command = [*torchrun(PROCESSES), "--module", "benchmarks.correctness.unsloth_shards", "--work", str(folder)]
    command += ["--one", kind, "--argv", *argv.split()]
    result = train(command, folder.name, work, limit, {"UNSLOTH_FSDP2": "1", "OMP_NUM_THREADS": "2"})
    result |= {"model": name, "loaded": kind}
    if summary := result.pop("summary", None):
        ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank_*.json"))]
        result |= {part: max(round(rank[part], 2) for rank in ranks) for part in ("gib_loading", "gib_loaded")}
        result |= {part: ranks[0][part] for part in ("fused_layers", "tied")}
        result["gib_training"] = round(summary["peak_memory_bytes"] / 2**30, 2)
    return result


def main() -> None:
    """Measure, or be a rank of what is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models, logs and outputs")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--only", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--limit", type=float, default=180, help="seconds that one run may take")
    parser.add_argument("--one", choices=list(LOADED), help=argparse.SUPPRESS)
    parser.add_argument("--argv", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(given.work, given.one, given.argv)
        return
    given.work.mkdir(parents=True, exist_ok=True)
    full_rows(given.work / "rows.jsonl", 64, seed=0, tokens=1024)
    if "untied_bf16" in given.only:
        small_model(given.work / "small")
    if "8b_bf16" in given.only:
        have_model("qwen3_8b", given.work / "qwen3_8b")
    with ThreadPoolExecutor(max_workers=6) as pool:
        whole = [
            pool.submit(measure, name, kind, given.work, given.limit) for name in given.only for kind in UNINTERRUPTED
        ]
        results = [run.result() for run in whole]
        resumed = [pool.submit(measure, name, "resumed", given.work, given.limit) for name in given.only]
        results += [run.result() for run in resumed]
    trained = {(result["model"], result["loaded"]) for result in results if "losses" in result}
    for result in results:
        pair = (result["model"], result["loaded"])
        if pair in trained and (pair[0], "whole") in trained:
            result["update_difference"] = update_difference(given.work, "_".join(pair), f"{pair[0]}_whole")
        print(json.dumps(result), flush=True)
    if given.json:
        write_results(given.json, processes=PROCESSES, runs=results)


if __name__ == "__main__":
    main()
