"""Compare packed with padded rows on GPUs: loss of every row, weight update of a step, tokens a second.

    python -m benchmarks.correctness.packing losses --work /tmp/packing --json
    benchmarks/results/correctness/packing_losses.json python -m benchmarks.correctness.packing step --work /tmp/packing
    --json benchmarks/results/correctness/packing_step.json python -m benchmarks.correctness.packing speed --work
    /tmp/packing --json benchmarks/results/speed/packing_speed.json

losses: the loss of every row, packed and padded, with Unsloth and with Transformers, and the error there would be if
packed rows attended to each other. step: the relative difference of the weight update after one step of SGD over the
same rows. speed: tokens a second without padding on random-weight models of real shapes, alternating between both
kinds. Rows are chats built from the demo's, of log-normal length: mean about 300 tokens, at most 2048. --tiny runs
everything on a CPU with the demo's model, to try the script itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.rows import LONGEST, chat_rows
from benchmarks.common.runs import (
    REPO,
    have_model,
    launch_command,
    log_history,
    train,
    update_difference,
    write_results,
)

STEP = "--optim sgd --learning_rate 0.1 --lr_scheduler_type constant --warmup_steps 0 --max_grad_norm 0 --max_steps 1"
STEP += " --save_strategy no --report_to none --logging_steps 1 --seed 5 --lora_alpha 16"
SPEED = "--save_strategy no --report_to none --logging_steps 2 --lora_alpha 16 --warmup_steps 0"
# How much rounding alone may change a row's loss, and a step's update, relatively.
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}
UPDATE_TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}
# Rows that saw each other would be off by this much more than packed ones are.
APART = 5


def model_folder(shape: str, work: Path) -> Path:
    """Write a random-weight model of this shape once and return its folder; `demo` is the demo's model."""
    if shape == "demo":
        return REPO / "demo/model"
    have_model(shape, work / shape)
    return work / shape


# ---- losses: one process a backend and precision ----


def row_losses(model: Any, batch: dict[str, Any], lengths: list[int], device: str, autocast: Any) -> Any:
    """Return the summed loss of each row, float64 (rows,), of a padded or a packed micro-batch."""
    import torch

    batch = {key: value.to(device) if torch.is_tensor(value) else value for key, value in batch.items()}
    labels = batch.pop("labels")
    with torch.no_grad(), autocast:
        logits = model(**batch, use_cache=False).logits[:, :-1].float()
    losses = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), labels[:, 1:], reduction="none", ignore_index=-100
    ).double()
    if losses.shape[0] == len(lengths):
        return losses.sum(dim=1).cpu()
    ends = torch.tensor(lengths).cumsum(0)
    # Position i holds the loss of predicting token i + 1, which for the last token of a row is ignored.
    padded = torch.nn.functional.pad(losses[0], (0, 1))
    return torch.stack([padded[end - n : end].sum() for end, n in zip(ends, lengths, strict=True)]).cpu()


