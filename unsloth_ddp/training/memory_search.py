"""What fits on the GPUs, found out by trying: whether activations are recomputed, and how many rows go at once.

A try is one forward and backward pass over the largest micro-batch that the run can have; at the end a forward pass over
the longest evaluation rows is tried too. All ranks try the same, and what does not fit on one of them is not taken.
Nothing of a try is left behind: gradients, random numbers and memory are as before, the optimizer is not there yet, and
Unsloth drops what it compiled when training begins.
"""

from __future__ import annotations

import gc
import logging
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unsloth_ddp.config.parse import Settings
from unsloth_ddp.data.batch_plan import BatchPlan
from unsloth_ddp.data.dataset import TokenizedRows, join_rows
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.distributed.wire import sendable
from unsloth_ddp.training.optimizer_memory import optimizer_bytes
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.known_errors import is_out_of_memory

logger = logging.getLogger("unsloth_ddp")

# Left free on every GPU: NCCL's buffers, fragmentation.
HEADROOM = 0.08
# With so many tokens at once a GPU is busy, and recomputing to get more of them costs more than it brings.
ENOUGH_TOKENS = 8192


@dataclass(frozen=True)
class Chosen:
    """The kind of gradient checkpointing, rows (packs) in a micro-batch, and why."""

    kind: str
    per_device: int
    reason: str


@sendable
@dataclass(frozen=True)
class Try:
    """What one try came to on one rank, in bytes; `needed` None where it ran out of memory."""

    needed: int | None
    room: int

    @property
    def fits(self) -> bool:
        """Whether enough is left free."""
        return self.needed is not None and self.needed <= (1 - HEADROOM) * self.room


def divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def search(
    kinds: Sequence[str], sizes: Sequence[int], tokens: Callable[[int], int], fits: Callable[[str, int], bool]
) -> tuple[str, int] | None:
    """The first kind with which enough tokens fit at once, and the most rows that do; None where nothing fits.

    Args:
        kinds: cheapest first.
        sizes: rows that a micro-batch may have, ascending.
        tokens: of the largest micro-batch of so many rows.
        fits: whether a kind and a size do; what fits with more rows is taken to fit with fewer.
    """
    best: tuple[str, int] | None = None
    for kind in kinds:
        below, above = 0, len(sizes)
        while below < above:
            middle = (below + above) // 2
            if fits(kind, sizes[middle]):
                below = middle + 1
            else:
                above = middle
        if not below:
            continue
        size = sizes[below - 1]
        if size == sizes[-1] or tokens(size) >= ENOUGH_TOKENS:
            return kind, size
        if best is None or tokens(size) > tokens(best[1]):
            best = kind, size
    return best


def sizes_of(settings: Settings, plan: BatchPlan) -> list[int]:
    """The micro-batches that may be chosen from: all that leave the global batch what it is, or the one given."""
    if settings.per_device_train_batch_size == "auto" and settings.gradient_accumulation_steps is None:
        return divisors(plan.per_device * plan.accumulation)
    return [plan.per_device]


