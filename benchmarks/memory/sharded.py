"""Compare the estimate of a sharded run's memory with the measured peak of its steps, for each kind and micro-batch.

    python -m benchmarks.memory.sharded --json benchmarks/results/memory/sharded_fit.json

Needs two GPUs of 141 GB (or --at_once 2) and, for ZeRO, the extra deepspeed. Each launch estimates all kinds and sizes
as a run does before training (unsloth_ddp/sizing/sharded_trial.py), and then trains some steps with each of them on
rows of the same length; the peaks of the last steps are compared. Nothing is saved. Qwen3-1.7B's shape, random weights,
packs of 2048 tokens. A ratio above 1 says that the estimate was higher than the peak; HEADROOM there has to cover the
ratios below 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.rows import full_rows
from benchmarks.common.runs import have_model, launch_command, train, train_here, write_results

PAIRS = [("fsdp2", "lora"), ("fsdp2", "full"), ("zero2", "lora"), ("zero3", "lora")]
BACKENDS = ("transformers", "unsloth")
KINDS, SIZES = ("torch", "none"), (1, 4)
# The first step with a kind and size compiles kernels, and the first of all makes the optimizer's states.
STEPS = 3
LIMIT = 170
TOKENS = 2048
OPTIONS = (
    f"--max_length {TOKENS} --gradient_checkpointing auto --per_device_train_batch_size auto --global_batch_size 4 "
    "--logging_steps 1 --save_strategy no --report_to none --warmup_steps 0 --seed 5 --overwrite"
)


class Measure:
    """Estimate all kinds and sizes before training, and train `STEPS` steps with each.

    Args:
        trainer: of the run; its micro-batches are replaced by the largest ones of a size.
        file: that the main process writes the results to.
    """

    def __init__(self, trainer: Any, file: Path) -> None:
        from transformers import TrainerCallback

        from unsloth_ddp.sizing.sharded_trial import ShardedEstimates

        self.trainer, self.file = trainer, file
        self.cases = list(itertools.product(KINDS, SIZES))
        self.estimates: dict[str, int | None] = {}
        self.obstacles: set[str] = set()
        self.peaks: dict[str, int] = {}
        self.seconds = 0.0
        self.chosen = ""
        measure, choose, step = self, ShardedEstimates.choose, trainer.training_step

        def estimate_all(estimates: Any, rungs: Any) -> Any:
            measure.estimate_all(estimates)
            rung, rung_reason = choose(estimates, rungs)
            measure.chosen = f"{rung.kind}, {rung.rows}: {rung_reason}"
            return rung, rung_reason

        def replaced_step(model: Any, inputs: Any, divisor: Any = None) -> Any:
            return step(model, measure.micro_batch(), divisor)

        class AtSteps(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                measure.begin_step()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                measure.end_step()

        ShardedEstimates.choose = estimate_all  # type: ignore[method-assign]
        trainer.training_step = replaced_step
        trainer.add_callback(AtSteps())

    def estimate_all(self, estimates: Any) -> None:
        """Estimate each kind and size on this rank."""
        began = time.perf_counter()
        for kind, size in self.cases:
            estimates.checkpointing.use(kind)
            estimate = estimates.estimate(size)
            self.estimates[f"{kind} {size}"] = estimate.needed
            self.obstacles |= {estimate.obstacle} - {""}
        self.seconds = round((time.perf_counter() - began) / len(self.cases), 2)
        # In the log of a run that does not come to its end, too.
        print(f"estimates: {self.estimates}", flush=True)

    def case(self) -> tuple[str, int]:
        """Return the kind and size of the step that runs now."""
        return self.cases[min(self.trainer.state.global_step // STEPS, len(self.cases) - 1)]

    def begin_step(self) -> None:
        """Switch to the step's kind, and forget the peak."""
        import torch

        kind, _ = self.case()
        if self.trainer.step.checkpointing.kind != kind:
            self.trainer.step.checkpointing.use(kind)
        torch.cuda.reset_peak_memory_stats()

    def micro_batch(self) -> dict[str, Any]:
        """Return the largest micro-batch of the step's size."""
        from unsloth_ddp.data.order.worst_rows import worst_micro_batch

        trainer, (_, size) = self.trainer, self.case()
        return trainer.collate(worst_micro_batch(trainer.data.train, size, trainer.settings.max_length))

    def end_step(self) -> None:
        """Keep the peak of a case's later steps; after the last one end the process, without saving."""
        import torch

        # The callback comes when the step is counted.
        steps_done = self.trainer.state.global_step - 1
        kind, size = self.cases[steps_done // STEPS]
        if steps_done % STEPS:
            name = f"{kind} {size}"
            self.peaks[name] = max(self.peaks.get(name, 0), torch.cuda.max_memory_allocated())
        if steps_done + 1 == STEPS * len(self.cases):
            self.write()

    def write(self) -> None:
        """Write what was found, and end all ranks."""
        runtime = self.trainer.runtime
        peaks = runtime.gather(self.peaks)
        if runtime.ranks.is_main:
            highest = {name: max(peak[name] for peak in peaks) for name in self.peaks}
            report = {"estimates": self.estimates, "peaks": highest, "obstacles": sorted(self.obstacles)}
            report |= {"chosen": self.chosen, "seconds_an_estimate": self.seconds}
            self.file.write_text(json.dumps(report))
        runtime.barrier()
        os._exit(0)


def run_one_rank(file: Path, argv: list[str]) -> None:
    """Run train_ddp.py with the measurements."""

    def make_measuring_trainer(make_trainer: Any, *args: Any) -> Any:
        trainer = make_trainer(*args)
        Measure(trainer, file)
        return trainer

    train_here(argv, make_trainer=make_measuring_trainer)


def run(pair: tuple[str, str], backend: str, options: argparse.Namespace) -> dict[str, Any]:
    """Launch one sharding, method and backend on all GPUs; return estimates, peaks and their ratios."""
    sharding, method = pair
    name = f"{sharding}_{method}_{backend}"
    file = options.work / f"{name}.json"
    file.unlink(missing_ok=True)
    argv = f"--model {options.work}/{options.shape} --dataset {options.work}/rows.jsonl --method {method}"
    argv += f" --backend {backend}"
    argv += f" {OPTIONS} --max_steps {STEPS * len(KINDS) * len(SIZES)}"
    command = [*launch_command(f"{sharding}.yaml", options.processes), "--module", "benchmarks.memory.sharded", "one"]
    result = train([*command, "--file", str(file), "--argv", *argv.split()], name, options.work, LIMIT)
    if not file.is_file():
        return result
    # Nothing is saved, so that its log is part of the result of every run.
    result.pop("log", None)
    result |= json.loads(file.read_text())
    estimated = {case: needed for case, needed in result["estimates"].items() if needed and result["peaks"].get(case)}
    return {**result, "ratios": {case: round(needed / result["peaks"][case], 3) for case, needed in estimated.items()}}


def main() -> None:
    """Run all cases, some side by side on the same GPUs, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["all", "one"], default="all")
    parser.add_argument("--work", type=Path, default=Path("/tmp/sharded_fit"))
    parser.add_argument("--json", type=Path, default=Path("/tmp/sharded_fit/sharded_fit.json"))
    parser.add_argument("--shape", default="qwen3_1.7b")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--at_once", type=int, default=4, help="launches side by side; GPUs of 80 GB have room for 2")
    parser.add_argument("--only", nargs="*", help="only these, as fsdp2_lora_unsloth")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--argv", nargs=argparse.REMAINDER, default=[])
    options = parser.parse_args()
    if options.what == "one":
        run_one_rank(options.file, options.argv)
        return
    options.work.mkdir(parents=True, exist_ok=True)
    full_rows(options.work / "rows.jsonl", 64, seed=4, tokens=TOKENS)
    have_model(options.shape, options.work / options.shape)
    jobs = [(pair, backend) for backend in BACKENDS for pair in PAIRS]
    jobs = [job for job in jobs if not options.only or f"{job[0][0]}_{job[0][1]}_{job[1]}" in options.only]
    results = []
    with ThreadPoolExecutor(max_workers=options.at_once) as pool:
        for result in pool.map(lambda job: run(*job, options), jobs):
            results.append(result)
            print({key: value for key, value in result.items() if key not in ("estimates", "peaks")}, flush=True)
            write_results(options.json, runs=results, tokens=TOKENS, at_once=options.at_once)
    ratios = [ratio for result in results for ratio in result.get("ratios", {}).values()]
    if ratios:
        print(
            f"estimate / peak: {min(ratios)} to {max(ratios)}; the headroom has to be above "
            f"{max(0, 1 - min(ratios)):.3f}"
        )


if __name__ == "__main__":
    main()
