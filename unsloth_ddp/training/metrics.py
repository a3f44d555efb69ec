"""What a run measures while it trains, without making it wait: sums stay on the device until a line is logged."""

from __future__ import annotations

import functools
import resource
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from unsloth_ddp.config.options import Settings, options_with
from unsloth_ddp.data.batch_plan import BatchPlan
from unsloth_ddp.data.dataset import TokenizedRows
from unsloth_ddp.data.packing import PackingDecision
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.load import parameter_counts
from unsloth_ddp.training.memory_search import Chosen
from unsloth_ddp.utils.versions import versions

# Sums a rank keeps between two log lines.
LOSS, SUPERVISED, TOKENS = range(3)
# Gathered with them.
OWN_SECONDS, STEPS, LEVEL = 3, 4, 5


@dataclass
class Totals:
    """Exact sums over all ranks since the run began, checkpoints included."""

    loss_sum: float = 0.0
    supervised_tokens: int = 0
    tokens: int = 0

    @property
    def train_loss(self) -> float | None:
        """Token mean of the training loss over the whole run; None before the first step."""
        return self.loss_sum / self.supervised_tokens if self.supervised_tokens else None


class OwnWorkTimer:
    """Seconds of a step in which a rank works and nothing makes it wait for the others.

    Measured are the reading of the step's rows, and the time from the step's first collective (the token count, which
    all ranks leave together) to the end of its last forward pass; the last backward pass is left out, because the
    gradients are exchanged during it. So with several micro-batches it is nearly all work of a step, with one it is
    the reading and the forward pass. On a GPU two events a step mark the time, read only once they have passed, so
    that nothing waits. Where weights are sharded, forward passes wait for other ranks, and it says nothing.
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
        """The first collective of a step is over; its rows took `reading` seconds to get."""
        if self.enabled:
            self.seconds += reading
            self.micro_batches, self.began = micro_batches, self._mark()

    def forward_done(self) -> None:
        """A micro-batch has been through the model once."""
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

    def take(self) -> tuple[float, int]:
        """Seconds and steps since the last call, without those that the GPU has not finished."""
        while self.marks and self.marks[0][1].query():
            began, ended = self.marks.popleft()
            self.seconds += began.elapsed_time(ended) / 1000
            self.steps += 1
        taken = self.seconds, self.steps
        self.seconds, self.steps = 0.0, 0
        return taken


@dataclass
class Stragglers:
    """Finds ranks that slow all others down, each once.

    A rank is one if, for `intervals` log lines in a row, its own time is `ratio` times the median of the others', both
    a step and a token (longer rows are no fault of a rank), and the difference is a `share` of the time that passed.
    """

    ratio: float = 1.5
    intervals: int = 3
    share: float = 0.1
    warmup: int = 1
    streaks: dict[int, int] = field(default_factory=dict)
    named: set[int] = field(default_factory=set)

    def observe(self, seconds: list[float], tokens: list[float], passed: float) -> list[int]:
        """The ranks found by this interval: own seconds a step and tokens a step of each rank, seconds a step in all."""
        if self.warmup:
            self.warmup -= 1
            return []
        found = []
        for rank in range(len(seconds)):
            self.streaks[rank] = self.streaks.get(rank, 0) + 1 if self._slow(rank, seconds, tokens, passed) else 0
            if self.streaks[rank] >= self.intervals and rank not in self.named:
                self.named.add(rank)
                found.append(rank)
        return found

    def _slow(self, rank: int, seconds: list[float], tokens: list[float], passed: float) -> bool:
        others = [r for r in range(len(seconds)) if r != rank]
        if not others:
            return False
        usual = median(seconds[r] for r in others)
        a_token = [s / max(t, 1.0) for s, t in zip(seconds, tokens, strict=True)]
        return (
            seconds[rank] > self.ratio * usual
            and a_token[rank] > self.ratio * median(a_token[r] for r in others)
            and seconds[rank] - usual > self.share * passed
        )


@dataclass
class Meter:
    """Sums of this rank since the last log line, and of all ranks since the start.

    Args:
        gather: this rank's float64 sums (n,) -> those of all ranks (world size, n); called on every rank alike.
    """

    gather: Callable[[Tensor], Tensor]
    device: torch.device
    own_work: OwnWorkTimer
    totals: Totals = field(default_factory=Totals)
    # Own seconds a step and tokens a step of each rank, and seconds a step, in the interval last collected.
    pace: tuple[list[float], list[float], float] | None = None
    # How often this rank, and each rank by the interval last collected, had to make do with less memory.
    level: int = 0
    levels: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start a new interval."""
        # float64, so that token counts stay exact; MPS has none, but the kit does not run there.
        self.sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        self.began = time.perf_counter()

    def add(self, loss_sum: Tensor, supervised: Tensor, tokens: Tensor) -> None:
        """Add one micro-batch: its summed token losses, supervised tokens and tokens that are not padding."""
        self.sums += torch.stack([loss_sum.detach().double(), supervised.double(), tokens.double()])

    def collect(self) -> dict[str, float]:
        """The interval over all ranks, ready to be logged; every rank has to call this at the same step."""
        seconds = time.perf_counter() - self.began
        own = torch.tensor((*self.own_work.take(), self.level), dtype=torch.float64, device=self.device)
        per_rank = self.gather(torch.cat([self.sums, own])).cpu()
        loss, supervised, tokens, _, steps, _ = per_rank.sum(dim=0).tolist()
        self.levels = per_rank[:, LEVEL].int().tolist()
        self.pace = None
        self.totals.loss_sum += loss
        self.totals.supervised_tokens += round(supervised)
        self.totals.tokens += round(tokens)
        self.reset()
        metrics = {"tokens_per_second": tokens / seconds if seconds else 0.0, "num_tokens": float(self.totals.tokens)}
        if supervised:
            metrics["loss"] = loss / supervised
            with_tokens = per_rank[per_rank[:, SUPERVISED] > 0]
            means = with_tokens[:, LOSS] / with_tokens[:, SUPERVISED]
            metrics["rank_loss_spread"] = (means.max() - means.min()).item()
        if steps and per_rank[:, STEPS].min() > 0:
            a_step = (per_rank[:, OWN_SECONDS] / per_rank[:, STEPS]).tolist()
            taken = steps / len(per_rank)
            self.pace = a_step, (per_rank[:, TOKENS] / per_rank[:, STEPS]).tolist(), seconds / taken
            metrics |= {"rank_step_seconds": median(a_step), "rank_step_seconds_max": max(a_step)}
        return metrics


