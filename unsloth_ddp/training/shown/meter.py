"""Measure losses, tokens and speed while a run trains; sums stay on the device until a line is logged."""

import contextlib
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from unsloth_ddp.training.tasks.task import Task

# The column after the task's own sums: tokens without padding.
TOKENS = "tokens"
# Columns that are gathered after the sums.
OWN_SECONDS, STEPS, LEVEL, PEAK = range(4)


@dataclass
class Totals:
    """Exact sums over all ranks since the run began, by name, earlier parts of a resumed run included."""

    sums: dict[str, float] = field(default_factory=dict)

    def add(self, sums: Mapping[str, float]) -> None:
        """Add the sums of an interval."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return round(self.sums.get(TOKENS, 0.0))

    @property
    def supervised_tokens(self) -> int:
        """Supervised tokens."""
        return round(self.sums.get("supervised_tokens", 0.0))


class OwnWorkTimer:
    """Measure the seconds of a step in which a rank works without waiting for other ranks.

    The timer covers reading the step's rows, and the time from the step's first collective (the token count, which all
    ranks leave together) to the end of its last forward pass. The last backward pass is left out, because gradients
    are exchanged during it. With several micro-batches this is nearly all work of a step; with one it is reading and
    the forward pass. On a GPU two events per step mark the time and are read only after they have completed, so that
    the host does not wait. With sharded weights nothing is measured, because forward passes wait for other ranks.
    """

    def __init__(self, device: torch.device, enabled: bool = True) -> None:
        self.cuda = device.type == "cuda"
        self.enabled = enabled
        self.micro_batches = 0
        self.seconds = 0.0
        self.steps = 0
        self.began: Any = None
        self.marks: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def start(self, reading: float, micro_batches: int) -> None:
        """Begin a step after its first collective; reading its rows took `reading` seconds."""
        if self.enabled:
            self.seconds += reading
            self.micro_batches, self.began = micro_batches, self._mark()

    def forward_done(self) -> None:
        """Count one forward pass; the last one of a step ends its measurement."""
        self.micro_batches -= 1
        if not self.enabled or self.micro_batches != 0:
            return
        if self.cuda:
            self.marks.append((self.began, self._mark()))
        else:
            self.seconds += self._mark() - self.began
            self.steps += 1

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def snapshot(self) -> tuple[float, int, list[Any]]:
        """Return the state before a step, for `restore`."""
        return self.seconds, self.steps, list(self.marks)

    def restore(self, snapshot: tuple[float, int, list[Any]], micro_batches: int) -> None:
        """Go back to a snapshot, to measure a step of `micro_batches` again."""
        self.seconds, self.steps, self.marks = snapshot[0], snapshot[1], deque(snapshot[2])
        self.start(0.0, micro_batches)

    def take(self) -> tuple[float, int]:
        """Return seconds and steps since the last call, without steps that the GPU has not finished."""
        while self.marks and self.marks[0][1].query():
            began, ended = self.marks.popleft()
            self.seconds += began.elapsed_time(ended) / 1000
            self.steps += 1
        finished = self.seconds, self.steps
        self.seconds, self.steps = 0.0, 0
        return finished


@dataclass
class Meter:
    """Sum losses and tokens of this rank since the last log line, and of all ranks since the run began.

    Args:
        gather: this rank's float64 sums (n,) -> those of all ranks (world size, n); called on every rank alike.
        totals: the run's sums, which `collect` adds to.
        task: names the sums, and computes the metrics of a line from them.
    """

    gather: Callable[[Tensor], Tensor]
    world_size: int
    device: torch.device
    own_work: OwnWorkTimer
    totals: Totals
    task: Task
    # Own seconds per step and tokens per step of each rank, and seconds per step, in the last collected interval.
    pace: tuple[list[float], list[float], float] | None = None
    # Rung of the ladder of each rank in the last collected interval, by its place.
    levels: list[int] = field(default_factory=list)
    # Peak memory of the CUDA graphs of this rank: it is allocated at the capture, and a replay does not count it again.
    replayed_bytes: int = 0

    def __post_init__(self) -> None:
        self.columns = (*self.task.columns, TOKENS)
        self.reset()

    @property
    def train_loss(self) -> float | None:
        """Mean of the training loss over the whole run; None before the first step."""
        return self.task.metrics(self.totals.sums).get("loss") if self.totals.sums else None

    def reset(self) -> None:
        """Start a new interval."""
        # float64, so that token counts stay exact; MPS has none, but the kit does not run there.
        self.sums = torch.zeros(len(self.columns), dtype=torch.float64, device=self.device)
        self.began = time.perf_counter()

    def add(self, sums: Tensor, tokens: Tensor) -> None:
        """Add one micro-batch: the sums that its task measured, and its tokens without padding (0-dim)."""
        self.sums += torch.cat([sums, tokens.double()[None]])

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time that passes here (evaluating, saving) out of the interval."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.began += time.perf_counter() - began

    def resume(self, totals: Totals, pending: list[list[float]] | None, rank: int) -> int:
        """Continue from the sums of a checkpoint, and return the tokens counted before it.

        Args:
            totals: the run's sums, shared from now on.
            pending: each rank's sums that the totals do not include yet; if the world size changed, rank 0 takes all.
        """
        self.totals = totals
        sums = torch.tensor(pending or [[0.0] * len(self.columns)], dtype=torch.float64, device=self.device)
        if rank < len(sums) == self.world_size:
            self.sums += sums[rank]
        elif rank == 0:
            self.sums += sums.sum(dim=0)
        return totals.tokens + round(sums[:, -1].sum().item())

    def pending(self) -> list[list[float]]:
        """Return each rank's sums since the last log line; every rank has to call this at the same step."""
        return self.gather(self.sums).tolist()

    def snapshot(self) -> tuple[Tensor, tuple[float, int, list[Any]]]:
        """Return the sums before a step, for `restore`."""
        return self.sums.clone(), self.own_work.snapshot()

    def restore(self, snapshot: tuple[Tensor, tuple[float, int, list[Any]]], micro_batches: int) -> None:
        """Go back to a snapshot, to repeat a step of `micro_batches`."""
        self.sums.copy_(snapshot[0])
        self.own_work.restore(snapshot[1], micro_batches)

    def peak_bytes(self) -> int:
        """Return the peak memory of this rank since training began, including that of replayed CUDA graphs."""
        return max(peak_memory_bytes(self.device.type), self.replayed_bytes)

    def collect(self, level: int) -> dict[str, float]:
        """Return the interval's metrics over all ranks; every rank has to call this at the same step.

        Args:
            level: place of this rank's rung in the ladder; `levels` gets those of all ranks.
        """
        seconds = time.perf_counter() - self.began
        own_values = (*self.own_work.take(), level, self.peak_bytes())
        own_columns = torch.tensor(own_values, dtype=torch.float64, device=self.device)
        per_rank = self.gather(torch.cat([self.sums, own_columns])).cpu()
        measured, others = per_rank.tensor_split([len(self.columns)], dim=1)
        sums = dict(zip(self.columns, measured.sum(dim=0).tolist(), strict=True))
        tokens, steps = sums[TOKENS], others[:, STEPS].sum().item()
        self.levels = others[:, LEVEL].int().tolist()
        self.pace = None
        self.totals.add(sums)
        self.reset()
        metrics = {
            "tokens_per_second": tokens / seconds if seconds else 0.0,
            "num_tokens": float(self.totals.tokens),
            # Maximum over ranks since training began.
            "peak_memory_bytes": others[:, PEAK].max().item(),
            **self.task.metrics(sums),
        }
        of_ranks = [self.task.metrics(dict(zip(self.columns, row, strict=True))) for row in measured.tolist()]
        means = [rank_metrics["loss"] for rank_metrics in of_ranks if "loss" in rank_metrics]
        if means:
            metrics["rank_loss_spread"] = max(means) - min(means)
        if steps and others[:, STEPS].min() > 0:
            a_step = (others[:, OWN_SECONDS] / others[:, STEPS]).tolist()
            mean_steps = steps / len(others)
            self.pace = a_step, (measured[:, -1] / others[:, STEPS]).tolist(), seconds / mean_steps
            metrics |= {"rank_step_seconds": median(a_step), "rank_step_seconds_max": max(a_step)}
        return metrics


def real_tokens(inputs: Mapping[str, Tensor]) -> Tensor:
    """Count the tokens of a micro-batch without padding and filler rows, which have one token; return a 0-dim tensor.

    Rows in a pack are found by their positions: a row of one token is a 0 that is followed by another 0 or by the end.
    A prompt that is computed once for the two rows of a pair counts in both.
    """
    if "attention_mask" in inputs:
        lengths = inputs["attention_mask"].sum(dim=1)
        return lengths.masked_fill(lengths == 1, 0).sum()
    # The first of several dimensions (see Flatten) is that of the text.
    begins = inputs["position_ids"].flatten(0, -2)[0] == 0
    ends = torch.cat([begins[1:], begins.new_ones(1)])
    return inputs.get("shared_keys", begins).numel() - (begins & ends).sum()


def peak_memory_bytes(device_type: str) -> int:
    """Return the peak memory of this process: allocated on its GPU, or resident on a CPU."""
    if device_type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