def measure_losses(argv: list[str]) -> dict[str, Any]:
    """Measure row losses of one micro-batch packed, padded, row by row, and packed without separation."""
    import numpy as np
    import torch

    from unsloth_ddp.config.parse import parse_settings
    from unsloth_ddp.data import dataset as data
    from unsloth_ddp.data.chat.labels import IGNORED
    from unsloth_ddp.data.node_folder import node_folder
    from unsloth_ddp.data.order.collate import Flatten, PadRight
    from unsloth_ddp.data.order.packing import best_fit
    from unsloth_ddp.data.sources.examples import read_examples
    from unsloth_ddp.distributed.backend import import_backend
    from unsloth_ddp.distributed.ranks import Ranks
    from unsloth_ddp.distributed.runtime import started
    from unsloth_ddp.model.backend import decide_backend
    from unsloth_ddp.model.loading import load as models
    from unsloth_ddp.model.packing import attention

    settings = parse_settings(argv)
    with started(settings, Ranks()) as runtime, node_folder(runtime) as folder:
        read_examples(settings, runtime, folder)
        decide_backend(settings, runtime, images=False)
        import_backend(runtime, settings)
        model, tokenizer = models.load_model(settings, runtime)
        rows, _ = data.tokenize_examples(settings, runtime, folder, tokenizer)
        choice = attention.choose_packing(settings, runtime, model)
        attention.prepare_for_packs(runtime, model)
        model.train()
        lengths = data.row_lengths(rows.dataset)[:-1]
        packing = best_fit(lengths, settings.max_length)
        packs = dataclasses.replace(rows, packing=packing).examples
        pad, flatten = PadRight(tokenizer.pad_token_id), Flatten(attention.keys_for_packs(runtime, model))
        device = runtime.device_type
        dtype = models.DTYPES[runtime.precision]
        autocast = torch.autocast(device, dtype=dtype, enabled=runtime.precision != "fp32")
        losses: dict[str, list[Any]] = {"packed": [], "padded": [], "alone": [], "mixed": []}
        counts: list[Any] = []
        for pack in range(len(packing)):
            members = packing.members(pack).tolist()
            size = [int(lengths[i]) for i in members]
            batch = flatten([packs[pack]])
            losses["packed"].append(row_losses(model, batch, size, device, autocast))
            unmarked = {key: batch[key] for key in ("input_ids", "labels")}
            unmarked["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
            losses["mixed"].append(row_losses(model, unmarked, size, device, autocast))
            losses["padded"].append(row_losses(model, pad([rows.dataset[i] for i in members]), size, device, autocast))
            for i in members:
                losses["alone"].append(row_losses(model, pad([rows.dataset[i]]), [int(lengths[i])], device, autocast))
            counts += [int(np.sum(rows.dataset[i]["labels"][1:] != IGNORED)) for i in members]
        means = {name: torch.cat(values) / torch.tensor(counts).clamp(min=1) for name, values in losses.items()}
        keep = torch.tensor(counts) > 0
        reference = means["alone"][keep]

        def off(name: str) -> float:
            return ((means[name][keep] - reference).abs() / reference).max().item()

        return {
            "backend": runtime.backend,
            "precision": runtime.precision,
            "device": runtime.device_name,
            "torch": torch.__version__,
            "choice": f"{'packed' if choice.packed else 'padded'}: {choice.reason}",
            "rows": int(keep.sum()),
            "packs": len(packing),
            "largest_difference_from_a_row_alone": {name: off(name) for name in ("packed", "padded", "mixed")},
        }


def losses(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every backend, precision and method in a process of its own, side by side."""
    rows = options.work / "loss_rows.jsonl"
    chat_rows(rows, 16 if options.tiny else 64, seed=1, longest=200 if options.tiny else LONGEST)
    kinds = [("transformers", "fp32", "lora"), ("transformers", "bf16", "lora")]
    if not options.tiny:
        kinds += [("unsloth", "fp32", "lora"), ("unsloth", "bf16", "lora"), ("unsloth", "bf16", "full")]
    model = model_folder(options.shape, options.work)
    started = []
    for backend, precision, method in kinds:
        argv = f"--model {model} --dataset {rows} --backend {backend} --precision {precision} --method {method}"
        argv += f" --max_length {256 if options.tiny else LONGEST} --gradient_checkpointing none --packing on"
        command = [sys.executable, "-m", "benchmarks.correctness.packing", "measure", "--work", str(options.work)]
        command += ["--argv", *argv.split()]
        environ = {
            **os.environ,
            "UNSLOTH_COMPILE_LOCATION": str(options.work / f"cache_{backend}_{precision}_{method}"),
        }
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, cwd=REPO, stdout=pipe, stderr=pipe, text=True, env=environ))
    results = []
    for (backend, precision, method), process in zip(kinds, started, strict=True):
        out, errors = process.communicate()
        result: dict[str, Any] = {"backend": backend, "precision": precision, "method": method}
        if process.returncode:
            result["error"] = errors[-3000:]
        else:
            result |= json.loads(out.splitlines()[-1])
            difference = result["largest_difference_from_a_row_alone"]
            result["good"] = (
                difference["packed"] < LOSS_TOLERANCE[precision] and APART * difference["packed"] < difference["mixed"]
            )
        results.append(result)
        print(json.dumps(result), flush=True)
    return results


# ---- step and speed: launches of train_ddp.py ----


def launch(args: argparse.Namespace, name: str, options: str, processes: int) -> dict[str, Any]:
    """Run train_ddp.py once; return its result, with lines of its table."""
    config = "cpu.yaml" if args.tiny else "ddp.yaml"
    launcher = [sys.executable] if processes == 1 else launch_command(config, processes)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(i) for i in range(processes))
    environ = {"CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[:processes])}
    result = train([*launcher, "train_ddp.py", *options.split(), "--overwrite"], name, args.work, 420, environ)
    lines = (args.work / f"{name}.log").read_text().splitlines()
    return result | {"table": [" ".join(line.split()) for line in lines if line.startswith(("packing", "global"))]}


def step(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Take one step over all rows, padded in one process, and compare it with packed steps in every layout."""
    count = 24 if args.tiny else 48
    rows = args.work / "step_rows.jsonl"
    chat_rows(rows, count, seed=2, longest=200 if args.tiny else LONGEST)
    base = f"--model {model_folder(args.shape, args.work)} --dataset {rows} {STEP} --gradient_checkpointing none"
    base += f" --max_length {256 if args.tiny else LONGEST}"
    results = []
    pairs = ["transformers:fp32"] if args.tiny else args.pairs
    for backend, precision in (pair.split(":") for pair in pairs):
        chosen = f"{base} --backend {backend} --precision {precision}"
        name = f"step_{backend}_{precision}"
        # A step of more packs than there are holds them all.
        kinds = {f"{name}_padded": (f"--packing off --global_batch_size {count}", 1)}
        for processes in (1, 2)[: args.processes]:
            for per_device in (1, 2):
                options = (
                    f"--packing on --per_device_train_batch_size {per_device} --gradient_accumulation_steps {count}"
                )
                kinds[f"{name}_packed_{processes}x{per_device}"] = (options, processes)
        for kind, (options, processes) in kinds.items():
            result = launch(args, kind, f"{chosen} {options}", processes)
            if not result["exit_code"] and not results_of(results, f"{name}_padded").get("exit_code", 0):
                result["update_difference"] = update_difference(args.work, kind, f"{name}_padded")
                result["good"] = result["update_difference"] < UPDATE_TOLERANCE[precision]
            results.append(result)
            loss = result.get("summary", {}).get("train_loss")
            print(kind, result["exit_code"], result.get("update_difference"), loss, result["table"], flush=True)
    return results


def results_of(results: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the result of this name, or None."""
    return next((result for result in results if result["name"] == name), {})


def speed(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time padded and packed runs in turn; report the median of the log lines after warm-up."""
    rows = args.work / "speed_rows.jsonl"
    chat_rows(rows, 200 if args.tiny else 6000, seed=3, longest=200 if args.tiny else LONGEST)
    base = f"--model {model_folder(args.shape, args.work)} --dataset {rows} {SPEED} --method {args.method}"
    base += f" --gradient_checkpointing {args.checkpointing} --max_length {256 if args.tiny else LONGEST}"
    base += f" --max_steps {args.steps} --backend {'transformers' if args.tiny else args.backend}"
    kinds = {
        "padded_as_it_comes": "--packing off --per_device_train_batch_size 1 --global_batch_size 64",
        "padded_8_rows": "--packing off --per_device_train_batch_size 8 --global_batch_size 64",
        "packed_2": f"--packing on --per_device_train_batch_size 2 --global_batch_size {4 * args.processes}",
        "packed_4": f"--packing on --per_device_train_batch_size 4 --global_batch_size {4 * args.processes}",
        "auto": "--per_device_train_batch_size 4 --global_batch_size 64",
    }
    results = []
    for repeat in range(args.repeats):
        for kind, options in kinds.items():
            result = launch(args, f"speed_{kind}_{repeat}", f"{base} {options}", args.processes)
            history = [] if result["exit_code"] else log_history(args.work / "outputs" / result["name"])
            lines = [entry["tokens_per_second"] for entry in history if "tokens_per_second" in entry]
            result["tokens_per_second_a_line"] = lines
            measured = lines[len(lines) // 2 :]
            if measured:
                result["tokens_per_second_a_gpu"] = statistics.median(measured) / args.processes
                memory = result["summary"]["peak_memory_bytes"] / 2**30
                print(
                    f"{kind:20} {result['tokens_per_second_a_gpu']:9.0f} tokens/s a GPU, {memory:.1f} GiB",
                    result["table"],
                )
            else:
                print(f"{kind:20} rc {result['exit_code']} {result.get('log', '')[-1500:]}")
            sys.stdout.flush()
            results.append(result)
            write(args, results)
    return results


def write(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """Write everything measured so far."""
    write_results(options.json, VARLEN_SHIM=os.environ.get("VARLEN_SHIM"), runs=results)


def main() -> None:
    """Read the command line and measure; exit code 1 if packed and padded rows disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["losses", "step", "speed", "measure"])
    parser.add_argument("--work", type=Path, default=Path("/tmp/packing"))
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--shape", default="demo", help="demo, or a shape of benchmarks/common/models.py")
    parser.add_argument("--method", default="lora")
    parser.add_argument("--backend", default="unsloth")
    parser.add_argument("--checkpointing", default="none")
    choices = ["unsloth:fp32", "unsloth:bf16", "transformers:fp32"]
    parser.add_argument("--pairs", nargs="+", choices=choices, default=choices, help="step: backend and precision")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="try the script on a CPU")
    parser.add_argument("--argv", nargs=argparse.REMAINDER, default=[])
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.what == "measure":
        print(json.dumps(measure_losses(options.argv)))
        return
    options.json = options.json or options.work / f"packing_{options.what}.json"
    results = {"losses": losses, "step": step, "speed": speed}[options.what](options)
    write(options, results)
    bad = [
        result for result in results if result.get("error") or result.get("exit_code") or result.get("good") is False
    ]
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
