"""Choose gradient checkpointing and the rows (packs) in a micro-batch by trying what fits on the GPUs.

A trial is one forward and backward pass over the largest micro-batch that the run can have, computed as a step will be; at
the end a forward pass over the longest evaluation rows is tried too. All ranks try the same sizes, and a size has to fit on
every rank. A trial leaves gradients, random numbers and memory as they were; the optimizer does not exist yet. Code that the
backend compiled in trials is dropped, and that of passes that will be captured is kept.
"""

import functools
import gc
import logging
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.arrow_rows import join_rows
from unsloth_ddp.data.dataset import TokenizedRows
from unsloth_ddp.data.training_data import TrainingData
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.distributed.wire import sendable
from unsloth_ddp.model.adapter.experts import full_shape
from unsloth_ddp.model.forward.compile_options import uncompiled_layers
from unsloth_ddp.model.forward.gradient_checkpointing import GradientCheckpointing
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.model.modules import embedding_ids, evaluation_mode, kept_random_numbers, training_mode
from unsloth_ddp.sizing.micro_batch import (
    ENOUGH_TOKENS,
    ENOUGH_WITH_GRAPHS,
    MicroBatchDecision,
    largest_tokens,
    search,
    sizes_of,
    sizes_to_replay,
)
from unsloth_ddp.sizing.optimizer_states import optimizer_bytes
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.known_errors import is_out_of_memory
from unsloth_ddp.utils.memory_limits import HEADROOM

logger = logging.getLogger("unsloth_ddp")

# Adds the gradients of a batch (see CudaGraphs.trial_pass).
CapturedPass = Callable[[dict[str, Any]], None]


@sendable
@dataclass(frozen=True)
class Trial:
    """Outcome of one trial on one rank, in bytes; `needed` is None where it ran out of memory."""

    needed: int | None
    room: int
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
class MemorySearch:
    """Choose gradient checkpointing and micro-batch of a run, the same on every rank.

    Args:
        checkpointing: of the model; `use` switches its kind between trials.
        runner: computes a micro-batch as a step does.
        bytes_later: bytes that the optimizer and DistributedDataParallel will allocate on this rank.
        bytes_kept: bytes of gradients that stay allocated between steps, and so during an evaluation; a training trial
            allocates its own gradients.
        uses_graphs: whether micro-batches will be replayed as CUDA graphs, so that small ones are as fast as large ones.
        captured_pass: (kind, rows) -> what computes the gradients of a micro-batch as it would be captured, None where the
            backend computes it; None if trials are the backend's.
    """

    settings: Settings
    runtime: Runtime
    data: TrainingData
    checkpointing: GradientCheckpointing
    runner: MicroBatchRunner
    bytes_later: int
    bytes_kept: int = 0
    uses_graphs: bool = False
    captured_pass: Callable[[str, int], CapturedPass | None] | None = None

    def choose(self, before: dict[str, Any]) -> MicroBatchDecision:
        """Return the decision; the caller applies it.

        Args:
            before: identity of the run that this one resumes, if any. On the same number and type of GPUs its choice is
                tried first, so that results stay bit-identical.

        Raises:
            UserError: the smallest micro-batch does not fit with any kind, or the evaluation rows do not.
        """
        plan = self.data.plan
        allowed = (
            sizes_to_replay(self.settings, self.data.train, plan) if self.uses_graphs else sizes_of(self.settings, plan)
        )

        def candidates() -> tuple[list[str], list[int]]:
            kinds, sizes = list(self.checkpointing.kinds), allowed
            if (before.get("world_size"), before.get("device")) == (plan.processes, self.runtime.device_name):
                if before.get("gradient_checkpointing") in kinds:
                    kinds = kinds[kinds.index(before["gradient_checkpointing"]) :]
                if before.get("per_device_train_batch_size") in sizes:
                    sizes = [size for size in sizes if size <= before["per_device_train_batch_size"]]
            return kinds, sizes

        # The ranks have to try the same candidates, but may have different GPUs.
        kinds, sizes = self.runtime.broadcast_from_main(candidates)
        if self.settings.gradient_checkpointing != "auto" and len(allowed) == 1:
            return MicroBatchDecision(kinds[0], sizes[0], "as set")
        if self.runtime.device_type == "cpu":
            return MicroBatchDecision(kinds[0], sizes[0], "the default on a CPU")
        return self._choose(kinds, sizes, before)

    def _tokens(self, size: int) -> int:
        return largest_tokens(self.data.train, size, self.settings.longest_example)

    def _largest(self, size: int) -> list[dict[str, np.ndarray]]:
        return largest(self.data.train, size, self.settings.max_length)

    def _choose(self, kinds: Sequence[str], sizes: Sequence[int], before: dict[str, Any]) -> MicroBatchDecision:
        """Return the first kind and the most rows that fit in a trial."""
        trials: dict[tuple[str, int], list[Trial]] = {}

        def fits(kind: str, size: int) -> bool:
            self.checkpointing.use(kind)
            trials[kind, size] = self.runtime.gather(self.try_training(size))
            return all(trial.fits for trial in trials[kind, size])

        ignore_dropped_compilation()
        enough = ENOUGH_WITH_GRAPHS if self.uses_graphs else ENOUGH_TOKENS
        found = search(kinds, sizes, self._tokens, fits, enough)
        forget_free_memory()
        # If nothing leaves the headroom free, use the smallest candidate if it fits at all.
        kind, size = found or (kinds[-1], sizes[0])
        worst = max(trials[kind, size], key=lambda one: one.share)
        longest = self._tokens(1)
        if worst.needed is None and self.captured_pass is not None:
            # It may be the compiler that ran out, or the backend's pass may need less.
            self.captured_pass = None
            return self._choose(kinds, sizes, before)
        if worst.needed is None:
            raise UserError(self._too_large(kind, size, longest, worst))
        self._check_evaluation()
        used = f"{size} x {longest:,} tokens need {worst.needed / 2**30:.1f} of {worst.room / 2**30:.1f} GiB"
        return MicroBatchDecision(kind, size, used if found else f"{used}, with little room to spare")

    def _too_large(self, kind: str, size: int, longest: int, trial: Trial) -> str:
        smaller = "--per_device_train_batch_size or " if size > 1 else ""
        kept = "" if self.settings.gradient_checkpointing == "auto" else "leave --gradient_checkpointing at auto, "
        return (
            f"A micro-batch of the longest rows ({size} x {longest:,} tokens) does not fit into the "
            f"{trial.room / 2**30:.0f} GiB that are free on a GPU, with gradient checkpointing {kind}; {kept}lower {smaller}"
            "--max_length, use --method qlora, or shard the model with accelerate_configs/fsdp2.yaml."
        )

    def _check_evaluation(self) -> None:
        """Refuse evaluation rows that do not fit; many rows of full length can need more memory than a training step."""
        rows = self.data.evaluation
        if rows is None:
            return
        trials = self.runtime.gather(self.try_evaluation(rows))
        forget_free_memory()
        short = [one for one in trials if one.needed is None or one.needed > one.room]
        if short:
            size = min(self.settings.per_device_eval_batch_size, rows.units)
            longest = int(rows.lengths()[:-1].max())
            raise UserError(
                f"An evaluation of the longest rows ({size} x {longest:,} tokens) does not fit into the "
                f"{min(one.room for one in short) / 2**30:.0f} GiB that are free on a GPU; lower "
                "--per_device_eval_batch_size."
            )

    def try_training(self, size: int) -> Trial:
        """Try one forward and backward pass over the largest micro-batch of `size` rows, as in a training step."""
        largest = self._largest(size)
        captured = self.captured_pass(self.checkpointing.kind, size) if self.captured_pass else None
        if captured is None:
            return self._try(largest, self._passes, self.bytes_later)
        # The head of another micro-batch may compute all tokens.
        largest = [one | {"labels": one["input_ids"]} for one in largest]
        return self._try(largest, functools.partial(self._passes, captured=captured), self.bytes_later)

    def try_evaluation(self, rows: TokenizedRows) -> Trial:
        """Try one forward pass over the longest evaluation rows, as many as an evaluation takes at once."""
        size = self.settings.per_device_eval_batch_size
        beside = self.bytes_later + self.bytes_kept
        return self._try(largest(rows, size, self.settings.max_length), self._evaluates, beside)

    def _try(self, rows: list[dict[str, np.ndarray]], passes: Callable[[dict[str, Any]], bool], beside: int) -> Trial:
        device = self.runner.device
        batch = self.runner.batch_of(rows)
        release()
        forget_free_memory()
        room = room_on(device)
        torch.cuda.reset_peak_memory_stats(device)
        fitted = passes(batch)
        peak = torch.cuda.max_memory_allocated(device)
        release()
        return Trial(int(peak + beside) if fitted else None, room)

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

    def _evaluates(self, batch: dict[str, Any]) -> bool:
        """Return whether memory was enough for a forward pass of an evaluation."""
        try:
            with evaluation_mode(self.runner.model), torch.no_grad(), uncompiled_layers():
                self.runner.loss_sum(batch)
            torch.cuda.synchronize(self.runner.device)
            return True
        except RuntimeError as error:
            if not is_out_of_memory(error):
                # The evaluation itself will raise the same error, with its context.
                logger.warning("the memory trial of the evaluation rows failed: %s", error)
            return not is_out_of_memory(error)


