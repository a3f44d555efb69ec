"""Decide whether a run replays micro-batches as CUDA graphs, capture them, and replay them (see captured_step.py)."""

import logging
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.order.collate import Collate
from unsloth_ddp.data.order.fixed_shape import FixedShape, StepTensors
from unsloth_ddp.data.training_data import TrainingData
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.forward.compile_options import drop_compiled_code
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.model.forward.packed_forward import PackedForward
from unsloth_ddp.model.modules import size_of_layers, training_mode, without_dropout
from unsloth_ddp.model.packing.obstacles import stateful_layer
from unsloth_ddp.model.packing.varlen import has_flash_attention_4
from unsloth_ddp.sizing.graphs import (
    StepChoice,
    has_lora_dropout,
    kind_obstacle,
    launching,
    may_compile_layers,
    reason_after,
    reason_before,
    refuse,
    shape_of_run,
    speed_of_gpu,
)
from unsloth_ddp.sizing.micro_batch import MicroBatchDecision, with_micro_batch
from unsloth_ddp.sizing.trial import release
from unsloth_ddp.training.step.capture_check import (
    FP8_TOLERANCES,
    OUT_OF_MEMORY,
    TOLERANCES,
    capture_sizes,
    check_capture,
    draws_random_numbers,
    obstacle,
)
from unsloth_ddp.training.step.captured_step import CapturedStep, CaptureFailed, use_capture_stream
from unsloth_ddp.training.step.compiled_layers import compile_layers, kinds_of_layers, leave_uncompiled
from unsloth_ddp.training.step.gradient_exchange import GradientBuffers
from unsloth_ddp.utils.known_errors import is_out_of_memory

logger = logging.getLogger("unsloth_ddp")


def speed_on(device: torch.device, runtime: Runtime) -> float:
    """Return what `speed_of_gpu` does for the main process's device, so that every rank chooses alike."""
    if device.type != "cuda":
        return 1
    gpu = torch.cuda.get_device_properties(device)
    return runtime.broadcast_from_main(lambda: speed_of_gpu((gpu.major, gpu.minor), gpu.multi_processor_count))


