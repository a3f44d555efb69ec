"""Describe the runs of the speed comparison: workloads, contestants, order, and command lines. Plain values only."""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.runs import REPO, launch_command

TINY = "demo"
# Seconds of a log line of the kit, so that reading the clock costs nothing.
LINE_SECONDS = 1.5
# Log lines of the kit that are not counted: compilation, and the allocator's first steps.
WARM_LINES = 2
FEWEST_LINES = 3


@dataclass(frozen=True)
class Work:
    """Describe a workload: the rows to train on, and how many make a step."""

    name: str
    max_length: int
    global_batch: int
    rows: int
    mean_tokens: float

    @property
    def packs_a_step(self) -> int:
        """Estimate how many packs hold the rows of a step."""
        return max(2, round(self.global_batch * self.mean_tokens / self.max_length))


WORKS = {
    "chat": Work("chat", 2048, 64, 4096, 285),
    "small": Work("small", 2048, 16, 4096, 285),
    "full": Work("full", 2048, 32, 512, 2048),
    "long": Work("long", 8192, 8, 128, 8192),
    "longest": Work("longest", 32768, 2, 16, 32768),
    "uneven": Work("uneven", 8192, 32, 512, 2217),
}
TINY_WORKS = {
    "chat": Work("chat", 48, 8, 64, 28),
    "small": Work("small", 48, 4, 64, 28),
    "full": Work("full", 48, 2, 32, 48),
    "long": Work("long", 96, 2, 16, 96),
    "longest": Work("longest", 192, 2, 8, 192),
    "uneven": Work("uneven", 96, 4, 32, 48),
}


@dataclass(frozen=True)
class Contestant:
    """Describe a way to train; `batch` None marks the kit, whose options are added to its defaults."""

    name: str
    batch: int | None = None
    accumulation: int | None = None
    script: str = "train_ddp.py"
    options: tuple[str, ...] = ()
    # Seconds from the start to the first counted step: imports, loading, rows, compilation, warm-up.
    setup: dict[str, float] = dataclasses.field(default_factory=dict)
    # Part of the kit's expected speed, by shape.
    share: dict[str, float] = dataclasses.field(default_factory=dict)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


UNSLOTH_SETUP = {"qwen3_1.7b": 65, "qwen3_8b": 85, TINY: 30}
TRL_SETUP = {"qwen3_1.7b": 45, "qwen3_8b": 60, TINY: 30}
# What a user can set by hand in Unsloth's own trainer for the kit's workload on a large GPU.
TUNED_BY_HAND = ("--packing", "--optim", "adamw_torch_fused", "--logging_steps", "5")
# A measurement is too short for auto, which compiles for runs that earn it back.
GRAPHS = ("--cuda_graphs", "on")
CONTESTANTS = {
    c.name: c
    for c in (
        Contestant("kit", options=GRAPHS, setup=UNSLOTH_SETUP),
        Contestant("kit_auto", setup=UNSLOTH_SETUP),
        Contestant("kit_all_auto", options=("--loss_on", "all"), setup=UNSLOTH_SETUP),
        Contestant("kit_fp8", options=(*GRAPHS, "--fp8"), setup=UNSLOTH_SETUP),
        Contestant("kit_fp8_unsloth", options=(*GRAPHS, "--fp8", "--backend", "unsloth"), setup=UNSLOTH_SETUP),
        Contestant("kit_fp8_ordinary", options=("--cuda_graphs", "off", "--fp8"), setup=UNSLOTH_SETUP),
        Contestant("kit_ordinary", options=("--cuda_graphs", "off"), setup=UNSLOTH_SETUP),
        Contestant(
            "kit_deterministic", options=(*GRAPHS, "--trainer_args", '{"full_determinism": true}'), setup=UNSLOTH_SETUP
        ),
        Contestant("kit_all", options=(*GRAPHS, "--loss_on", "all"), setup=UNSLOTH_SETUP),
        Contestant(
            "kit_all_transformers", options=(*GRAPHS, "--loss_on", "all", "--backend", "transformers"), setup=TRL_SETUP
        ),
        Contestant("kit_all_ordinary", options=("--cuda_graphs", "off", "--loss_on", "all"), setup=UNSLOTH_SETUP),
        Contestant(
            "kit_all_transformers_ordinary",
            options=("--cuda_graphs", "off", "--loss_on", "all", "--backend", "transformers"),
            setup=TRL_SETUP,
        ),
        Contestant("kit_one", options=(*GRAPHS, "--per_device_train_batch_size", "1"), setup=UNSLOTH_SETUP),
        Contestant(
            "kit_one_ordinary",
            options=("--cuda_graphs", "off", "--per_device_train_batch_size", "1"),
            setup=UNSLOTH_SETUP,
            share={"qwen3_1.7b": 0.2, "qwen3_8b": 0.6},
        ),
        Contestant("trl", 8, script="trl_sft.py", setup=TRL_SETUP),
        Contestant("trl_packed", 2, script="trl_sft.py", options=("--packing",), setup=TRL_SETUP),
        Contestant("unsloth_guide", 2, 4, "unsloth_sft.py", setup=UNSLOTH_SETUP),
        Contestant("unsloth_same_batch", 2, script="unsloth_sft.py", setup=UNSLOTH_SETUP),
        Contestant("unsloth_packed", 2, 4, "unsloth_sft.py", ("--packing",), UNSLOTH_SETUP),
        Contestant("unsloth_tuned", 8, None, "unsloth_sft.py", TUNED_BY_HAND, UNSLOTH_SETUP),
        Contestant(
            "unsloth_tuned_stored",
            8,
            None,
            "unsloth_sft.py",
            (*TUNED_BY_HAND, "--checkpointing", "none"),
            UNSLOTH_SETUP,
        ),
        # Off in Unsloth 2026.10.9, whose other new kernels are on.
        Contestant(
            "unsloth_tuned_graphs",
            8,
            None,
            "unsloth_sft.py",
            (*TUNED_BY_HAND, "--checkpointing", "none"),
            UNSLOTH_SETUP,
            environment={"UNSLOTH_BLOCK_CUDAGRAPHS": "1"},
        ),
    )
}
# About how many tokens a second a GPU does, to choose the kit's steps; a guess that is off makes a run longer or
# shorter.
EXPECTED = {
    ("chat", "qwen3_1.7b"): 50_000, ("small", "qwen3_1.7b"): 40_000, ("full", "qwen3_1.7b"): 55_000,
    ("long", "qwen3_1.7b"): 40_000,
    ("chat", "qwen3_8b"): 15_000, ("small", "qwen3_8b"): 13_000, ("full", "qwen3_8b"): 16_000,
    ("long", "qwen3_8b"): 13_000,
    ("longest", "qwen3_8b"): 8_000,
}  # fmt: skip
EXPECTED_OTHERS, EXPECTED_TINY = 30_000, 400
METHODS = ("lora", "qlora", "full")