def with_micro_batch(plan: BatchPlan, per_device: int) -> BatchPlan:
    """The plan of the same global batch with another micro-batch."""
    return BatchPlan(per_device, plan.per_device * plan.accumulation // per_device, plan.processes)


def choose(trainer: Any, before: dict[str, Any]) -> Chosen:
    """How a run goes about its micro-batches, the same on every rank (see recompute.kinds_here).

    Args:
        before: the facts of the checkpoint that the run goes on from, if any: on as many GPUs of the same kind what was
            chosen then is tried first, so that numbers stay the same to the bit.

    Raises:
        UserError: the smallest micro-batch does not fit with any kind.
    """
    settings, runtime, plan = trainer.settings, trainer.runtime, trainer.plan

    def choices() -> tuple[tuple[str, ...], list[int]]:
        kinds, sizes = trainer.recompute.kinds, sizes_of(settings, plan)
        if (before.get("world_size"), before.get("device")) == (plan.processes, runtime.device_name):
            if before.get("gradient_checkpointing") in kinds:
                kinds = kinds[kinds.index(before["gradient_checkpointing"]) :]
            if before.get("per_device_train_batch_size") in sizes:
                sizes = [size for size in sizes if size <= before["per_device_train_batch_size"]]
        return kinds, sizes

    # Ranks may have GPUs of different kinds, and have to try the same.
    kinds, sizes = runtime.broadcast_from_main(choices)
    if settings.gradient_checkpointing != "auto" and len(sizes_of(settings, plan)) == 1:
        return Chosen(kinds[0], sizes[0], "as asked")
    if runtime.device_type == "cpu":
        return Chosen(kinds[0], sizes[0], "a CPU's memory is not tried")
    if runtime.sharding != "none":
        # A rank that ran out of memory would leave the others waiting in the middle of a step.
        return Chosen(kinds[0], sizes[0], f"nothing is tried with sharding {runtime.sharding}")
    return _choose_by_trying(trainer, kinds, sizes)


def _choose_by_trying(trainer: Any, kinds: Sequence[str], sizes: Sequence[int]) -> Chosen:
    runtime: Runtime = trainer.runtime
    tries: dict[tuple[str, int], list[Try]] = {}

    def fits(kind: str, size: int) -> bool:
        trainer.recompute.use(kind)
        tries[kind, size] = runtime.gather(attempt(trainer, size))
        return all(one.fits for one in tries[kind, size])

    # Unsloth says, when training begins, that it drops what a try compiled.
    warnings.filterwarnings("ignore", message="Unsloth: detected a manual forward")
    found = search(kinds, sizes, lambda size: largest_tokens(trainer, size), fits)
    forget_free_memory()
    # Without room to spare is better than not at all.
    kind, size = found or (kinds[-1], sizes[0])
    worst = max(tries[kind, size], key=lambda one: float("inf") if one.needed is None else one.needed / one.room)
    what = f"{size} x {largest_tokens(trainer, 1):,} tokens"
    if worst.needed is None:
        smaller = "--per_device_train_batch_size or " if size > 1 else ""
        kept = "" if trainer.settings.gradient_checkpointing == "auto" else "leave --gradient_checkpointing at auto, "
        raise UserError(
            f"A micro-batch of the longest rows ({what}) does not fit into the {worst.room / 2**30:.0f} GiB that are free "
            f"on a GPU, with gradient checkpointing {kind}; {kept}lower {smaller}--max_length, take --method qlora, or share "
            "the model out with accelerate_configs/fsdp2.yaml."
        )
    _check_evaluation(trainer)
    reason = f"a step with {what} at once takes {worst.needed / 2**30:.1f} of {worst.room / 2**30:.1f} GiB"
    return Chosen(kind, size, reason if found else f"{reason}, which is tight")


def _check_evaluation(trainer: Any) -> None:
    """Refuse evaluation rows that do not fit: of full length and many at once they can take more than a step."""
    if trainer.eval_rows is None:
        return
    tries = trainer.runtime.gather(attempt_evaluation(trainer))
    forget_free_memory()
    short = [one for one in tries if one.needed is None or one.needed > one.room]
    if short:
        size = min(trainer.settings.per_device_eval_batch_size, trainer.eval_rows.units)
        longest = int(trainer.eval_rows.lengths()[:-1].max())
        raise UserError(
            f"An evaluation of the longest rows ({size} x {longest:,} tokens) does not fit into the "
            f"{min(one.room for one in short) / 2**30:.0f} GiB that are free on a GPU; lower --per_device_eval_batch_size."
        )


def largest_tokens(trainer: Any, size: int) -> int:
    """Tokens of the largest micro-batch of `size` rows (packs) that any order of the data can give, padding included."""
    if trainer.train_rows.streamed:
        return size * trainer.settings.max_length
    lengths = np.sort(trainer.train_rows.lengths()[:-1])[::-1][:size]
    return int(lengths.sum() if trainer.train_rows.packing is not None else len(lengths) * lengths[0])


def largest(rows: TokenizedRows, size: int, max_length: int) -> list[dict[str, np.ndarray]]:
    """The `size` longest rows (packs); of streamed rows, which are not known yet, as many of `max_length`."""
    longest, examples = np.argsort(-rows.lengths()[:-1], kind="stable")[:size], rows.examples
    if not rows.streamed:
        return [examples[int(index)] for index in longest]
    row = {name: np.resize(examples[int(longest[0])][name], max_length) for name in ("input_ids", "labels")}
    return [row if rows.packing is None else join_rows([row["input_ids"]], [row["labels"]])] * size


def attempt(trainer: Any, size: int) -> Try:
    """One forward and backward pass over the largest micro-batch of `size` rows, as it will be in a step.

    The gradients of earlier micro-batches are there before; counted are what the optimizer will keep and, with several
    processes, the buckets from which gradients are sent (DDP has its own even where it does not send them).
    """
    return _try(trainer, largest(trainer.train_rows, size, trainer.settings.max_length), _passes)


def attempt_evaluation(trainer: Any) -> Try:
    """One forward pass over the longest evaluation rows, as many as go at once, counted as in `attempt`."""
    rows = largest(trainer.eval_rows, trainer.settings.per_device_eval_batch_size, trainer.settings.max_length)
    return _try(trainer, rows, _evaluates)


def _try(trainer: Any, rows: list[dict[str, np.ndarray]], passes: Callable[[Any, dict[str, Any]], bool]) -> Try:
    device = trainer.args.device
    batch = trainer.data_collator(rows)
    batch = {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}
    trained_bytes = sum(p.numel() * p.element_size() for p in trainer.model.parameters() if p.requires_grad)
    later = optimizer_states(trainer.model, trainer.settings.optim)
    if trainer.args.world_size > 1:
        later += trained_bytes if trainer.exchange is None else 2 * trained_bytes
    _release()
    forget_free_memory()
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    room = min(free + torch.cuda.memory_reserved(device), allowed)
    torch.cuda.reset_peak_memory_stats(device)
    fitted = passes(trainer, batch)
    peak = torch.cuda.max_memory_allocated(device)
    _release()
    return Try(int(peak + later) if fitted else None, room)


def optimizer_states(model: torch.nn.Module, name: str) -> float:
    """Bytes that the optimizer of this Transformers name will keep for the trained weights of `model`."""
    embeddings = {id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
    trained = (p for p in model.parameters() if p.requires_grad)
    return sum(p.numel() * optimizer_bytes(name, p.element_size(), id(p) in embeddings) for p in trained)


def _evaluates(trainer: Any, batch: dict[str, Any]) -> bool:
    """Whether the memory was enough for a forward pass as in DDPTrainer.evaluation_loop."""
    was_training = trainer.model.training
    trainer.model.eval()
    try:
        with torch.no_grad(), trainer.accelerator.autocast():
            trainer.micro_batch_loss(trainer.model, batch, torch.ones((), device=trainer.args.device))
        torch.cuda.synchronize(trainer.args.device)
        return True
    except RuntimeError as error:
        if not is_out_of_memory(error):
            # The evaluation itself will say what is wrong with it.
            logger.warning("the evaluation rows could not be tried: %s", error)
        return not is_out_of_memory(error)
    finally:
        trainer.model.train(was_training)


def _passes(trainer: Any, batch: dict[str, Any]) -> bool:
    """Whether the memory was enough; random numbers and gradients are left as they were."""
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    was_training = trainer.model.training
    trainer.model.train()
    with torch.random.fork_rng(devices=[trainer.args.device]):
        try:
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            with trainer.accelerator.autocast():
                loss = trainer.micro_batch_loss(trainer.model, batch, torch.ones((), device=trainer.args.device))
            loss.backward()
            torch.cuda.synchronize(trainer.args.device)
            return True
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            for parameter in trained:
                parameter.grad = None
            trainer.model.train(was_training)


def _release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def forget_free_memory() -> None:
    """Let Unsloth's fused loss look again how much memory is free, by which it slices the logits once for all."""
    loss = sys.modules.get("unsloth_zoo.fused_losses.cross_entropy_loss")
    forget = getattr(getattr(loss, "_get_chunk_multiplier", None), "cache_clear", None)
    if forget is not None:
        forget()