def real_tokens(inputs: Mapping[str, Tensor]) -> Tensor:
    """Tokens of a micro-batch that are neither padding nor a filler row, which has one token: a 0-dim tensor.

    Packed rows are told apart by their positions: a row of one token begins where the next one does.
    """
    if "attention_mask" in inputs:
        lengths = inputs["attention_mask"].sum(dim=1)
        return lengths.masked_fill(lengths == 1, 0).sum()
    begins = inputs["position_ids"][0] == 0
    ends = torch.cat([begins[1:], begins.new_ones(1)])
    return begins.numel() - (begins & ends).sum()


def describe_straggler(place: object, rank: int, pace: tuple[list[float], list[float], float], intervals: int) -> str:
    """The line that names a straggler and says where to look."""
    seconds = pace[0]
    usual = median(s for r, s in enumerate(seconds) if r != rank)
    return (
        f"{place} is slower than the others: its own work takes {seconds[rank]:.3f} s a step where theirs takes "
        f"{usual:.3f} s, for {intervals} log lines in a row, and all wait for it. Look at that host for other processes, "
        "GPU clock and temperature (nvidia-smi -q -d PERFORMANCE,CLOCK), a narrow PCIe link, a busy CPU or a slow disk."
    )


class BestEffort:
    """A tracker (TensorBoard and the like) whose failure costs its own report and not the training.

    Args:
        tracker: the callback that Transformers made for it; every event is handed on until one fails.
    """

    def __init__(self, tracker: Any) -> None:
        self.tracker = tracker
        self.failed = False

    def __getattr__(self, name: str) -> Any:
        handler = getattr(self.tracker, name)
        return functools.partial(self._hand_on, handler) if name.startswith("on_") else handler

    def _hand_on(self, handler: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.failed:
            return None
        try:
            return handler(*args, **kwargs)
        except Exception as error:
            self.failed = True
            name = type(self.tracker).__name__.removesuffix("Callback")
            print(f"{name} failed and gets no more reports: {' '.join(str(error).split())}", flush=True)
            return None


def peak_memory_bytes(device_type: str) -> int:
    """Most memory this process held: allocated on its GPU, or resident on a CPU."""
    if device_type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def table(rows: dict[str, str]) -> str:
    """Names and values as aligned text, long values folded."""
    grid = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(name, value)
    text = StringIO()
    Console(file=text, width=100).print(grid)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip())