@dataclass(frozen=True)
class Cell:
    """Describe one run: a contestant on a workload; `scaling` is weak (fixed work per GPU) or strong (fixed total)."""

    work: str
    shape: str
    method: str
    contestant: str
    processes: int = 1
    scaling: str = ""
    repeat: int = 0

    @property
    def name(self) -> str:
        """Return a unique name that is also a folder name."""
        several = f"_{self.processes}gpu_{self.scaling}" if self.processes > 1 else ""
        return f"{self.work}_{self.shape}_{self.method}_{self.contestant}{several}_r{self.repeat}"

    def global_batch(self, work: Work) -> int:
        """Return the rows of a step over all processes."""
        return work.global_batch * (self.processes if self.scaling == "weak" else 1)


def parse_cells(words: list[str], repeats: int) -> list[Cell]:
    """Parse work:shape:method:contestant[:2weak|:2strong]; all runs once before any is repeated.

    Raises:
        ValueError: a word names no work, contestant or method.
    """
    cells = []
    for word in words:
        parts = word.split(":")
        if len(parts) not in (4, 5):
            raise ValueError(f"{word} is not work:shape:method:contestant, with :2weak or :2strong for several GPUs")
        work, shape, method, contestant = parts[:4]
        choices = (WORKS, METHODS, CONTESTANTS)
        for part, names in zip((work, method, contestant), choices, strict=True):
            if part not in names:
                raise ValueError(f"{word}: there is no {part}; choose from {', '.join(names)}")
        cell = Cell(work, shape, method, contestant)
        if len(parts) == 5:
            processes, scaling = (
                parts[4][:-4] if parts[4].endswith("weak") else parts[4][:-6],
                parts[4].lstrip("0123456789"),
            )
            if scaling not in ("weak", "strong") or not processes.isdigit():
                raise ValueError(f"{word}: {parts[4]} is not a number of GPUs with weak or strong")
            if CONTESTANTS[contestant].batch is not None:
                raise ValueError(f"{word}: only the kit is run on several GPUs")
            cell = dataclasses.replace(cell, processes=int(processes), scaling=scaling)
        cells.append(cell)
    return [dataclasses.replace(cell, repeat=repeat) for repeat in range(repeats) for cell in cells]


PEERS = ("trl", "unsloth_guide", "unsloth_packed")


