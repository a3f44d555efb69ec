"""Measure the training speed of the kit, TRL and Unsloth on this machine.

    python -m benchmarks.speed.compare run --work /tmp/speed --json benchmarks/results/speed/speed.json --minutes 9
    python -m benchmarks.speed.compare run ... --repeats 2          continues with what the JSON does not hold yet
    python -m benchmarks.speed.compare run ... --cells chat:qwen3_8b:lora:kit full:qwen3_8b:lora:kit:2weak
    python -m benchmarks.speed.compare report --json benchmarks/results/speed/speed.json

Workloads: chat, rows of log-normal length, mean 285 tokens, cut at 2048, 64 rows a step; small, 16 of these a step;
full, rows of 2048 tokens, 32 a step; long, rows of 8192 tokens, 8 a step; longest, rows of 32768 tokens, 2 a step;
uneven, rows of log-normal length, 8 times as long as chats and cut at 8192, 32 a step. Models have Qwen3's shapes and
random weights. Every run is a process of its own, with empty caches unless --warm_caches is given. Runs on one GPU go
side by side, one per GPU; runs on several GPUs go alone. The kit is train_ddp.py with its defaults; cells.py and peers/
say how the others are set. Ends with a Markdown table and a picture beside the JSON; `report` makes both again from the
JSON alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common.rows import chat_rows, full_rows
from benchmarks.common.runs import REPO, make_model, write_results
from benchmarks.speed.cells import TINY, TINY_WORKS, WORKS, Cell, default_order, parse_cells
from benchmarks.speed.report import write_report
from benchmarks.speed.runner import CUT_OFF, Bench, run_all
from unsloth_ddp.utils.versions import versions


def visible_gpus() -> list[str]:
    """Return the ids of the GPUs that may be used."""
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    try:
        query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return []


def rate(words: list[str], gpu: str | None) -> subprocess.Popen[str]:
    """Start rates.py on one GPU, or on none."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu or ""}
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.speed.rates", *words],
        cwd=REPO,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )


def answer(process: subprocess.Popen[str]) -> Any:
    """Return the JSON that rates.py printed, or None."""
    lines = (process.communicate()[0] or "").splitlines()
    return json.loads(lines[-1]) if process.returncode == 0 and lines else None


def prepare(bench: Bench, cells: list[Cell], earlier: dict[str, Any]) -> dict[str, Any]:
    """Make models and rows, measure the matrix rate of each GPU; return what belongs in the results."""
    shapes = sorted({cell.shape for cell in cells}, reverse=True)
    makers = []
    for index, shape in enumerate(shapes):
        # The tokenizer is written last.
        if not bench.tiny and not (bench.folder / shape / "tokenizer_config.json").is_file():
            gpu = {"CUDA_VISIBLE_DEVICES": bench.gpus[index % len(bench.gpus)]} if bench.gpus else None
            makers.append((shape, make_model(shape, bench.folder / shape, gpu)))
    flops = dict(earlier.get("flops_a_token", {}))
    counting = {
        shape: rate(["flops", str(REPO / "demo/model") if shape == TINY else shape], None)
        for shape in shapes
        if not flops.get(shape)
    }
    for name in sorted({cell.work for cell in cells}):
        work, path = bench.works[name], bench.folder / f"{name}.jsonl"
        if name in ("chat", "small", "uneven"):
            chat_rows(path, work.rows, seed=3, longest=work.max_length, times=8 if name == "uneven" else 1)
        else:
            full_rows(path, work.rows, seed=3, tokens=work.max_length)
    for shape, maker in makers:
        if maker.wait():
            raise SystemExit(f"no model of shape {shape} could be made")
    # Counted before GPUs are timed, so that nothing is in their way.
    flops |= {shape: answer(process) for shape, process in counting.items()}
    timing = [rate(["matmul"], gpu) for gpu in bench.gpus or [None]]
    return {"flops_a_token": flops, "matmul": [answer(process) for process in timing]}


