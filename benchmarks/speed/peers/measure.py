"""Measure the speed of a peer's trainer in tokens without padding, counted in the micro-batches its model gets.

Works for any subclass of Transformers' Trainer. Import it after the peer's own library: Unsloth has to come before
Transformers.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback


@dataclass(frozen=True)
class Pace:
    """Set when measuring begins, how often it marks the time, and when it ends. All in seconds but for the steps."""

    seconds: float
    warm_steps: int = 2
    warm_seconds: float = 8.0
    interval: float = 1.5
    fewest: int = 3

    def warm(self, steps: int, since_first_step: float) -> bool:
        """Return whether compilation and the allocator have settled."""
        return steps >= self.warm_steps and since_first_step >= self.warm_seconds

    def enough(self, measured: float, intervals: int) -> bool:
        """Return whether the run may end."""
        return intervals >= self.fewest and measured >= self.seconds


def real_tokens(inputs: Mapping[str, Any]) -> Any:
    """Return the tokens of a micro-batch without padding: a 0-dim tensor, or an int if no tensor has to be read."""
    if "packed_seq_lengths" in inputs:
        return inputs["packed_seq_lengths"].sum()
    if inputs.get("attention_mask") is not None:
        return inputs["attention_mask"].sum()
    # Flattened rows, one behind the other: nothing is padded.
    return inputs["input_ids"].numel()


class Marks(TrainerCallback):
    """Record time and tokens at the end of some steps, once the GPU has finished them, and stop the trainer in time."""

    def __init__(self, trainer: Any, pace: Pace) -> None:
        self.pace = pace
        self.cuda = torch.cuda.is_available() and not trainer.args.use_cpu
        self.tokens: Any = 0
        self.marks: list[tuple[float, int, int]] = []
        self.first_step_at = 0.0
        self.first_step_ended = 0.0
        self.largest = (0, 0)
        self.keys: set[str] = set()
        self._original = trainer.training_step
        trainer.training_step = self._count
        trainer.add_callback(self)

    def _count(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.tokens = self.tokens + real_tokens(inputs)
        self.keys |= {name for name, value in inputs.items() if value is not None}
        shape = tuple(inputs["input_ids"].shape)
        self.largest = max(self.largest, shape, key=lambda size: size[0] * size[1])
        return self._original(model, inputs, *args, **kwargs)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reset the peak memory, so that loading does not count as training."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the time of this step if it is due."""
        now, steps = time.perf_counter(), state.global_step
        if steps == 1:
            self._wait()
            self.first_step_at, self.first_step_ended = time.time(), time.perf_counter()
        elif self.marks:
            if now - self.marks[-1][0] >= self.pace.interval:
                self._mark(steps)
                if self.pace.enough(self.marks[-1][0] - self.marks[0][0], len(self.marks) - 1):
                    control.should_training_stop = True
        elif self.pace.warm(steps, now - self.first_step_ended):
            self._mark(steps)

    def _mark(self, steps: int) -> None:
        self._wait()
        self.marks.append((time.perf_counter(), int(self.tokens), steps))

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def result(self) -> dict[str, Any]:
        """Return the measurements; intervals are (tokens, seconds, steps)."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        memory = {}
        if self.cuda:
            memory = {
                "peak_memory_bytes": torch.cuda.max_memory_allocated(),
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            }
        return {
            "intervals": [(b[1] - a[1], b[0] - a[0], b[2] - a[2]) for a, b in pairs],
            "first_step_at": self.first_step_at,
            "largest_micro_batch": self.largest,
            "model_inputs": sorted(self.keys),
            **memory,
        }


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the command line parser that every peer uses."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", required=True, help="a .jsonl file of chats")
    parser.add_argument("--method", choices=["lora", "qlora", "full"], default="lora")
    parser.add_argument("--max_length", type=int, default=2048)
    parser.add_argument("--batch", type=int, required=True, help="rows, or packs, in a micro-batch")
    parser.add_argument("--accumulation", type=int, required=True, help="micro-batches in a step")
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--seconds", type=float, default=15, help="seconds of steps that are measured, after warm-up")
    parser.add_argument("--warm_seconds", type=float, default=8)
    parser.add_argument("--steps", type=int, help="take so many steps and save what was trained")
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    return parser


def add_unsloth_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add what a user of Unsloth tunes by hand; the defaults are those of its guide."""
    parser.add_argument("--optim", default="adamw_8bit")
    parser.add_argument("--checkpointing", choices=["unsloth", "none"], default="unsloth")
    parser.add_argument("--logging_steps", type=int, default=1)
    return parser


def train(trainer: Any, options: argparse.Namespace, checkpointing: str) -> None:
    """Train until enough is measured or for the given steps, and write it; `checkpointing` is what recomputes."""
    if options.steps:
        trainer.args.max_steps = options.steps
    marks = Marks(trainer, Pace(math.inf if options.steps else options.seconds, warm_seconds=options.warm_seconds))
    trainer.train()
    if options.steps:
        trainer.save_model()
    arguments = trainer.args
    settings = {
        name: getattr(arguments, name, None)
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "packing", "padding_free", "bf16",
                     "max_length", "logging_steps", "learning_rate")
    }  # fmt: skip
    settings["gradient_checkpointing"] = checkpointing
    settings["optim"] = str(getattr(arguments.optim, "value", arguments.optim))
    model = getattr(trainer.model, "config", None)
    settings["attention"] = getattr(model, "_attn_implementation", None)
    options.json.write_text(json.dumps({**marks.result(), "settings": settings}))
