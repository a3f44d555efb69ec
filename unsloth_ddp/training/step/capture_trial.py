"""Try whether micro-batches can be replayed as CUDA graphs: the pass works, computes the same, and is faster."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.dataset import TokenizedRows
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.order.collate import Collate
from unsloth_ddp.data.training_data import TrainingData
from unsloth_ddp.model.forward.compile_options import drop_compiled_code, uncompiled
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.model.forward.packed_forward import PackedForward
from unsloth_ddp.model.modules import kept_gradients, kept_random_numbers, training_mode, without_dropout
from unsloth_ddp.model.packing.varlen import has_flash_attention_4
from unsloth_ddp.sizing.graphs import SLOWER, kind_obstacle, shape_of_run
from unsloth_ddp.sizing.ladder import Rung
from unsloth_ddp.sizing.micro_batch import with_micro_batch
from unsloth_ddp.sizing.trial import CapturedPass, release
from unsloth_ddp.training.step.capture_check import (
    FP8_TOLERANCES,
    OUT_OF_MEMORY,
    TOLERANCES,
    capture_sizes,
    check_capture,
    draws_random_numbers,
)
from unsloth_ddp.training.step.captured_step import CapturedStep
from unsloth_ddp.training.step.gradient_exchange import GradientBuffers
from unsloth_ddp.utils.known_errors import is_out_of_memory

logger = logging.getLogger("unsloth_ddp")


@dataclass
class CaptureTrial:
    """Make the captured passes of a run's rungs, and compare one with the backend's pass.

    Args:
        plan: with any micro-batch.
        collate: pads micro-batches to the captured shape.
        runner: computes a micro-batch as the backend does.
        gradients: buffers of the gradients that are exchanged, if any.
        timed: whether a pass that is slower than the backend's is not used.
    """

    settings: Settings
    data: TrainingData
    plan: BatchPlan
    collate: Collate
    runner: MicroBatchRunner
    gradients: GradientBuffers | None
    timed: bool
    # The step that was made last, whose layers are compiled, and the micro-batch and kernel that it is for.
    _last: tuple[tuple[int, bool], CapturedStep] | None = field(default=None, init=False)
    # Whether the pass that was captured last draws random numbers.
    random: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        device = self.runner.device
        self.has_faster_kernel = device.type == "cuda" and has_flash_attention_4(
            torch.cuda.get_device_capability(device)[0]
        )

    def trial_pass(self, rung: Rung) -> CapturedPass | None:
        """Return what computes a micro-batch, collated from now on, as it would be captured; None if it cannot.

        The memory trial computes with it, so compiling its layers is not in vain.
        """
        try:
            step = self._step_of(rung, flash_attention_4=self.has_faster_kernel)
        except NotImplementedError:
            return None
        self.collate.pad_to_shape(step.shape)
        drop_compiled_code(self.runner.model)

        def try_pass(batch: dict[str, Any]) -> None:
            try:
                step.try_pass(batch)
                return
            except Exception as error:
                if isinstance(error, RuntimeError) and is_out_of_memory(error):
                    raise
                logger.warning("the pass that would be captured failed", exc_info=True)
            # Outside the except block, because the exception keeps the activations alive. `capture` finds out why it
            # failed.
            for parameter in step.trained:
                parameter.grad = None
            self.runner.loss_sum(batch).backward()

        return try_pass

    def _step_of(self, rung: Rung, *, flash_attention_4: bool) -> CapturedStep:
        """Return the step of a rung with a kernel: the last if it is for as many packs, as its layers are compiled.

        Raises:
            NotImplementedError: the model cannot be captured.
        """
        key, recompute = (rung.rows, flash_attention_4), rung.kind == "torch"
        if self._last is not None and self._last[0] == key:
            self._last[1].recompute_layers(recompute)
            return self._last[1]
        # Its gradients may be as large as the model.
        self._last = None
        runner = self.runner
        shape = shape_of_run(self.settings, self.data.train, with_micro_batch(self.plan, rung.rows))
        forward = PackedForward(runner.model, shape, recompute=recompute, flash_attention_4=flash_attention_4)
        step = CapturedStep(runner.model, forward, runner.autocast, torch.bfloat16, runner.device, self.gradients)
        self._last = (key, step)
        return step

    def capture(self, rung: Rung) -> tuple[CapturedStep | None, str | None]:
        """Return the captured step, with FlashAttention 4 where results stay the same; or None and the reason."""
        if self.has_faster_kernel:
            step, obstacle = self._capture(rung, flash_attention_4=True)
            if obstacle is None:
                return step, None
            logger.warning("FlashAttention 4 is installed and not used: %s", obstacle)
            del step
            self._last = None
            release()
        step, obstacle = self._capture(rung)
        return (step, None) if obstacle is None else (None, obstacle)

    def end(self, step: CapturedStep | None) -> None:
        """Let go of what the trials made, but for the step that is used."""
        self._last = None
        if step is not None:
            step.in_trial = False
        elif self.gradients is not None:
            self.gradients.free()
        self.collate.pad_to_shape(step.shape if step else None)

    def _capture(self, rung: Rung, *, flash_attention_4: bool = False) -> tuple[CapturedStep | None, str | None]:
        train, runner = self.data.train, self.runner
        try:
            step = self._step_of(rung, flash_attention_4=flash_attention_4)
        except NotImplementedError as error:
            return None, str(error)
        self.collate.pad_to_shape(step.shape)
        batch = self._typical_batch(rung.rows)
        allowed = FP8_TOLERANCES if self.settings.fp8 else TOLERANCES
        with training_mode(runner.model):
            self.random, obstacle = draws_random_numbers(step, batch)
            obstacle = obstacle or kind_obstacle(rung.kind, random=self.random)
            if obstacle is not None:
                return None, obstacle
            with without_dropout(runner.model) as dropped:
                obstacle = check_capture(step, batch, runner.loss_sum, allowed)
                if obstacle == OUT_OF_MEMORY and rung.rows > 1:
                    # The backend's pass, which the captured one is compared with, may need more memory.
                    release()
                    batch = self._typical_batch(1)
                    obstacle = check_capture(step, batch, runner.loss_sum, allowed)
                elif obstacle is None and self.timed:
                    obstacle = why_slower(step, batch, runner)
            if dropped:
                step.forget()
            if obstacle is None and not train.streamed:
                shortest = int(np.argmin(train.lengths()[:-1]))
                obstacle = capture_sizes(step, train.examples[shortest])
        return step, obstacle

    def _typical_batch(self, packs: int) -> dict[str, Any]:
        return self.runner.batch_of(typical_examples(self.data.train, packs))


def typical_examples(train: TokenizedRows, count: int) -> list[dict[str, np.ndarray]]:
    """Return the units whose number of tokens is nearest to the mean; of a stream, the first ones."""
    lengths = train.lengths()[:-1]
    nearest = range(len(lengths)) if train.streamed else np.argsort(np.abs(lengths - lengths.mean()), kind="stable")
    return [train.examples[int(index)] for index in list(nearest)[:count]]


def why_slower(step: CapturedStep, batch: dict[str, Any], runner: MicroBatchRunner) -> str | None:
    """Return why replaying a micro-batch is of no use; None if it is faster, or memory is short for the comparison."""
    divisor = torch.ones((), device=runner.device)
    try:
        computed = seconds_of_pass(runner, batch)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        release()
        return None
    with kept_random_numbers(runner.device), kept_gradients(step.trained):
        replayed = _seconds(lambda: step.run(batch, divisor), runner.device)
    logger.info("a replayed pass takes %.4f s, the backend's %.4f s", replayed, computed)
    if replayed <= SLOWER * computed:
        return None
    return f"a replayed pass takes {replayed:.3f} s, and the backend's {computed:.3f} s"


def seconds_of_pass(runner: MicroBatchRunner, batch: dict[str, Any]) -> float:
    """Return the seconds of the second forward and backward pass of the backend; gradients are left as they were.

    What the backend compiles is not compiled for it: that would take longer than the passes that are timed.
    """
    trained = [p for p in runner.model.parameters() if p.requires_grad]
    with training_mode(runner.model), kept_random_numbers(runner.device), kept_gradients(trained), uncompiled():
        return _seconds(lambda: runner.loss_sum(batch).backward(), runner.device)


def _seconds(compute: Callable[[], object], device: torch.device) -> float:
    compute()
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    compute()
    torch.cuda.synchronize(device)
    return time.perf_counter() - began
