"""Run recipes on random models of the real shapes, on a GPU limited to the recipe's card, beside Unsloth's trainer.

    python -m benchmarks.memory.recipes --json FILE --cells gemma4_e4b_lora_24gb:24 gemma4_e4b_lora_24gb:24:transformers
    python -m benchmarks.memory.recipes --json FILE --cells qwen3_8b_lora:80:cut=3,0.6

A cell is RECIPE:GB with further words: `unsloth` or `transformers` (backend), `peer` (Unsloth's own trainer at its
notebook's settings), `tuned` (the same with packing and the checkpointing of --gradient_checkpointing),
`cut=STEP,SHARE` (from that step on, the memory of passes is limited to a share of what they took), `t4` (what a T4
lacks is taken away: bf16, kernels for packed rows and flash attention; its kernels and its speed are not emulated),
`--option=value`. Cells run side by side while their cards fit on the GPU, so times are upper bounds. Rows are chats (or
pairs, or chats with images) of log-normal length, the longest of the recipe's max_length.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.rows import chat_rows, labelled_rows, preference_rows
from benchmarks.common.runs import REPO, gpu_names, log_history, reload, run_logged, train_here, write_results
from unsloth_ddp.utils.versions import versions

# Recipe: (shape of benchmarks/common/models.py or speed/images.py, rows).
RECIPES = {
    "lfm2_1.2b_lora_12gb": ("lfm2_1.2b", "chats"),
    "ministral3_8b_qlora_16gb": ("ministral_3_8b_instruct_2512", "chats"),
    "qwen3.5_9b_qlora_24gb": ("qwen3.5_9b", "chats"),
    "gemma4_e4b_lora_24gb": ("gemma_4_e4b_it", "chats"),
    "gpt_oss_20b_lora_80gb": ("gpt_oss_20b_bf16", "chats"),
    "qwen3_8b_qlora_16gb": ("qwen3_8b", "chats"),
    "qwen3_8b_lora": ("qwen3_8b", "chats"),
    "qwen3_1.7b_full": ("qwen3_1.7b", "chats"),
    "qwen3_0.6b_lora": ("qwen3_0.6b", "chats"),
    "qwen3_14b_qlora_24gb": ("qwen3_14b", "chats"),
    "qwen3_32b_qlora_48gb": ("qwen3_32b", "chats"),
    "qwen3_4b_qlora_12gb": ("qwen3_4b", "chats"),
    "qwen3_4b_dpo_qlora": ("qwen3_4b", "pairs"),
    "qwen3_4b_kto_qlora": ("qwen3_4b", "labelled"),
    "qwen3_vl_4b_images_lora": ("qwen3_vl_4b", "images"),
    "qwen3_vl_8b_images_qlora_24gb": ("qwen3_vl_8b", "images"),
    "gemma3_4b_images_qlora": ("gemma3_4b", "images"),
    "qwen3_30b_a3b_lora_80gb": ("qwen3_30b_a3b", "chats"),
}
# A context takes about so much of a card beside what torch allocates.
CONTEXT_BYTES = 0.4 * 2**30
SAID = (
    "backend",
    "packing",
    "activations",
    "CUDA graphs",
    "global batch",
    "Out of memory",
    "Memory ran out",
    "Using backend",
)


@dataclass(frozen=True)
class Cell:
    """A recipe on a card; see the module's docstring."""

    name: str
    recipe: str
    gigabytes: float
    words: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Cell:
        recipe, gigabytes, *words = text.split(":")
        if recipe not in RECIPES:
            raise SystemExit(f"{text}: there is no recipe {recipe}; choose from {', '.join(RECIPES)}")
        return cls(text.replace(":", "_").replace("=", "").replace(",", "_"), recipe, float(gigabytes), tuple(words))

    @property
    def peer(self) -> bool:
        """Return whether Unsloth's own trainer runs it."""
        return bool({"peer", "tuned"} & set(self.words))

    def cut(self) -> list[str]:
        """Return the options of `limited` for a cut."""
        cuts = [word.removeprefix("cut=").split(",") for word in self.words if word.startswith("cut=")]
        return ["--from_step", cuts[0][0], "--share", cuts[0][1]] if cuts else []