class CudaGraphs:
    """Replay micro-batches as CUDA graphs if that works on every rank, gives the same results, and saves time.

    Args:
        collate: of the trainer; it pads micro-batches to the captured shape once they are replayed.

    Raises:
        UserError: --cuda_graphs is on, but the settings already rule out CUDA graphs.
    """

    def __init__(
        self,
        settings: Settings,
        runtime: Runtime,
        data: TrainingData,
        collate: Collate,
        device: torch.device,
        model: Any,
    ) -> None:
        self.settings = settings
        self.runtime = runtime
        self.data = data
        self.collate = collate
        self.device = device
        self.captured: CapturedStep | None = None
        # Whether memory was tried with the captured step, which is not used after all.
        self.rejected = False
        # Whether CUDA graphs are used because micro-batches do not fit without them, or were in the run that this one resumes.
        self._after_all = False
        self._random = False
        # The pass that memory was tried with last, and the size and kernel that it is for.
        self._tried: tuple[tuple[int, bool], CapturedStep] | None = None
        self._faster = device.type == "cuda" and has_flash_attention_4(torch.cuda.get_device_capability(device)[0])
        self._launched = launching(*size_of_layers(model), speed_on(device, runtime))
        # The micro-batch is chosen for CUDA graphs or without them.
        against = obstacle(settings, runtime, data)
        if against is None and (stateful := stateful_layer(model)):
            # Their kernels read the boundaries on the host.
            against = f"the kernels of {stateful} layers cannot be captured with rows of other lengths"
        self._obstacle = against
        if against is None and settings.cuda_graphs != "off":
            # Also where graphs may be chosen later.
            use_capture_stream(device)
        self._choose()
        refuse(settings, None if self.choice.uses_graphs else self.choice.reason)

    def _choose(self, *, recomputes: bool = False) -> None:
        """Decide for what the micro-batch is chosen (see `reason_before`)."""
        reason = reason_before(
            self.settings, self._obstacle, self.data.train, self.data.plan, self._launched, recomputes=recomputes
        )
        self.choice = StepChoice(reason is None, reason or "")

    def chosen_after_all(self, kind: str | None) -> bool:
        """Return whether micro-batches that do not fit without CUDA graphs, unless layers are recomputed, are replayed after all.

        Args:
            kind: of gradient checkpointing that was chosen; None if none fits.
        """
        if self.choice.uses_graphs or self._obstacle is not None or self.settings.cuda_graphs == "off":
            return False
        if kind is None:
            # Replayed ones need less memory.
            self.choice = StepChoice(True, "")
        elif kind != "none" and self.settings.gradient_checkpointing == "auto":
            self._choose(recomputes=True)
        self._after_all = self.choice.uses_graphs
        return self._after_all

    def resume(self, before: dict[str, Any]) -> None:
        """Choose as the run that this one resumes did on such a GPU, unless something is against it."""
        if before.get("device") != self.runtime.device_name or self.settings.cuda_graphs != "auto" or self._obstacle:
            return
        if before.get("cuda_graphs") == "on":
            self.choice, self._after_all = StepChoice(True, ""), True
        elif before.get("cuda_graphs") == "off":
            self._obstacle = "the run that this one resumes did not use them"
            self._choose()

    @property
    def peak_bytes(self) -> int:
        """Return the peak memory in bytes of a replayed micro-batch; 0 if none is replayed."""
        return self.captured.peak_bytes if self.captured else 0

    def tries_passes(self) -> bool:
        """Return whether memory is tried with passes as they would be captured, since compiling them is not in vain."""
        return self.choice.uses_graphs and (self.settings.method != "full" or self.settings.cuda_graphs == "on")

    def trial_pass(
        self, runner: MicroBatchRunner, gradients: GradientBuffers | None, kind: str, size: int
    ) -> Callable[[dict[str, Any]], None] | None:
        """Return what computes a micro-batch of `size` packs, collated from now on, as it would be captured; None if it cannot.

        Args:
            gradients: see `prepare`.
            kind: of gradient checkpointing.
        """
        self.collate.pad_to_shape(None)
        if kind_obstacle(kind, random=has_lora_dropout(self.settings)) is not None:
            self._tried = None
            return None
        shape = shape_of_run(self.settings, self.data.train, with_micro_batch(self.data.plan, size))
        try:
            step = self._step_of(runner, size, shape, gradients, kind, flash_attention_4=self._faster)
        except NotImplementedError:
            return None
        self.collate.pad_to_shape(shape)
        drop_compiled_code(runner.model)

        def try_pass(batch: dict[str, Any]) -> None:
            try:
                step.try_pass(batch)
                return
            except Exception as error:
                if isinstance(error, RuntimeError) and is_out_of_memory(error):
                    raise
                logger.warning("the pass that would be captured failed", exc_info=True)
            # Outside the except block, because the exception keeps the activations alive. `prepare` finds out why it failed.
            for parameter in step.trained:
                parameter.grad = None
            runner.loss_sum(batch).backward()

        return try_pass

    def _step_of(
        self,
        runner: MicroBatchRunner,
        size: int,
        shape: FixedShape,
        gradients: GradientBuffers | None,
        kind: str,
        *,
        flash_attention_4: bool,
    ) -> CapturedStep:
        """Return the step with a kernel, that of the last trial if it is for as many packs: its layers are compiled.

        Raises:
            NotImplementedError: the model cannot be captured.
        """
        key, recompute = (size, flash_attention_4), kind == "torch"
        if self._tried is not None and self._tried[0] == key:
            self._tried[1].recompute_layers(recompute)
            return self._tried[1]
        # Its gradients may be as large as the model.
        self._tried = None
        forward = PackedForward(runner.model, shape, recompute=recompute, flash_attention_4=flash_attention_4)
        step = CapturedStep(runner.model, forward, runner.autocast, torch.bfloat16, self.device, gradients)
        self._tried = (key, step)
        return step

    def prepare(
        self,
        runner: MicroBatchRunner,
        decision: MicroBatchDecision,
        plan: BatchPlan,
        gradients: GradientBuffers | None = None,
    ) -> None:
        """Make the final decision, when the micro-batch is known; every rank calls this.

        Args:
            runner: computes a micro-batch as the backend does.
            plan: the batch plan with the chosen micro-batch.
            gradients: buffers of the gradients that are exchanged, if any.

        Raises:
            UserError: --cuda_graphs is on, but a CUDA graph cannot be used.
        """
        if not self.choice.uses_graphs:
            runtime, against = self.runtime, self.choice.reason
            if may_compile_layers(
                self.settings,
                self.data.train,
                plan,
                against,
                precision=runtime.precision,
                sharding=runtime.sharding,
                kinds=kinds_of_layers(runner.model),
            ):
                self._compile_layers(runner, decision)
            return
        shape = shape_of_run(self.settings, self.data.train, plan)
        reason = reason_after(
            self.settings, self.data.train, plan, shape, decision.kind, self._launched, after_all=self._after_all
        )
        if reason is None:
            captured, reason = self._try_kernels(runner, decision, shape, gradients)
            reason = next((one for one in self.runtime.gather(reason) if one is not None), None)
            if captured is not None and reason is None:
                captured.in_trial = False
                self.captured = captured
        self.rejected = reason is not None and self.tries_passes()
        self._obstacle = reason
        self._tried = None
        if self.captured is None and gradients is not None:
            gradients.free()
        refuse(self.settings, reason)
        by_it = self.captured is not None and self.captured.forward.flash_attention_4
        same = "a trial gave the same loss and gradients" + ", with FlashAttention 4" * by_it
        self.choice = StepChoice(reason is None, reason or same)
        self.collate.pad_to_shape(self.captured.shape if self.captured else None)

    def _compile_layers(self, runner: MicroBatchRunner, decision: MicroBatchDecision) -> None:
        """Compile the layers in place of capturing them, if that gives the same results on every rank."""
        reason = compile_layers(runner, self._first_batch(runner, decision.per_device))
        reason = next((one for one in self.runtime.gather(reason) if one is not None), None)
        if reason is not None:
            leave_uncompiled(runner.model)
        done = "the layers are compiled instead" if reason is None else f"nor are the layers compiled: {reason}"
        self.choice = StepChoice(False, f"{self.choice.reason}; {done}")

    def _first_batch(self, runner: MicroBatchRunner, packs: int) -> dict[str, Any]:
        train = self.data.train
        return runner.batch_of([train.examples[index] for index in range(min(packs, train.units))])

    def _try_kernels(
        self,
        runner: MicroBatchRunner,
        decision: MicroBatchDecision,
        shape: FixedShape,
        gradients: GradientBuffers | None,
    ) -> tuple[CapturedStep | None, str | None]:
        """Return the captured step, with FlashAttention 4 where it gives the same results, or why there is none."""
        if self._faster:
            captured, reason = self._try(runner, decision, shape, gradients, flash_attention_4=True)
            if reason is None:
                return captured, None
            logger.warning("FlashAttention 4 is installed and not used: %s", reason)
            del captured
            self._tried = None
            release()
        return self._try(runner, decision, shape, gradients)

    def _try(
        self,
        runner: MicroBatchRunner,
        decision: MicroBatchDecision,
        shape: FixedShape,
        gradients: GradientBuffers | None,
        *,
        flash_attention_4: bool = False,
    ) -> tuple[CapturedStep | None, str | None]:
        train, model = self.data.train, runner.model
        try:
            captured = self._step_of(
                runner, decision.per_device, shape, gradients, decision.kind, flash_attention_4=flash_attention_4
            )
        except NotImplementedError as error:
            return None, str(error)
        self.collate.pad_to_shape(shape)
        batch = self._first_batch(runner, decision.per_device)
        allowed = FP8_TOLERANCES if self.settings.fp8 else TOLERANCES
        with training_mode(model):
            self._random, reason = draws_random_numbers(captured, batch)
            reason = reason or kind_obstacle(decision.kind, random=self._random)
            if reason is not None:
                return None, reason
            with without_dropout(model) as dropped:
                reason = check_capture(captured, batch, runner.loss_sum, allowed)
                if reason == OUT_OF_MEMORY and decision.per_device > 1:
                    # The backend's pass, which the captured one is compared with, may need more memory.
                    release()
                    batch = self._first_batch(runner, 1)
                    reason = check_capture(captured, batch, runner.loss_sum, allowed)
            if dropped:
                captured.forget()
            if reason is None and not train.streamed:
                shortest = int(np.argmin(train.lengths()[:-1]))
                reason = capture_sizes(captured, train.examples[shortest])
        return captured, reason

    def release(self) -> bool:
        """Free the memory of the captured graphs, which the next step captures again; return whether there were any."""
        if self.captured is None or not self.captured.graphs:
            return False
        self.captured.forget()
        release()
        return True

    def run(self, batch: dict[str, Any], divisor: Tensor) -> tuple[Tensor, StepTensors] | None:
        """Return the loss and the parts of a micro-batch (see CapturedStep.run); None if the backend has to compute it."""
        # A micro-batch larger than the shape was not padded to it.
        if self.captured is None or "padded_batch" not in batch:
            return None
        try:
            return self.captured.run(batch, divisor)
        except CaptureFailed as failed:
            logger.warning("the step is not captured: %s", failed, exc_info=True)
            self._stop(str(failed))
            return None

    def use(self, kind: str) -> None:
        """Switch to a kind of gradient checkpointing: capture again with it, or stop replaying if it cannot be captured.

        This frees the memory of earlier graphs, which a step that ran out of memory needs.
        """
        if self.captured is None:
            return
        self.captured.recompute_layers(kind == "torch")
        reason = kind_obstacle(kind, random=self._random)
        if reason is not None:
            self._stop(reason)

    def _stop(self, reason: str) -> None:
        self.captured = None
        self.collate.pad_to_shape(None)
        location = self.runtime.locations[self.runtime.ranks.rank]
        # Each rank decides alone, and only the main process has standard output.
        print(f"Micro-batches are no longer replayed on {location}: {reason}", file=sys.stderr, flush=True)
