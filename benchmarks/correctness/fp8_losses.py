"""Compare the losses of LoRA with --fp8 and in bf16, with two seeds each, on a model that has learned something.

    python -m benchmarks.correctness.fp8_losses --json benchmarks/results/correctness/fp8_losses.json

Trains every parameter of a random-weight model on the demo's chats first, so that its weights are those of a trained
model. Then every answer is exchanged for another one of the demo, and adapters learn the new answers.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.runs import REPO, have_model, log_history, losses, train, write_results
from unsloth_ddp.utils.versions import versions

COMMON = "--packing on --max_length 256 --global_batch_size 16 --warmup_steps 20 --save_strategy no"
COMMON += " --report_to none --compare_answers 0 --logging_steps 10 --overwrite"
BASE = "--method full --full_weights fp32 --learning_rate 3e-4 --max_steps {steps} --cuda_graphs on"
ADAPTER = "--learning_rate 5e-4 --max_steps {steps} --eval_strategy steps --eval_steps 50"
RUNS = {
    "bf16, seed 0": "--seed 0",
    "bf16, seed 1": "--seed 1",
    "fp8, seed 0": "--seed 0 --fp8",
    "fp8, seed 1": "--seed 1 --fp8",
}
# On the last so many log lines curves are averaged.
LAST_LINES = 10
# Seconds that a run may take.
LIMIT = 3600


def other_answers(source: Path, target: Path, seed: int = 7) -> None:
    """Write the chats with every answer exchanged for another one, the same one in all chats."""
    answers = sorted(
        {
            message["content"]
            for name in ("train", "eval")
            for line in (REPO / f"demo/{name}.jsonl").read_text().splitlines()
            for message in json.loads(line)["messages"]
            if message["role"] == "assistant"
        }
    )
    random.Random(seed).shuffle(answers)
    exchanged = dict(zip(answers, [*answers[1:], answers[0]], strict=True))
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    for row in rows:
        for message in row["messages"]:
            if message["role"] == "assistant":
                message["content"] = exchanged[message["content"]]
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train_or_exit(work: Path, name: str, options: str, gpu: str) -> Path:
    """Run one training to its end and return its folder.

    Raises:
        SystemExit: it failed; its log is printed.
    """
    command = [sys.executable, "train_ddp.py", *COMMON.split(), *options.split()]
    result = train(command, name, work, LIMIT, {"CUDA_VISIBLE_DEVICES": gpu})
    if result["exit_code"]:
        sys.exit(f"{name} failed ({result['exit_code']}):\n{result['log']}")
    return work / "outputs" / name


def result_of(name: str, run: Path) -> dict[str, Any]:
    """Return the losses of a finished run."""
    trained = losses(run)
    evaluated = [(entry["step"], entry["eval_loss"]) for entry in log_history(run) if "eval_loss" in entry]
    summary = json.loads((run / "summary.json").read_text())
    return {
        "run": name,
        "cuda_graphs": summary.get("cuda_graphs"),
        "losses": trained,
        "mean_of_the_last_lines": sum(trained[-LAST_LINES:]) / len(trained[-LAST_LINES:]),
        "eval_losses": evaluated,
    }


def main() -> None:
    """Train the base model, then all adapters side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("/tmp/fp8_losses"))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--shape", default="qwen3_1.7b", help="of the model (see benchmarks/common/models.py)")
    parser.add_argument("--backend", default="transformers", help="of all runs")
    parser.add_argument("--base_steps", type=int, default=200)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--gpus", nargs="*", default=["0"], help="the adapters' runs are spread over these")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    model = options.work / options.shape
    have_model(options.shape, model, {"CUDA_VISIBLE_DEVICES": options.gpus[0]})
    rows = {name: options.work / f"{name}.jsonl" for name in ("train", "eval")}
    for name, path in rows.items():
        other_answers(REPO / f"demo/{name}.jsonl", path)
    learned = (
        f"--model {model} --dataset {REPO / 'demo/train.jsonl'} --backend {options.backend} "
        f"{BASE.format(steps=options.base_steps)}"
    )
    base = train_or_exit(options.work, "base", learned, options.gpus[0])
    changed = f"--model {base} --dataset {rows['train']} --eval_dataset {rows['eval']} --backend {options.backend} "
    changed += ADAPTER.format(steps=options.steps)

    def adapt(number: int, name: str) -> dict[str, Any]:
        folder = name.replace(", ", "_").replace(" ", "_")
        gpu = options.gpus[number % len(options.gpus)]
        return result_of(name, train_or_exit(options.work, folder, f"{changed} {RUNS[name]}", gpu))

    with ThreadPoolExecutor(max_workers=len(RUNS)) as pool:
        results = list(pool.map(adapt, range(len(RUNS)), RUNS))
    for result in results:
        print({key: value for key, value in result.items() if key != "losses"}, flush=True)
    write_results(options.json, versions=versions(), base_losses=losses(base), runs=results)


if __name__ == "__main__":
    main()
