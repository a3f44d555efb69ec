"""Start the runs of the speed comparison in their lanes, end them in time, and read their measurements."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.runs import log_history
from benchmarks.speed.cells import CONTESTANTS, WARM_LINES, Cell, Work, command, estimate
from benchmarks.speed.figures import figures, first_step_at, kit_intervals
from benchmarks.speed.schedule import Running, left_out, next_start
from unsloth_ddp.parity.processes import kill_tree

# A run that takes this many times what was expected hangs.
PATIENCE = 2
LEAST_PATIENCE = 120
# A run cut off by the end of the call has so long after the deadline.
GRACE = 15
CUT_OFF = "cut off by the end of the call"
TAIL = 6000
# What the kit's log says where the head does not compute supervised tokens only.
HEAD_OF_ALL = "the head computes all tokens"
# What a library says of how rows lie in a micro-batch.
ABOUT_PACKING = re.compile("padding-free|packing", re.IGNORECASE)


@dataclass
class Bench:
    """Hold what all runs share; `gpus` are the ids of the lanes, empty on a CPU.

    With `warm_caches`, compiled code of Triton and Inductor is kept for later runs, which then start sooner. With
    `steps`, every run is a whole job of so many steps that saves what it trained.
    """

    folder: Path
    works: dict[str, Work]
    seconds: float
    tiny: bool
    gpus: list[str]
    deadline: float
    lanes: int = 1
    warm_caches: bool = False
    steps: int | None = None
    measured_seconds: dict[tuple[str, str, str], float] = field(default_factory=dict)

    def expected(self, cell: Cell) -> float:
        """Return the seconds that a run is expected to take."""
        return estimate(cell, self.seconds, self.measured_seconds)


@dataclass
class Process:
    """Hold a run in progress."""

    running: Running
    process: subprocess.Popen[bytes]
    command: list[str]
    began: float
    began_at: float
    limit: float
    beside: set[str]


def run_all(bench: Bench, cells: list[Cell], add_result: Callable[[dict[str, Any]], None]) -> dict[str, str]:
    """Run what time allows, in order; `done` gets each result. Return why others were left out, by name."""
    waiting, processes = list(cells), []
    try:
        while True:
            for process in list(processes):
                if (result := _ended(bench, process)) is not None:
                    processes.remove(process)
                    add_result(result)
            now = time.monotonic()
            start = next_start(
                waiting, [p.running for p in processes], bench.lanes, now, bench.deadline, bench.expected
            )
            if start is not None:
                waiting.remove(start.cell)
                others = {p.running.cell.name for p in processes}
                for other in processes:
                    other.beside.add(start.cell.name)
                processes.append(_start(bench, start.cell, start.lanes, others))
            elif not processes:
                return dict(left_out(waiting, bench.lanes, bench.expected))
            else:
                time.sleep(0.1)
    finally:
        for process in processes:
            kill_tree(process.process)


def environment(bench: Bench, cell: Cell, outputs: Path, lanes: tuple[int, ...]) -> dict[str, str]:
    """Return the environment of a run: its own GPUs, and empty caches, as in a user's first run."""
    cache_root = bench.folder / "caches" if bench.warm_caches else outputs
    caches = {
        "UNSLOTH_COMPILE_LOCATION": outputs / "compiled",
        "TRITON_CACHE_DIR": cache_root / "triton",
        "TORCHINDUCTOR_CACHE_DIR": cache_root / "inductor",
        "HF_DATASETS_CACHE": outputs / "datasets",
    }
    chosen = CONTESTANTS[cell.contestant].environment
    environ = {**os.environ, **{name: str(path) for name, path in caches.items()}, **chosen}
    if bench.gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(bench.gpus[lane] for lane in lanes)
    elif CONTESTANTS[cell.contestant].batch is not None:
        # The loss of TRL's trainer is a Triton kernel, which a CPU can only interpret.
        environ["TRITON_INTERPRET"] = "1"
    if not bench.gpus:
        # Threads of several runs would wait for each other.
        environ["OMP_NUM_THREADS"] = "1"
    return environ


