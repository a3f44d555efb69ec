"""Try on the GPUs which rungs of the ladder fit.

A trial is one forward and backward pass over a micro-batch that is the worst of the run in every respect, computed as a
step will be. All ranks try the same rungs, and a rung has to fit on every rank. A trial leaves gradients, random
numbers and memory as they were; the optimizer does not exist yet. Code that the backend compiled in trials is dropped,
and that of passes that will be captured is kept.
"""

import functools
import gc
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.split import split_examples
from unsloth_ddp.data.order.worst_rows import worst_micro_batch
from unsloth_ddp.data.training_data import TrainingData
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.distributed.wire import sendable
from unsloth_ddp.model.adapter.experts import full_shape
from unsloth_ddp.model.forward.compile_options import uncompiled_layers
from unsloth_ddp.model.forward.gradient_checkpointing import GradientCheckpointing
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.model.modules import embedding_ids, kept_random_numbers, training_mode
from unsloth_ddp.sizing.ladder import Rung, choose
from unsloth_ddp.sizing.micro_batch import largest_tokens
from unsloth_ddp.sizing.optimizer_states import optimizer_bytes
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.known_errors import is_out_of_memory
from unsloth_ddp.utils.memory_limits import HEADROOM

# Adds the gradients of a batch (see CaptureTrial.trial_pass).
CapturedPass = Callable[[dict[str, Any]], None]


@sendable
@dataclass(frozen=True)
class Trial:
    """Outcome of one trial on one rank, in bytes; `needed` is None where it ran out of memory.

    Args:
        room: that this process may use.
        others: that other processes hold on the GPU.
    """

    needed: int | None
    room: int
    others: int = 0
    headroom: ClassVar[float] = HEADROOM

    @property
    def fits(self) -> bool:
        """Return whether the headroom was left free."""
        return self.needed is not None and self.needed <= (1 - self.headroom) * self.room

    @property
    def share(self) -> float:
        """Return the needed fraction of the room, infinity where memory ran out."""
        return math.inf if self.needed is None else self.needed / self.room


