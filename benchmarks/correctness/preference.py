"""Compare steps of DPO and KTO between layouts on GPUs, and the speed of DPO with TRL's and Unsloth's.

    python -m benchmarks.correctness.preference parity --json benchmarks/results/correctness/preference_parity.json
    python -m benchmarks.correctness.preference speed --json benchmarks/results/speed/preference.json

parity: trains the demo's model for three steps of SGD in fp32 on the same rows, with one process and with two (DDP,
ZeRO-2, ZeRO-3, FSDP2). The weight update and the log-probabilities of the first step, when no weight has changed, are
compared with those of one process. speed: measures tokens a second without padding and the peak memory of DPO on a
random-weight model, LoRA in bf16, on the same pairs and with as many pairs a step: the kit, TRL and Unsloth as
documented, and both without gradient checkpointing and with larger batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.rows import labelled_rows, preference_rows
from benchmarks.common.runs import (
    REPO,
    have_model,
    launch_command,
    log_history,
    run_logged,
    train,
    update_difference,
    write_results,
)

CONFIGS = {
    "single": ("single_gpu.yaml", 1),
    **{name: (f"{name}.yaml", 2) for name in ("ddp", "zero2", "zero3", "fsdp2")},
}
# A CPU has neither GPUs nor ZeRO; this tries the script itself.
CPU_CONFIGS = {"single": ("cpu.yaml", 1), "ddp": ("cpu.yaml", 2)}
STEPS = (
    "--precision fp32 --optim sgd --learning_rate 0.5 --lr_scheduler_type constant --warmup_steps 0 --max_grad_norm 0"
)
STEPS += (
    " --max_steps 3 --global_batch_size 8 --logging_steps 1 --save_strategy no --seed 5 --max_length 128 "
    "--compare_answers 0"
)
SHOWN = ("logps/chosen", "logps/rejected")
# Peers as documented, and tuned by hand: the pairs of a micro-batch, and what else is given.
PAIRS_A_STEP = 32
TUNED = ["--checkpointing", "none", "--optim", "adamw_torch_fused", "--logging_steps", "10"]
PEERS = {
    "trl": ("trl", 8, []),
    "unsloth": ("unsloth", 2, []),
    "trl_tuned": ("trl", 16, TUNED),
    "unsloth_tuned": ("unsloth", 16, TUNED),
    "trl_tuned_recomputed": ("trl", 32, TUNED[2:]),
}


def parity(work: Path, path: Path, only: list[str], *, cpu: bool) -> None:
    """Run all layouts, four at a time, then compare them."""
    pairs, labelled = REPO / "demo/pairs_train.jsonl", work / "labelled.jsonl"
    labelled_rows(pairs, labelled)
    jobs = {
        f"transformers_{task}_{method}_{layout}": (layout, f"--model {REPO}/demo/model --dataset {rows} --task {task} "
            f"--method {method} {STEPS}")
        for task, rows in (("dpo", pairs), ("kto", labelled))
        for method in ("lora", "qlora", "full")
        for layout in (CPU_CONFIGS if cpu else CONFIGS)
        # ZeRO-3 does not shard 4-bit weights, and a CPU has none.
        if method != "qlora" or not (cpu or layout == "zero3")
    }  # fmt: skip
    jobs = {name: job for name, job in jobs.items() if not only or any(word in name for word in only)}

    def run(name: str) -> dict[str, Any]:
        layout, options = jobs[name]
        config, processes = (CPU_CONFIGS if cpu else CONFIGS)[layout]
        options += f" --per_device_train_batch_size {4 if processes == 1 else 2}"
        return train(
            [*launch_command(config, processes), "train_ddp.py", *options.split(), "--overwrite"], name, work, 240
        )

    results: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(max_workers=1 if cpu else 4) as pool:
        for name, result in zip(jobs, pool.map(run, jobs), strict=True):
            results[name] = result
            if "losses" in result:
                results[name] |= compared(work, name, results)
            differences = {key: result.get(key) for key in ("update_difference", "logps_difference")}
            print(f"{name:32} rc {result['exit_code']} {result['seconds']:4.0f} s {differences} "
                f"{result.get('losses') or result['log'][-1200:]}", flush=True)  # fmt: skip
            write_results(path, runs=list(results.values()))


def compared(work: Path, name: str, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the differences of a run from that on one process: the first of each kind of run."""
    single = f"{name.rpartition('_')[0]}_single"
    if "losses" not in results.get(single, {}):
        return {}
    initial = REPO / "demo/model" if "_full_" in name else None
    first = [log_history(work / "outputs" / run)[0] for run in (name, single)]
    return {
        "update_difference": update_difference(work, name, single, initial),
        "logps_difference": max(abs(first[0][key] / first[1][key] - 1) for key in SHOWN),
    }