def run(options: argparse.Namespace) -> int:
    """Measure, and write the results after every run; return 1 if a run of this call failed."""
    deadline = time.monotonic() + 60 * options.minutes
    options.work.mkdir(parents=True, exist_ok=True)
    cells = parse_cells(options.cells or default_order(), options.repeats)
    if options.tiny:
        cells = list(dict.fromkeys(Cell(**{**vars(cell), "shape": TINY}) for cell in cells))
    earlier = json.loads(options.json.read_text()) if options.json.is_file() else {}
    # A run that the end of an earlier call cut off has not failed.
    results = [
        entry
        for entry in earlier.get("cells", [])
        if entry["exit_code"] == 0 or not (options.retry or entry["exit_code"] == CUT_OFF)
    ]
    finished = {entry["name"] for entry in results}
    waiting = [cell for cell in cells if cell.name not in finished]
    gpus = [] if options.tiny else visible_gpus()
    bench = Bench(
        options.work.resolve(), TINY_WORKS if options.tiny else WORKS, options.seconds, options.tiny, gpus, deadline,
        lanes=options.lanes or len(gpus) or 1, warm_caches=options.warm_caches, steps=options.steps,
    )  # fmt: skip
    if not waiting:
        print("every run is in the results already")
        return 0
    bench.measured_seconds |= {
        (entry["contestant"], entry["shape"], entry["work"]): entry["seconds"]
        for entry in results
        if entry["exit_code"] == 0
    }
    facts = prepare(bench, waiting, earlier)
    facts["matmul"] = [*earlier.get("matmul", []), *facts["matmul"]]
    facts |= {
        "versions": versions(),
        "VARLEN_SHIM": os.environ.get("VARLEN_SHIM"),
        "lanes": bench.lanes,
        "seconds_a_run": options.seconds,
        "steps_a_run": options.steps,
        "works": {name: vars(work) for name, work in bench.works.items()},
        "calls": [*earlier.get("calls", []), " ".join(sys.argv)],
    }
    failed = []
    print(
        f"{len(waiting)} runs on {bench.lanes} lanes, ready after {deadline_used(deadline, options):.0f} s", flush=True
    )

    def add_result(result: dict[str, Any]) -> None:
        results.append(result)
        write_results(options.json, **facts, cells=results)
        if result["exit_code"] != 0:
            failed.append(result["name"])
        print(line(result), flush=True)

    skipped = run_all(bench, waiting, add_result)
    write_results(options.json, **facts, cells=results, left_out=skipped)
    for name, why in skipped.items():
        print(f"left out: {name} ({why})")
    return 1 if failed else 0


def deadline_used(deadline: float, options: argparse.Namespace) -> float:
    """Return the seconds of this call that have passed."""
    return 60 * options.minutes - (deadline - time.monotonic())


def line(result: dict[str, Any]) -> str:
    """Summarize one run in one line, or show the end of its log."""
    if result["exit_code"] != 0:
        return (
            f"{result['name']:50} FAILED ({result['exit_code']}) after {result['seconds']:.0f} s\n"
            f"{result['log'][-2500:]}"
        )
    memory = result.get("peak_memory_bytes", 0) / 2**30
    return (
        f"{result['name']:50} {result['tokens_per_second_a_gpu']:8,.0f} tokens/s a GPU "
        f"({result['lowest']:,.0f} to {result['highest']:,.0f}, {result['intervals_counted']} intervals), "
        f"{result['tokens_a_step']:,.0f} tokens a step, {memory:.1f} GiB, first step after "
        f"{result['seconds_to_first_step']} s, {result['seconds']:.0f} s in all"
    )


def main() -> None:
    """Read the command line; measure or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "report"])
    parser.add_argument("--json", type=Path, required=True, help="results; runs that it holds are not run again")
    parser.add_argument("--work", type=Path, default=Path("/tmp/speed"), help="folder of models, rows and runs")
    parser.add_argument("--cells", nargs="*", help="work:shape:method:contestant[:2weak|:2strong], first ones first")
    parser.add_argument("--minutes", type=float, default=60, help="nothing is started that cannot end in this time")
    parser.add_argument("--seconds", type=float, default=15, help="seconds of steps that count in each run")
    parser.add_argument("--steps", type=int, help="whole jobs of so many steps, from the start to the saved result")
    parser.add_argument("--repeats", type=int, default=1, help="the whole list so many times")
    parser.add_argument("--lanes", type=int, help="runs side by side, one a GPU [all visible GPUs]")
    parser.add_argument(
        "--warm_caches", action="store_true", help="keep what is compiled; first steps do not count then"
    )
    parser.add_argument("--retry", action="store_true", help="run again what failed")
    parser.add_argument("--tiny", action="store_true", help="try the script on a CPU, with the demo's model")
    parser.add_argument("--markdown", type=Path, help="the table [beside the JSON]")
    parser.add_argument("--picture", type=Path, help="the picture [beside the JSON]")
    options = parser.parse_args()
    try:
        code = run(options) if options.what == "run" else 0
    except ValueError as error:
        sys.exit(str(error))
    content = json.loads(options.json.read_text())
    if content["cells"]:
        whole = write_report(
            content,
            options.markdown or options.json.with_suffix(".md"),
            options.picture or options.json.with_suffix(".png"),
        )
        # A run has its results without a picture; who asks for the report asks for both.
        code = code if whole or options.what == "run" else 1
    sys.exit(code)


if __name__ == "__main__":
    main()