@dataclass
class MemoryTrials:
    """Try which rungs fit, the same on every rank.

    Args:
        checkpointing: of the model; `use` switches its kind between trials.
        runner: computes a micro-batch as a step does.
        bytes_later: bytes that the optimizer and DistributedDataParallel will allocate on this rank.
        captured_pass: rung -> what computes the gradients of a micro-batch as it would be captured; None if the model
            cannot be called so, and then the backend's pass is tried.
    """

    settings: Settings
    runtime: Runtime
    data: TrainingData
    checkpointing: GradientCheckpointing
    runner: MicroBatchRunner
    bytes_later: int
    captured_pass: Callable[[Rung], CapturedPass | None]
    trials: dict[Rung, list[Trial]] = field(default_factory=dict)

    def fits(self, rung: Rung) -> bool:
        """Return whether a rung leaves the headroom free on every rank."""
        self.checkpointing.use(rung.kind)
        self.trials[rung] = self.runtime.gather(self.try_rung(rung))
        return all(trial.fits for trial in self.trials[rung])

    def choose(self, rungs: Sequence[Rung]) -> tuple[Rung, str]:
        """Return the first rung that fits, and the memory that it takes in words.

        If nothing leaves the headroom free, it is the last rung, if that fits at all.

        Raises:
            UserError: the last rung does not fit.
        """
        ignore_dropped_compilation()
        fitting = choose(rungs, self.fits, self._tokens)
        rung = fitting or rungs[-1]
        if rung not in self.trials:
            self.fits(rung)
        forget_free_memory()
        return rung, self._describe(rung, fits=fitting is not None)

    def _tokens(self, size: int) -> int:
        return largest_tokens(self.data.train, size, self.settings.longest_example)

    def _describe(self, rung: Rung, *, fits: bool) -> str:
        worst = max(self.trials[rung], key=lambda trial: trial.share)
        longest = self._tokens(1)
        if worst.needed is None:
            raise UserError(self._too_large(rung, longest, worst))
        used = f"{rung.rows} x {longest:,} tokens need {shown_gib(worst.needed)} of {shown_gib(worst.room)} GiB"
        return used if fits else f"{used}, with little room to spare"

    def _too_large(self, rung: Rung, longest: int, trial: Trial) -> str:
        smaller = "--per_device_train_batch_size or " if rung.rows > 1 else ""
        automatic = "" if self.settings.gradient_checkpointing == "auto" else "leave --gradient_checkpointing at auto, "
        others = f" (other processes hold {shown_gib(trial.others)} GiB)" if trial.others > 2**29 else ""
        return (
            f"A micro-batch of the longest rows ({rung.rows} x {longest:,} tokens) does not fit into the "
            f"{trial.room / 2**30:.0f} GiB that are free on a GPU{others}, with gradient checkpointing {rung.kind}; "
            f"{automatic}lower {smaller}--max_length, use --method qlora, or shard the model with "
            "accelerate_configs/fsdp2.yaml."
        )

    def try_rung(self, rung: Rung) -> Trial:
        """Try one forward and backward pass over the worst micro-batch of a rung, as in a training step."""
        rows = worst_micro_batch(self.data.train, rung.rows, self.settings.max_length)
        if rung.passes > 1:
            rows = split_examples(rows, rung.passes)[0]
        captured = self.captured_pass(rung) if rung.captured else None
        if captured is None:
            return self._try(rows, self._passes)
        # The head of another micro-batch may compute all tokens.
        rows = [row | {"labels": row["input_ids"]} for row in rows]
        return self._try(rows, functools.partial(self._passes, captured=captured))

    def _try(self, rows: list[dict[str, np.ndarray]], passes: Callable[[dict[str, Any]], bool]) -> Trial:
        device = self.runner.device
        batch = self.runner.batch_of(rows)
        release()
        forget_free_memory()
        room, others = room_on(device), held_by_others(device)
        torch.cuda.reset_peak_memory_stats(device)
        fitted = passes(batch)
        if not fitted:
            self.checkpointing.forget_failed_pass()
        # What the allocator holds is what a later step finds in pieces; tensors take less.
        peak = torch.cuda.max_memory_reserved(device)
        release()
        return Trial(int(peak + self.bytes_later) if fitted else None, room, others)

    def _passes(self, batch: dict[str, Any], captured: CapturedPass | None = None) -> bool:
        """Return whether memory was enough for a step; random numbers and gradients are left as they were."""
        trained = [p for p in self.runner.model.parameters() if p.requires_grad]
        with training_mode(self.runner.model), kept_random_numbers(self.runner.device), uncompiled_layers():
            try:
                if captured is not None:
                    captured(batch)
                else:
                    # In a step the gradients of earlier micro-batches are allocated too.
                    for parameter in trained:
                        parameter.grad = torch.zeros_like(parameter)
                    self.runner.loss_sum(batch).backward()
                torch.cuda.synchronize(self.runner.device)
                return True
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                return False
            finally:
                for parameter in trained:
                    parameter.grad = None


def bytes_added_by_steps(model: torch.nn.Module, optimizer: str, *, ddp_sends: bool) -> int:
    """Return the bytes that training adds to the model and its gradients on one rank.

    Args:
        optimizer: its Transformers name.
        ddp_sends: whether DistributedDataParallel averages gradients, which copies them into buckets; in
            GradientExchange the gradients are views of the buckets.
    """
    embeddings = embedding_ids(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    states = sum(p.numel() * optimizer_bytes(optimizer, p.element_size(), id(p) in embeddings) for p in trained)
    return int(states) + (trained_bytes(model) if ddp_sends else 0)


def trained_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of the trained weights, and so of their gradients."""
    return sum(math.prod(full_shape(p)) * p.element_size() for p in model.parameters() if p.requires_grad)


def room_on(device: torch.device) -> int:
    """Return the bytes of a GPU that this process may use, including those that it already uses."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free + torch.cuda.memory_reserved(device), allowed)


def held_by_others(device: torch.device) -> int:
    """Return the bytes of a GPU that other processes hold, and this one outside of torch's allocator (its context)."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))


def shown_gib(value: float) -> str:
    """Return bytes in GiB, with one decimal."""
    return f"{value / 2**30:.1f}"


def ignore_dropped_compilation() -> None:
    """Silence Unsloth's warning, when training begins, that it drops the code compiled in a trial."""
    warnings.filterwarnings("ignore", message="Unsloth: detected a manual forward")


def release() -> None:
    """Return unused cached memory to the device."""
    gc.collect()
    torch.cuda.empty_cache()


def forget_free_memory() -> None:
    """Let Unsloth's fused loss measure free memory again; it would chunk all later logits by its first measurement."""
    loss = sys.modules.get("unsloth_zoo.fused_losses.cross_entropy_loss")
    forget = getattr(getattr(loss, "_get_chunk_multiplier", None), "cache_clear", None)
    if forget is not None:
        forget()