def largest(rows: TokenizedRows, size: int, max_length: int) -> list[dict[str, np.ndarray]]:
    """Return the `size` longest rows (packs); of streamed rows, which are not known yet, as many of `max_length`.

    Of rows with images, these are the longest one, to which all others are padded, and those with the most pixels; of packs,
    those with the most tokens and pixels.
    """
    lengths, examples = rows.lengths()[:-1], rows.examples
    longest = np.argsort(-lengths, kind="stable")
    work = rows.work_of_images()
    if work is not None and rows.packing is not None:
        longest = np.argsort(-lengths - work[:-1], kind="stable")
    elif work is not None:
        first = longest[0] if size > 1 else np.argmax(lengths + work[:-1])
        by_work = np.argsort(-work[:-1], kind="stable")
        longest = np.array([first, *by_work[by_work != first]])
    longest = longest[:size]
    if not rows.streamed:
        return [examples[int(index)] for index in longest]
    first = rows.rows[0] if rows.packing and work is None else examples[int(longest[0])]
    if work is not None:
        more = max(0, max_length - len(first["input_ids"]))
        longer = first | {name: np.pad(first[name], (0, more), "edge") for name in ("input_ids", "labels")}
        if rows.packing is not None:
            longer["lengths"] = np.append(first["lengths"][:-1], first["lengths"][-1] + more)
        return [longer] * size
    parts = {"parts": np.full_like(first["parts"], max_length)} if "parts" in first else {}
    tokens = max_length * (len(first["parts"]) if parts else 1)
    row = {**first, **{name: np.resize(first[name], tokens) for name in ("input_ids", "labels")}, **parts}
    return [row if rows.packing is None else join_rows([row])] * size


def bytes_added_by_steps(model: torch.nn.Module, optimizer: str, *, ddp_sends: bool) -> int:
    """Return the bytes that training adds to the model and its gradients on one rank.

    Args:
        optimizer: its Transformers name.
        ddp_sends: whether DistributedDataParallel averages gradients, which copies them into buckets; in GradientExchange
            the gradients are views of the buckets.
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