def speed(work: Path, path: Path, options: argparse.Namespace) -> None:
    """Measure the kit and the peers one after the other on the first GPU."""
    rows, only = work / "pairs.jsonl", options.only
    preference_rows(rows, 4_000, seed=0)
    model = Path(options.shape).absolute() if Path(options.shape).is_dir() else work / options.shape
    if model.parent == work:
        have_model(options.shape, model)
    results: list[dict[str, Any]] = []
    for name in [candidate for candidate in ("kit", "kit_precomputed", *PEERS) if not only or candidate in only]:
        try:
            if name.startswith("kit"):
                result = kit(name, work, rows, model, options.steps, options.cpu)
            else:
                result = peer(name, work, rows, model, options.seconds, options.cpu)
        except Exception as error:
            result = {"name": name, "error": str(error)[-3000:]}
        results.append(result)
        shown = {key: result.get(key) for key in ("tokens_per_second", "peak_gib", "error")}
        print(f"{name:24} {shown}", flush=True)
        write_results(path, shape=options.shape, pairs_a_step=PAIRS_A_STEP, runs=results)


def kit(name: str, work: Path, rows: Path, model: Path, steps: int, cpu: bool) -> dict[str, Any]:
    """Train with the kit's defaults; the first steps are not counted."""
    options = (
        f"--model {model} --dataset {rows} --task dpo --method lora --max_length 1024 "
        f"--global_batch_size {PAIRS_A_STEP}"
    )
    options += (
        f" --max_steps {3 if cpu else steps} --logging_steps {1 if cpu else 5} --save_strategy no --compare_answers 0"
    )
    options += " --learning_rate 2e-5 --report_to none"
    if name == "kit_precomputed":
        # The reference of all rows is computed before step 1 and is not measured, so there are fewer of them.
        few = work / "few.jsonl"
        few.write_text("".join(f"{line}\n" for line in rows.read_text().splitlines()[:640]))
        options = options.replace(str(rows), str(few)) + " --reference precomputed"
    config = "cpu.yaml" if cpu else "single_gpu.yaml"
    result = train(
        [*launch_command(config, 1), "train_ddp.py", *options.split(), "--overwrite"], name, work, 400,
        {"CUDA_VISIBLE_DEVICES": "0"},
    )  # fmt: skip
    history = [entry for entry in found_history(work, name) if "tokens_per_second" in entry]
    speeds = [entry["tokens_per_second"] for entry in history[min(2, len(history) - 1) :]]
    if not speeds:
        return {**result, "error": result.get("log", "no step was logged")[-3000:]}
    peak = max(entry["peak_memory_bytes"] for entry in history)
    return {**result, "intervals": speeds, "tokens_per_second": statistics.median(speeds), "peak_gib": peak / 2**30}


def found_history(work: Path, name: str) -> list[dict[str, Any]]:
    """Return the log entries of a run that has ended, or nothing."""
    folder = work / "outputs" / name
    return log_history(folder) if (folder / "trainer_state.json").is_file() else []


def peer(name: str, work: Path, rows: Path, model: Path, seconds: float, cpu: bool) -> dict[str, Any]:
    """Train with a peer."""
    kind, batch, options = PEERS[name]
    result, log = work / f"{name}.json", work / f"{name}.log"
    command = [
        sys.executable, str(REPO / "benchmarks/speed/peers/dpo.py"), "--peer", kind, "--model", str(model),
        "--rows", str(rows), "--max_length", "1024", "--batch", str(batch),
        "--accumulation", str(PAIRS_A_STEP // batch), "--seconds", str(seconds), "--json", str(result), *options,
    ]  # fmt: skip
    environ = {"TRITON_INTERPRET": "1"} if cpu else {"CUDA_VISIBLE_DEVICES": "0"}
    code = run_logged(command, log, 400, environ, cwd=work)
    if not result.is_file():
        return {"name": name, "command": " ".join(command[1:]), "error": f"exit code {code}: {log.read_text()[-3000:]}"}
    measured = json.loads(result.read_text())
    speeds = [tokens / elapsed for tokens, elapsed, _ in measured["intervals"]]
    return {
        **measured,
        "name": name,
        "command": " ".join(command[1:]),
        "tokens_per_second": statistics.median(speeds),
        "peak_gib": measured.get("peak_memory_bytes", 0) / 2**30,
    }


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["parity", "speed"])
    parser.add_argument("--work", type=Path, default=Path("/tmp/preference"))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--shape", default="qwen3_1.7b", help="speed: a shape of benchmarks/common/models.py, or a folder"
    )
    parser.add_argument("--steps", type=int, default=60, help="speed: steps of the kit; the first ten are not counted")
    parser.add_argument("--seconds", type=float, default=20, help="speed: seconds of steps of a peer that are measured")
    parser.add_argument("--only", nargs="*", default=[], help="only these runs; parity: those whose name holds a word")
    parser.add_argument("--cpu", action="store_true", help="try the script on a machine without a GPU")
    options = parser.parse_args()
    work = options.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    if options.what == "parity":
        parity(work, options.json, options.only, cpu=options.cpu)
    else:
        speed(work, options.json, options)


if __name__ == "__main__":
    main()