def default_order() -> list[str]:
    """Return the cells in order of importance."""

    def group(work: str, shape: str, method: str, *names: str) -> list[str]:
        return [f"{work}:{shape}:{method}:{name}" for name in names]

    small, large = "qwen3_1.7b", "qwen3_8b"
    order = group("chat", small, "lora", "kit", "kit_one", *PEERS, "trl_packed")
    order += group("chat", large, "lora", "kit", "kit_one", *PEERS, "trl_packed")
    order += group("full", large, "lora", "kit", "trl", "unsloth_guide")
    order += [f"{work}:{large}:lora:kit:2{scaling}" for work in ("full", "chat") for scaling in ("weak", "strong")]
    order += group("chat", large, "qlora", "kit", "kit_one", *PEERS)
    order += group("chat", small, "full", "kit", "kit_one", *PEERS)
    order += group("long", large, "lora", "kit", "kit_one", *PEERS)
    order += group("full", small, "lora", "kit", "kit_one", "trl", "unsloth_guide")
    for shape in (small, large):
        order += group("chat", shape, "lora", "unsloth_same_batch", "unsloth_tuned", "unsloth_tuned_stored")
    return order


@dataclass(frozen=True)
class Steps:
    """Hold the number of steps the kit takes, and the steps between two log lines."""

    steps: int
    logging: int


def kit_steps(cell: Cell, work: Work, seconds: float, tiny: bool, steps: int | None = None) -> Steps:
    """Return `steps`, or those that take the kit about `seconds` after warm-up, by its expected speed."""
    if steps:
        return Steps(steps, min(5, steps))
    speed = (EXPECTED_TINY if tiny else EXPECTED.get((cell.work, cell.shape), EXPECTED_OTHERS)) * cell.processes
    step = cell.global_batch(work) * work.mean_tokens / (speed * CONTESTANTS[cell.contestant].share.get(cell.shape, 1))
    logging = min(5, max(1, math.ceil(LINE_SECONDS / step)))
    # Step 1 has a line of its own, whatever the distance of the others.
    lines = WARM_LINES - (logging > 1) + max(FEWEST_LINES, math.ceil(seconds / (step * logging)))
    return Steps(lines * logging, logging)


def command(cell: Cell, work: Work, folder: Path, seconds: float, tiny: bool, steps: int | None = None) -> list[str]:
    """Return the command line of a cell; `folder` holds models, rows and runs, `steps` makes it a whole job."""
    contestant = CONTESTANTS[cell.contestant]
    model = REPO / "demo/model" if tiny else folder / cell.shape
    rows, outputs = folder / f"{cell.work}.jsonl", folder / cell.name
    if contestant.batch is None:
        # A CPU has no CUDA graphs.
        options = contestant.options[len(GRAPHS) :] if tiny and contestant.options[:2] == GRAPHS else contestant.options
        plan = kit_steps(cell, work, seconds, tiny, steps)
        return [*_launcher(cell, tiny), *_kit_options(cell, work, model, rows, outputs, plan), *options]
    batch = min(contestant.batch, work.global_batch)
    units = work.packs_a_step if contestant.options else work.global_batch
    accumulation = contestant.accumulation or max(1, round(units / batch))
    script = REPO / "benchmarks/speed/peers" / contestant.script
    words: list[Any] = [sys.executable, script, "--model", model, "--rows", rows, "--method", cell.method]
    words += ["--max_length", work.max_length, "--batch", batch, "--accumulation", accumulation]
    words += ["--seconds", seconds, "--json", outputs / "result.json", *contestant.options]
    words += ["--warm_seconds", 1] if tiny else []
    words += ["--steps", steps] if steps else []
    return [str(word) for word in words]


def _launcher(cell: Cell, tiny: bool) -> list[str]:
    script = str(REPO / "train_ddp.py")
    if cell.processes == 1:
        return [sys.executable, script]
    return [*launch_command("cpu.yaml" if tiny else "ddp.yaml", cell.processes), script]


def _kit_options(cell: Cell, work: Work, model: Path, rows: Path, outputs: Path, plan: Steps) -> list[str]:
    words: list[Any] = ["--model", model, "--dataset", rows, "--max_length", work.max_length, "--method", cell.method]
    words += ["--global_batch_size", cell.global_batch(work), "--max_steps", plan.steps]
    words += ["--logging_steps", plan.logging, "--save_strategy", "no", "--report_to", "none"]
    words += ["--output_dir", outputs, "--run_name", "run", "--overwrite"]
    words += ["--learning_rate", "1e-5"] if cell.method == "full" else []
    return [str(word) for word in words]


def estimate(cell: Cell, seconds: float, measured_seconds: dict[tuple[str, str, str], float]) -> float:
    """Estimate the seconds of a run from an earlier one of its kind, or by a guess."""
    measured = measured_seconds.get((cell.contestant, cell.shape, cell.work))
    setup = CONTESTANTS[cell.contestant].setup
    return measured or setup.get(cell.shape, max(setup.values())) + 1.2 * seconds + (10 if cell.processes > 1 else 0)
