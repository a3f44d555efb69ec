"""Profile a step of train_ddp.py: where its time goes, and what makes the host wait for the GPU.

    python -m benchmarks.speed.profile_step --work /tmp/profile --json benchmarks/results/speed/profile_auto.json
    python -m benchmarks.speed.profile_step ... -- --per_device_train_batch_size auto
    python -m benchmarks.speed.profile_step ... --shape qwen3_8b --rows full

Runs the kit with its defaults: LoRA on a model of Qwen3-1.7B's shape, on chat rows. Options after -- are added. After
warm-up, some steps run without a profiler, some record only the GPU (which slows nothing down), and some record every
operation with its Python stack (which slows a lot down, so that only counts and shares are used). No profiled step
writes a log line. Only the summary is kept.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.rows import chat_rows, full_rows
from benchmarks.common.runs import REPO, have_model, train_here, write_results
from benchmarks.speed.profile_summary import gpu_summary, operator_summary, waits

WARM, PLAIN, GPU_ONLY, WITH_STACKS = 8, 6, 4, 2


class Phases:
    """Start and stop the profiler at step borders, once the GPU has finished the step.

    Not a TrainerCallback itself: that class cannot be imported before Unsloth is.
    """

    def __init__(self, folder: Path, scale: int) -> None:
        self.folder = folder
        self.measured: dict[str, Any] = {}
        plan = [("plain", PLAIN), ("gpu", GPU_ONLY), ("stacks", WITH_STACKS)]
        self.begins, self.ends, at = {}, {}, WARM if scale > 1 else 2
        for name, steps in plan:
            steps = steps if scale > 1 else 2
            self.begins[at], self.ends[at + steps] = (name, steps), (name, steps)
            at += steps
        self.last = at
        self.profiler: Any = None
        self.phase_began = 0.0

    def step_ended(self, step: int) -> None:
        """Start or end a phase after this step."""
        if step not in self.ends and step not in self.begins:
            return
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if step in self.ends:
            self._end(*self.ends[step])
        if step in self.begins:
            self._begin(self.begins[step][0])

    def _begin(self, name: str) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        if name == "gpu" and gpu:
            self.profiler = profile(activities=gpu)
        elif name == "stacks":
            self.profiler = profile(activities=[ProfilerActivity.CPU, *gpu], with_stack=True)
        if self.profiler is not None:
            self.profiler.__enter__()
        self.phase_began = time.perf_counter()

    def _end(self, name: str, steps: int) -> None:
        seconds = time.perf_counter() - self.phase_began
        self.measured[f"{name}_seconds_a_step"] = seconds / steps
        if self.profiler is None:
            return
        self.profiler.__exit__(None, None, None)
        trace = self.folder / f"{name}.json"
        self.profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
        trace.unlink()
        if name == "gpu":
            self.measured["gpu"] = gpu_summary(events, seconds, steps)
        else:
            averages = self.profiler.key_averages()
            self.measured["operators"] = operator_summary(
                [(a.key, a.count, a.self_cpu_time_total / 1e6) for a in averages], steps
            )
            self.measured["waits"] = waits(events, steps)
        self.profiler = None


def profiled(phases: Phases) -> Callable[..., Any]:
    """Return what makes a trainer with a callback that calls `phases`."""

    def make_profiled_trainer(make_trainer: Any, *args: Any) -> Any:
        from transformers import TrainerCallback

        class Profile(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                phases.step_ended(state.global_step)

        trainer = make_trainer(*args)
        trainer.add_callback(Profile())
        return trainer

    return make_profiled_trainer


def main() -> None:
    """Train a few steps in this process, and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("/tmp/profile"))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--shape", default="qwen3_1.7b", help="a shape of benchmarks/common/models.py")
    parser.add_argument(
        "--rows", choices=["chat", "full"], default="chat", help="rows of log-normal length, or of --tokens each"
    )
    parser.add_argument("--tokens", type=int, default=2048, help="of the longest row")
    parser.add_argument("--tiny", action="store_true", help="try the script on a CPU, with the demo's model")
    parser.add_argument("options", nargs="*", help="options of train_ddp.py, after --")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    model = REPO / "demo/model" if options.tiny else options.work / options.shape
    rows = options.work / f"profile_{options.rows}.jsonl"
    if not options.tiny:
        have_model(options.shape, model)
    longest = 200 if options.tiny else options.tokens
    count = 100 if options.tiny else 2000
    if options.rows == "chat":
        chat_rows(rows, count, seed=3, longest=longest)
    else:
        full_rows(rows, count, seed=3, tokens=longest)
    with tempfile.TemporaryDirectory() as folder:
        phases = Phases(Path(folder), 1 if options.tiny else 2)
        argv = ["--model", str(model), "--dataset", str(rows), "--max_length", str(longest)]
        argv += ["--global_batch_size", "4" if options.tiny else "64", "--max_steps", str(phases.last)]
        argv += ["--save_strategy", "no", "--report_to", "none", "--output_dir", folder, "--run_name", "profiled"]
        argv += options.options
        train_here(argv, make_trainer=profiled(phases))
        summary = json.loads((Path(folder) / "profiled" / "summary.json").read_text())
    tokens = summary["tokens"] / summary["steps"]
    write_results(options.json, options=argv, tokens_a_step=tokens, summary=summary, **phases.measured)
    shares = phases.measured.get("gpu", {})
    print(
        f"{phases.measured['plain_seconds_a_step']:.3f} s a step of {tokens:,.0f} tokens; GPU busy "
        f"{shares.get('busy', 0):.0%}"
    )
    for wait in phases.measured["waits"]:
        where = " < ".join(wait["stack"][:-4:-1]) or "no Python frame on its thread"
        print(f"{wait['count_a_step']:8.1f} a step  {wait['name']}  {where}")


if __name__ == "__main__":
    main()