def describe_run(
    settings: Settings,
    runtime: Runtime,
    plan: BatchPlan,
    choice: PackingDecision,
    chosen: Chosen,
    model: torch.nn.Module,
    train_rows: TokenizedRows,
    eval_rows: TokenizedRows | None,
    run_folder: Path,
    *,
    head_chooses: bool,
) -> str:
    """The table the main process prints before step 1."""
    counts = train_rows.counts
    steps = plan.steps(train_rows.units, settings.num_train_epochs, settings.max_steps)
    steps_per_epoch = plan.steps_per_epoch(train_rows.units)
    total, trainable = parameter_counts(model)
    packs = train_rows.packing
    why = "" if settings.packing == "off" else f": {choice.reason}"
    packed = f"off{why}; rows of like length are padded together"
    if packs is not None:
        number = "" if train_rows.streamed else f"{len(packs):,} "
        packed = f"on: {choice.reason}; {number}packs of up to {packs.longest:,} tokens, {packs.fill:.0%} full"
    # The first rows of a stream need not fill a step.
    filled = train_rows.units / plan.global_batch if train_rows.streamed else steps_per_epoch
    unit, of_rows = ("rows", "") if packs is None else ("packs", f" (about {counts.rows / filled:,.0f} rows)")
    held = f"{counts.tokens:,} tokens, longest {counts.longest:,}"
    rows = f"{counts.rows:,} ({held})"
    supervised = f"{counts.supervised:,} ({counts.supervised / counts.tokens:.1%} of all)"
    if train_rows.streamed:
        order = (
            f"drawn from {settings.shuffle_buffer:,} rows at a time" if settings.shuffle_buffer else "in their order"
        )
        rows = f"streamed, {order}; the first {counts.rows:,} have {held}"
        supervised = f"{counts.supervised / counts.tokens:.1%} of the first rows' tokens"
    if head_chooses:
        supervised += "; the output head computes only them"
    if counts.truncated:
        rows += f"; {counts.truncated:,} over max_length {settings.max_length} truncated"
    if counts.dropped:
        rows += f"; {counts.dropped:,} over max_length {settings.max_length} dropped"
    beside = "" if settings.method == "full" else ", adapter included"
    return table(
        {
            "processes": f"{runtime.ranks.world_size} on {runtime.ranks.nodes} node(s)",
            "device": runtime.device_name,
            **({"sharding": runtime.sharding} if runtime.sharding != "none" else {}),
            "backend": runtime.backend,
            "precision": runtime.precision,
            "model": f"{settings.model} ({total:,} parameters{beside})",
            "method": f"{settings.method} ({trainable:,} trainable parameters, {trainable / total:.2%})",
            "training rows": rows,
            "evaluation rows": f"{eval_rows.counts.rows:,}" if eval_rows else "none",
            "supervised tokens": supervised,
            "packing": packed,
            "checkpointing": f"{chosen.kind}: {chosen.reason}",
            "global batch": f"{plan.per_device} {unit} a device x {plan.accumulation} accumulation x "
            f"{plan.processes} processes = {plan.global_batch} {unit}{of_rows}",
            "tokens a step": f"{'about ' if train_rows.streamed else ''}{counts.tokens / filled:,.0f} on average",
            "steps": f"{steps:,}" + ("" if train_rows.streamed else f" ({steps_per_epoch:,} an epoch)"),
            "written to": str(run_folder),
        }
    )


def summarize(
    settings: Settings,
    runtime: Runtime,
    plan: BatchPlan,
    rows: TokenizedRows,
    checkpointing: str,
    totals: Totals,
    steps: int,
    peak_before_steps: int,
) -> dict[str, Any]:
    """The content of summary.json, the same on every rank; the caller adds what only it knows.

    Memory is that of the fullest GPU: until the first step (loading, sharding) and from there on.
    """
    loading, peak = (
        max(values)
        for values in zip(*runtime.gather((peak_before_steps, peak_memory_bytes(runtime.device_type))), strict=True)
    )
    return {
        "world_size": runtime.ranks.world_size,
        "nodes": runtime.ranks.nodes,
        "device": runtime.device_name,
        "sharding": runtime.sharding,
        "backend": runtime.backend,
        "precision": runtime.precision,
        "packing": rows.packing is not None,
        "packs": len(rows.packing) if rows.packing is not None and not rows.streamed else None,
        "gradient_checkpointing": checkpointing,
        "global_batch_size": plan.global_batch,
        "per_device_train_batch_size": plan.per_device,
        "gradient_accumulation_steps": plan.accumulation,
        "steps": steps,
        "tokens": totals.tokens,
        "supervised_tokens": totals.supervised_tokens,
        "train_loss": totals.train_loss,
        "peak_memory_bytes": peak,
        "peak_memory_bytes_loading": loading,
        "settings": {name: getattr(settings, name) for name in options_with(summary=True)},
        "versions": versions(),
    }
