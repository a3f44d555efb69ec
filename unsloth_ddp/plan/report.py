"""A plan as tables, JSON and a picture."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from unsloth_ddp.config.parse import Settings
from unsloth_ddp.plan.calibration import TOO_FAR, Calibration
from unsloth_ddp.plan.compute import Hardware, Plan, backend_of, planned_packing, precision_of
from unsloth_ddp.plan.memory import RESERVE
from unsloth_ddp.plan.network import GUIDE, GUIDE_GPUS_A_NODE, Links, all_reduce_seconds, ring_fit
from unsloth_ddp.plan.rows import RowLengths
from unsloth_ddp.plan.shape import ModelShape
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.units import shown_bandwidth, shown_bytes, shown_seconds

NO_CALIBRATION = (
    "Time and efficiency need measured speeds, and none were given: --calibration FILE. To write one, train the same "
    "model and rows for some 50 steps on one GPU of the kind you will rent (--max_steps 50 --logging_steps 5), then run "
    "this command with --calibrate outputs/RUN --calibration FILE. --calibration h200 is shipped (LoRA, QLoRA and full on H200s)."
)


def _table(columns: list[str], rows: list[list[str]], left: int = 1) -> Table:
    table = Table(box=box.SIMPLE, show_header=any(columns), pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < left else "right")
    for row in rows:
        table.add_row(*row)
    return table


@dataclass(frozen=True)
class Report:
    """A plan with what it was made from."""

    settings: Settings
    shape: ModelShape
    rows: RowLengths
    hardware: Hardware
    plan: Plan
    calibration: Calibration | None


def print_plan(report: Report) -> None:
    """Everything, as someone reads it who is about to rent."""
    settings, hardware, plan = report.settings, report.hardware, report.plan
    console = Console(width=None if sys.stdout.isatty() else 130)
    against = f", of {shown_bytes(hardware.gpu_memory)}" if hardware.gpu_memory else " (--gpu_memory gives a verdict)"
    shape_of_it = f"{hardware.nodes} node(s) x {hardware.gpus_per_node} GPUs"
    networks = " / ".join(shown_bandwidth(network) for network in hardware.networks)
    for title, table in (
        ("Run", _table(["", ""], _run_rows(report), left=2)),
        (f"Memory of one GPU{against}", _memory_table(settings, plan)),
        (f"Time to average the gradients of a step with DDP, {shape_of_it}", _network_table(settings, hardware, plan)),
        (f"Efficiency as far as links and rows decide it, with {networks} between nodes", _scale_table(plan)),
    ):
        console.print(title, style="bold", highlight=False)
        console.print(table)
    if report.shape.all_experts:
        console.print(
            "A mixture of experts: every expert is counted as if each token met all of them, so time is too high."
        )
    for sentence in notes(report):
        console.print(f"- {sentence}", soft_wrap=True, highlight=False)


def _run_rows(report: Report) -> list[list[str]]:
    settings, shape, rows, hardware, plan = report.settings, report.shape, report.rows, report.hardware, report.plan
    batch = plan.batch
    trained = ", ".join(f"{m} {shape.trained(m):,}" for m in ("lora", "full"))
    return [
        ["model", f"{settings.model} ({shape.parameters:,} parameters; trained by {trained})"],
        ["run", f"method {settings.method}, {precision_of(settings)}, {backend_of(settings)}, checkpointing {settings.gradient_checkpointing}, {settings.optim}"],
        ["GPUs", f"{hardware.nodes} node(s) x {hardware.gpus_per_node}"],
        [rows.unit, f"{'the first ' if rows.streamed else ''}{len(rows.lengths):,} ({rows.tokens:,} tokens, mean {rows.mean:,.0f}, longest {rows.longest:,})"],
        ["global batch", f"{batch.per_device} {rows.unit} a device x {batch.accumulation} accumulation x {batch.processes} processes = {batch.global_batch} {rows.unit}"],
        ["tokens a step", f"{plan.tokens_a_step:,.0f} on average; largest micro-batch {plan.micro_batch:,} with padding"],
        ["steps", f"{plan.steps:,}" + ("" if rows.streamed else f" ({batch.steps_per_epoch(len(rows.lengths)):,} an epoch)")],
        ["model work", f"{shape.flops_a_token(settings.method) / 1e9:,.4g} GFLOP a token"],
    ]  # fmt: skip


def _memory_table(settings: Settings, plan: Plan) -> Table:
    columns = ["method", "sharding", "recomputed", "weights", "gradients", "optimizer", "copies", "activations"]
    columns += ["loading", "at most"]
    parts = ("weights", "gradients", "optimizer", "copies", "activations", "loading", "total")
    rows = []
    for one in plan.memory:
        amounts = [shown_bytes(getattr(one.memory, part)) for part in parts]
        chosen = "*" if one.method == settings.method and one.sharding == "none" else ""
        rows.append([one.method + chosen, one.sharding, one.checkpointing, *amounts, one.verdict])
    return _table([*columns, "verdict"], rows, left=3)


def _network_table(settings: Settings, hardware: Hardware, plan: Plan) -> Table:
    columns = ["method", "gradients a step", *(shown_bandwidth(network) for network in hardware.networks)]
    rows = []
    for method, size in plan.gradients.items():
        times = [
            all_reduce_seconds(size, hardware.nodes, hardware.gpus_per_node, Links(network, hardware.inside))
            for network in hardware.networks
        ]
        rows.append([method + ("*" if method == settings.method else ""), shown_bytes(size), *map(_shown_time, times)])
    return _table(columns, rows)


def _shown_time(seconds: float) -> str:
    return shown_seconds(seconds) if seconds else "-"


def _percent(values: list[float] | None) -> str:
    return " / ".join(f"{value:.1%}" for value in values) if values else "-"


def _scale_table(plan: Plan) -> Table:
    columns = [
        "GPUs",
        "nodes",
        "all-reduce",
        "even rows leave",
        "same work a GPU",
        "same global batch",
        "run",
        "GPU-hours",
    ]
    rows = []
    for one in plan.scale:
        hours = one.hours or []
        cells = [str(one.gpus), str(one.nodes), " / ".join(map(_shown_time, one.all_reduce))]
        cells += [f"{one.even:.1%}" if one.even else "-", _percent(one.same_work), _percent(one.same_batch)]
        cells += [" / ".join(shown_seconds(h * 3600) for h in hours) or "-"]
        cells += [" / ".join(f"{h * one.gpus:,.2f}" for h in hours) or "-"]
        rows.append(cells)
    return _table(columns, rows, left=0)


def notes(report: Report) -> list[str]:
    """What the tables rest on, and what they leave out."""
    hardware, plan, calibration = report.hardware, report.plan, report.calibration
    said = [
        f"Memory: * is the run as set. Up to {RESERVE:.0%} of a GPU counts as a fit; the rest is for the driver, NCCL and "
        "fragmentation. DDP (sharding none) is within 4 % of runs on H200s; ZeRO and FSDP2 are "
        "what is kept for sure; runs took up to twice that (docs/plan.md)."
    ]
    if hardware.inside is None and hardware.gpus_per_node > 1:
        said.append("Inside a node averaging is not counted: give --node_bandwidth (the preflight measures it).")
    if calibration is None:
        said.append(NO_CALIBRATION)
    elif plan.speed is None:
        said.append(
            f"Time and efficiency are missing: the calibration of {calibration.gpu} holds no measurement of this method, "
            f"precision and kind of rows within a factor of {TOO_FAR} of this model's work a token and this micro-batch's tokens. "
            + NO_CALIBRATION.partition("--calibration FILE. ")[2]
        )
    else:
        named = "; ".join(plan.speed.sources)
        said.append(f"Speed: {plan.speed.tokens_per_second:,.0f} tokens/s a GPU, from {calibration.gpu}: {named}.")
        if plan.speed.differences:
            said.append(
                f"It was measured otherwise than this run, so take it as an order of size: {'; '.join(plan.speed.differences)}."
            )
    if report.rows.streamed:
        said.append(
            f"Rows are streamed: their first {len(report.rows.lengths):,} {report.rows.unit} stand for all, and memory is "
            f"that of micro-batches with {report.settings.max_length:,} tokens a {report.rows.unit.removesuffix('s')}."
        )
    if report.settings.packing == "auto":
        packed = planned_packing(report.settings).packed
        planned = "packed rows, for which most models have a kernel with torch 2.12 on"
        said.append(f"packing auto is planned as {planned if packed else 'padded rows; --packing on plans packs'}.")
    said += _chosen(report)
    others = [count for count in GUIDE if count > 4]
    ring = ring_fit(GUIDE[4], 4 // GUIDE_GPUS_A_NODE, [count // GUIDE_GPUS_A_NODE for count in others])
    fitted = ", ".join(f"{r:.0%} at {c} ({GUIDE[c]:.0%} there)" for r, c in zip(ring, others, strict=True))
    said.append(
        "Efficiency: link speed, and uneven rows, where a step lasts as long as the GPU with the most tokens needs (less "
        "is lost where GPUs are not busy). Start-up times, evaluation, saving, congestion and slow machines come on top. "
        f"Set to the published guide's {GUIDE[4]:.0%} on 2 nodes x 2 A100, such a count says {fitted}."
    )
    return said


def _chosen(report: Report) -> list[str]:
    """What the auto options are planned as."""
    settings, plan, limit = report.settings, report.plan, report.hardware.gpu_memory
    nothing = any(
        m.method == settings.method and m.sharding == "none" and m.verdict == "does not fit" for m in plan.memory
    )
    said = []
    if settings.per_device_train_batch_size == "auto":
        why = "the most that fits" if limit else "all at once, because --gpu_memory is not given"
        why = "though not even that fits" if nothing else why
        said.append(f"per_device_train_batch_size auto is planned as {plan.batch.per_device}, {why}.")
    if settings.gradient_checkpointing == "auto":
        why = "" if limit else ": none, because --gpu_memory is not given"
        kind = "kind that takes least, where none fits" if nothing else "first kind that fits"
        said.append(f"gradient_checkpointing auto is planned as the {kind}{why}.")
    return said


def as_json(report: Report) -> dict[str, Any]:
    """Everything that was computed, in bytes and seconds."""
    plan, rows, calibration = report.plan, report.rows, report.calibration
    memory = [
        {
            "method": m.method,
            "sharding": m.sharding,
            "gradient_checkpointing": m.checkpointing,
            "verdict": m.verdict,
            "total": m.memory.total,
            **dataclasses.asdict(m.memory),
        }
        for m in plan.memory
    ]
    return {
        "settings": dataclasses.asdict(report.settings),
        "shape": dataclasses.asdict(report.shape),
        "rows": {
            rows.unit: len(rows.lengths),
            "tokens": rows.tokens,
            "longest": rows.longest,
            "streamed": rows.streamed,
            "supervised": rows.supervised,
        },
        "hardware": dataclasses.asdict(report.hardware),
        "calibration": calibration and {"gpu": calibration.gpu, "source": calibration.source},
        "plan": {**dataclasses.asdict(plan), "memory": memory},
        "notes": notes(report),
    }


def draw(path: Path, hardware: Hardware, plan: Plan) -> None:
    """Efficiency over the number of GPUs.

    Raises:
        UserError: there are no speeds to draw.
    """
    import matplotlib

    if plan.speed is None:
        raise UserError("--picture shows efficiency, which needs --calibration with a measurement of this method.")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for index, network in enumerate(hardware.networks):
        points = [(one.gpus, one.same_work[index]) for one in plan.scale if one.same_work]
        axes.plot(*zip(*points, strict=True), marker="o", label=f"same work a GPU, {shown_bandwidth(network)}")
        batch = [(one.gpus, one.same_batch[index]) for one in plan.scale if one.same_batch]
        if batch:
            axes.plot(
                *zip(*batch, strict=True),
                marker="x",
                linestyle="--",
                label=f"same global batch, {shown_bandwidth(network)}",
            )
    axes.plot(*zip(*GUIDE.items(), strict=True), "k^", label="published, 2 A100s a node")
    axes.set(xlabel="GPUs", ylabel="efficiency", ylim=(0, 1.05))
    axes.set_xscale("log", base=2)
    axes.set_xticks([one.gpus for one in plan.scale], [str(one.gpus) for one in plan.scale])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