def _start(bench: Bench, cell: Cell, lanes: tuple[int, ...], others: set[str]) -> Process:
    outputs = bench.folder / cell.name
    shutil.rmtree(outputs, ignore_errors=True)
    outputs.mkdir(parents=True)
    words = command(cell, bench.works[cell.work], bench.folder, bench.seconds, bench.tiny, bench.steps)
    expected, now = bench.expected(cell), time.monotonic()
    with (outputs / "log").open("wb") as log:
        process = subprocess.Popen(
            words,
            cwd=outputs,
            env=environment(bench, cell, outputs, lanes),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    # Processes on a CPU share its cores.
    patience = max(LEAST_PATIENCE, PATIENCE * expected) * (cell.processes if bench.tiny else 1)
    limit = min(now + patience, bench.deadline + GRACE)
    return Process(Running(cell, lanes, now + expected), process, words, now, time.time(), limit, others)


def _ended(bench: Bench, process: Process) -> dict[str, Any] | None:
    """Return the result of a run that has ended, or end one that takes too long; None while it runs."""
    code: int | str | None = process.process.poll()
    if code is None:
        if time.monotonic() < process.limit:
            return None
        kill_tree(process.process)
        code = CUT_OFF if process.limit >= bench.deadline + GRACE else f"over {process.limit - process.began:.0f} s"
    cell, outputs = process.running.cell, bench.folder / process.running.cell.name
    result: dict[str, Any] = {
        "name": cell.name, "work": cell.work, "shape": cell.shape, "method": cell.method,
        "contestant": cell.contestant, "processes": cell.processes, "scaling": cell.scaling, "repeat": cell.repeat,
        "command": " ".join(process.command[1:]), "lanes": list(process.running.lanes),
        "beside": sorted(process.beside), "warm_caches": bench.warm_caches,
        "exit_code": code, "seconds": round(time.monotonic() - process.began, 1),
    }  # fmt: skip
    log = (outputs / "log").read_text(errors="replace")
    if code == 0:
        try:
            result |= read(cell, outputs, log, process.began_at)
            bench.measured_seconds[cell.contestant, cell.shape, cell.work] = result["seconds"] + 3
        except (OSError, KeyError, ValueError, TypeError) as error:
            result["exit_code"] = f"no result: {type(error).__name__}: {error}"
    if result["exit_code"] != 0:
        result["log"] = log[-TAIL:]
    # Checkpoints and trained models are large, and nothing reads them.
    shutil.rmtree(outputs, ignore_errors=True)
    return result


def read(cell: Cell, outputs: Path, log: str, began_at: float) -> dict[str, Any]:
    """Return the measurements of a finished run.

    Raises:
        OSError, KeyError, ValueError: its files are not what they should be.
    """
    measured = (
        read_kit(outputs / "run") if CONTESTANTS[cell.contestant].batch is None else read_peer(outputs / "result.json")
    )
    first = measured.pop("first_step_at")
    measured["said"] = [text[:300] for text in log.splitlines() if ABOUT_PACKING.search(text)][:6]
    measured["seconds_to_first_step"] = round(first - began_at, 1) if first else None
    if len(measured["intervals"]) < 2:
        raise ValueError(f"{len(measured['intervals'])} intervals are too few")
    return {**measured, **figures(measured["intervals"], cell.processes)}


def read_kit(run: Path) -> dict[str, Any]:
    """Read what train_ddp.py wrote into its run's folder."""
    summary = json.loads((run / "summary.json").read_text())
    own_log = (run / "logs" / "rank_0.log").read_text()
    chooses = summary["backend"] == "unsloth" and HEAD_OF_ALL not in own_log
    return {
        "intervals": kit_intervals(log_history(run), WARM_LINES),
        "first_step_at": first_step_at(own_log),
        "head_share": summary["supervised_tokens"] / summary["tokens"] if chooses else 1.0,
        "peak_memory_bytes": summary["peak_memory_bytes"],
        "seconds_of_parts": summary.get("seconds"),
        "compiled_after_warm_up": summary.get("compiled_after_warm_up"),
        "settings": {
            "cuda_graphs": summary.get("cuda_graphs"),
            **{name: summary[name] for name in ("packing", "packs", "global_batch_size", "backend", "precision")},
            **{name: summary[name] for name in ("per_device_train_batch_size", "gradient_accumulation_steps")},
            "gradient_checkpointing": summary["gradient_checkpointing"],
            "optim": summary["settings"]["optim"],
        },
        "versions": summary["versions"],
    }


def read_peer(path: Path) -> dict[str, Any]:
    """Read what a peer's script wrote."""
    return json.loads(path.read_text())