def limited(options: argparse.Namespace) -> None:
    """Run a script in this process with a part of the GPU's memory, and print what was held at most."""
    import atexit
    import runpy

    import torch

    total = torch.cuda.mem_get_info()[1]
    if options.t4:
        emulate_t4()
    if options.gib:
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.gib * 2**30 / total), 0)

    def print_peak() -> None:
        peak = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        print("HELD", json.dumps(peak), flush=True)

    atexit.register(print_peak)
    script, *argv = options.argv

    def make_shrinking_trainer(make_trainer: Any, *args: Any) -> Any:
        trainer = make_trainer(*args)
        begin = trainer.step.begin

        def begin_and_shrink(*args: Any) -> Any:
            if trainer.state.global_step + 1 == options.from_step:
                peak, in_use = torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated()
                torch.cuda.empty_cache()
                torch.cuda.set_per_process_memory_fraction((in_use + options.share * (peak - in_use)) / total, 0)
            return begin(*args)

        trainer.step.begin = begin_and_shrink
        return trainer

    if script == "train_ddp.py":
        train_here(argv, **({"make_trainer": make_shrinking_trainer} if options.from_step else {}))
        return
    sys.argv = [script, *argv]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def emulate_t4() -> None:
    """Answer for a GPU of compute capability 7.5, and take away the kernels that it lacks."""
    import torch
    from triton.runtime import driver

    # Triton compiles for the GPU that there is.
    target = driver.active.get_current_target()
    driver.active.get_current_target = lambda: target
    torch.cuda.get_device_capability = lambda *_, **__: (7, 5)
    torch.cuda.is_bf16_supported = lambda *_, **__: False
    torch.backends.cuda.is_flash_attention_available = lambda: False
    torch.backends.cuda.enable_flash_sdp(enabled=False)
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)


def make_shape(shape: str, folder: Path) -> None:
    """Write the random model of a shape, unless it is there."""
    if (folder / "config.json").is_file():
        return
    images = any(shape == model for model, kind in RECIPES.values() if kind == "images")
    code = (
        f"from pathlib import Path; from benchmarks.speed.images import write_model; "
        f"write_model({shape!r}, Path({str(folder)!r}), tiny=False)"
    )
    command = ["-c", code] if images else ["-m", "benchmarks.common.models", shape, str(folder)]
    began = time.monotonic()
    code_of = run_logged([sys.executable, *command], folder.with_suffix(".making.log"), 300)
    print(f"{shape}: made in {time.monotonic() - began:.0f} s, exit code {code_of}", flush=True)


def make_rows(work: Path) -> dict[str, Path]:
    """Write the rows of each kind, and some to evaluate on."""
    chat_rows(work / "chats.jsonl", 2048, seed=5, longest=2048)
    chat_rows(work / "held_out.jsonl", 64, seed=6, longest=2048)
    preference_rows(work / "pairs.jsonl", 1024, seed=3)
    labelled_rows(work / "pairs.jsonl", work / "labelled.jsonl")
    (work / "images").mkdir(exist_ok=True)
    from benchmarks.speed.images import write_rows

    write_rows(work / "images/rows.jsonl", 256, tiny=False)
    rows = {kind: work / f"{kind}.jsonl" for kind in ("chats", "pairs", "labelled")}
    return rows | {"images": work / "images/rows.jsonl"}


def command_of(cell: Cell, args: argparse.Namespace, rows: dict[str, Path], folder: Path) -> list[str]:
    """Return the command line of a cell."""
    shape, kind = RECIPES[cell.recipe]
    gib = cell.gigabytes * 1e9 / 2**30 - CONTEXT_BYTES / 2**30 if cell.gigabytes else 0
    command = [sys.executable, "-m", "benchmarks.memory.recipes", "--limited", "--gib", str(gib), *cell.cut()]
    command += ["--t4", "--argv"] if "t4" in cell.words else ["--argv"]
    model, options = str(args.work / shape), [w.replace("=", " ", 1).split() for w in cell.words if w.startswith("--")]
    if cell.peer:
        script = REPO / "benchmarks/speed/peers" / ("dpo.py" if kind == "pairs" else "unsloth_sft.py")
        method = "qlora" if "qlora" in cell.recipe else "full" if "full" in cell.recipe else "lora"
        command += [
            str(script),
            "--model",
            model,
            "--rows",
            str(rows[kind]),
            "--method",
            method,
            "--max_length",
            "2048",
        ]
        command += ["--batch", "2", "--accumulation", "8", "--seconds", "15", "--json", str(folder / "peer.json")]
        command += (
            ["--packing", "--optim", "adamw_torch_fused", "--logging_steps", "5"] if "tuned" in cell.words else []
        )
        return command + [word for option in options for word in option]
    command += ["train_ddp.py", "--config", str(REPO / "recipes" / f"{cell.recipe}.yaml"), "--model", model]
    command += ["--dataset", str(rows[kind]), "--max_steps", str(args.steps), "--logging_steps", "1", "--overwrite"]
    command += ["--output_dir", str(folder), "--run_name", "run", "--report_to", "none"]
    command += ["--eval_dataset", str(args.work / "held_out.jsonl")] if kind == "chats" else []
    command += ["--image_folder", str(args.work / "images")] if kind == "images" else []
    backend = [word for word in cell.words if word in ("unsloth", "transformers")]
    command += ["--backend", *backend] if backend else []
    return command + [word for option in options for word in option]


