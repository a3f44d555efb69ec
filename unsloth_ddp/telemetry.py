"""What a run measures while it trains, without making it wait: sums stay on the device until a line is logged."""

from __future__ import annotations

import platform
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from unsloth_ddp.batch import BatchPlan
from unsloth_ddp.data import TokenizedRows
from unsloth_ddp.model import parameter_counts
from unsloth_ddp.packing import Choice, Packing
from unsloth_ddp.runtime import Runtime
from unsloth_ddp.settings import Settings

# Sums a rank keeps between two log lines.
LOSS, SUPERVISED, TOKENS = range(3)

PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "unsloth", "unsloth_zoo")
SUMMARIZED = (
    "model", "model_revision", "method", "dataset", "eval_dataset", "eval_fraction", "max_length", "overlong",
    "loss_on", "chat_template", "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type", "warmup_steps",
    "optim", "weight_decay", "max_grad_norm", "gradient_checkpointing", "lora_r", "lora_alpha", "lora_dropout", "seed",
)  # fmt: skip


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


@dataclass
class Meter:
    """Sums of this rank since the last log line, and of all ranks since the start.

    Args:
        gather: this rank's float64 sums (3,) -> those of all ranks (world size, 3); called on every rank alike.
    """

    gather: Callable[[Tensor], Tensor]
    device: torch.device
    totals: Totals = field(default_factory=Totals)

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
        per_rank = self.gather(self.sums).cpu()
        loss, supervised, tokens = per_rank.sum(dim=0).tolist()
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


def peak_memory_bytes(device_type: str) -> int:
    """Most memory this process held: allocated on its GPU, or resident on a CPU."""
    if device_type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what a run computes."""
    found: dict[str, str] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


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
    choice: Choice,
    model: torch.nn.Module,
    train_rows: TokenizedRows,
    eval_rows: TokenizedRows | None,
    run_folder: Path,
) -> str:
    """The table the main process prints before step 1."""
    counts = train_rows.counts
    steps = plan.steps(train_rows.units, settings.num_train_epochs, settings.max_steps)
    steps_per_epoch = plan.steps_per_epoch(train_rows.units)
    total, trainable = parameter_counts(model)
    packs = train_rows.packing
    packed = f"off: {choice.reason}; rows of like length are padded together"
    if packs is not None:
        packed = f"on: {choice.reason}; {len(packs):,} packs of up to {packs.capacity:,} tokens, {packs.fill:.0%} full"
    unit, of_rows = ("rows", "") if packs is None else ("packs", f" (about {counts.rows / steps_per_epoch:,.0f} rows)")
    rows = f"{counts.rows:,} ({counts.tokens:,} tokens, longest {counts.longest:,})"
    if counts.truncated:
        rows += f"; {counts.truncated:,} over max_length {settings.max_length} truncated"
    if counts.dropped:
        rows += f"; {counts.dropped:,} over max_length {settings.max_length} dropped"
    return table(
        {
            "processes": f"{runtime.ranks.world_size} on {runtime.ranks.nodes} node(s)",
            "device": runtime.device_name,
            **({"sharding": runtime.sharding} if runtime.sharding != "none" else {}),
            "backend": runtime.backend,
            "precision": runtime.precision,
            "model": f"{settings.model} ({total:,} parameters)",
            "method": f"{settings.method} ({trainable:,} trainable parameters, {trainable / total:.2%})",
            "training rows": rows,
            "evaluation rows": f"{eval_rows.counts.rows:,}" if eval_rows else "none",
            "supervised tokens": f"{counts.supervised:,} ({counts.supervised / counts.tokens:.1%} of all)",
            "packing": packed,
            "global batch": f"{plan.per_device} {unit} a device x {plan.accumulation} accumulation x "
            f"{plan.processes} processes = {plan.global_batch} {unit}{of_rows}",
            "tokens a step": f"{counts.tokens / steps_per_epoch:,.0f} on average",
            "steps": f"{steps:,} ({steps_per_epoch:,} an epoch)",
            "written to": str(run_folder),
        }
    )


def summarize(
    settings: Settings,
    runtime: Runtime,
    plan: BatchPlan,
    packing: Packing | None,
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
        "packing": packing is not None,
        "packs": len(packing) if packing is not None else None,
        "global_batch_size": plan.global_batch,
        "per_device_train_batch_size": plan.per_device,
        "gradient_accumulation_steps": plan.accumulation,
        "steps": steps,
        "tokens": totals.tokens,
        "supervised_tokens": totals.supervised_tokens,
        "train_loss": totals.train_loss,
        "peak_memory_bytes": peak,
        "peak_memory_bytes_loading": loading,
        "settings": {name: getattr(settings, name) for name in SUMMARIZED},
        "versions": versions(),
    }