def run(cell: Cell, options: argparse.Namespace, rows: dict[str, Path]) -> dict[str, Any]:
    """Run a cell to its end; return what it measured."""
    cell_folder = (options.work / "cells" / cell.name).absolute()
    cell_folder.mkdir(parents=True, exist_ok=True)
    caches = {
        "UNSLOTH_COMPILE_LOCATION": "unsloth",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TRITON_CACHE_DIR": "triton",
    }
    environ = {name: str(cell_folder / folder) for name, folder in caches.items()}
    began = time.time()
    code = run_logged(command_of(cell, options, rows, cell_folder), cell_folder / "log.txt", options.seconds, environ)
    lines = (cell_folder / "log.txt").read_text(errors="replace").splitlines()
    result: dict[str, Any] = {"cell": cell.name, "exit_code": code, "seconds": round(time.time() - began, 1)}
    peaks = [json.loads(line.removeprefix("HELD ")) for line in lines if line.startswith("HELD ")]
    result |= {f"most_{name}_gib": round(value / 2**30, 2) for name, value in (peaks[-1] if peaks else {}).items()}
    result["said"] = [" ".join(line.split()) for line in lines if line.startswith(SAID)]
    run_folder = cell_folder / "run"
    if (cell_folder / "peer.json").is_file():
        measured = json.loads((cell_folder / "peer.json").read_text())
        pace = sorted(tokens / seconds for tokens, seconds, _ in measured["intervals"])
        result |= {
            "tokens_per_second": round(pace[len(pace) // 2]),
            "first_step": round(measured["first_step_at"] - began, 1),
        }
    elif (run_folder / "summary.json").is_file():
        history = [entry for entry in log_history(run_folder) if "loss" in entry]
        summary = json.loads((run_folder / "summary.json").read_text())
        pace = sorted(entry["tokens_per_second"] for entry in history[2:] or history)
        names = (
            "gradient_checkpointing",
            "cuda_graphs",
            "passes_a_micro_batch",
            "per_device_train_batch_size",
            "eval_loss",
            "backend",
        )
        result |= {name: summary[name] for name in names} | {
            "losses": [round(entry["loss"], 4) for entry in history],
            "tokens_per_second": round(pace[len(pace) // 2]),
            "seconds_of_parts": summary["seconds"],
        }
        if options.reload and RECIPES[cell.recipe][1] == "chats":
            result["reloaded"] = reload(run_folder)
    if code != 0:
        result["log"] = lines[-25:]
    return result


def run_all(cells: list[Cell], options: argparse.Namespace, rows: dict[str, Path]) -> list[dict[str, Any]]:
    """Run the cells side by side while their cards fit on the GPU."""
    room, free, results = threading.Condition(), [float(options.gigabytes)], list[dict[str, Any]]()

    def run_cell(cell: Cell) -> None:
        needed = cell.gigabytes or free[0]
        with room:
            room.wait_for(lambda: free[0] >= needed)
            free[0] -= needed
        try:
            result = run(cell, options, rows)
        finally:
            with room:
                free[0] += needed
                room.notify_all()
        results.append(result)
        write_results(
            options.json,
            cells=results,
            versions=versions(),
            gpus=gpu_names(),
            VARLEN_SHIM=os.environ.get("VARLEN_SHIM"),
        )
        print(json.dumps({key: value for key, value in result.items() if key != "seconds_of_parts"}), flush=True)

    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(run_cell, cells))
    return results


def main() -> None:
    """Read the command line and run the cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="*", default=[])
    parser.add_argument("--work", type=Path, default=Path("/tmp/recipes"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=330, help="of a cell at most")
    parser.add_argument("--gigabytes", type=float, default=139, help="of the GPU, which the cells share")
    parser.add_argument("--at_once", type=int, default=6)
    parser.add_argument("--reload", action="store_true", help="compute the saved adapter's loss in plain PEFT")
    parser.add_argument("--limited", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--gib", type=float, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--from_step", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--t4", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--argv", nargs=argparse.REMAINDER, default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.limited:
        limited(options)
        return
    cells = [Cell.parse(text) for text in options.cells]
    options.work.mkdir(parents=True, exist_ok=True)
    rows = make_rows(options.work)
    shapes = dict.fromkeys(RECIPES[cell.recipe][0] for cell in cells)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda shape: make_shape(shape, options.work / shape), shapes))
    results = run_all(cells, options, rows)
    sys.exit(1 if any(result["exit_code"] != 0 for result in results) else 0)


if __name__ == "__main__":
    main()
