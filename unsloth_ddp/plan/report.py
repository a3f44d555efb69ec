"""Write a plan as tables and JSON."""

import dataclasses
from typing import Any

from unsloth_ddp.config.options import Settings
from unsloth_ddp.plan.compute import Hardware, MemoryRow, Plan, guess_hours
from unsloth_ddp.sizing.choose import backend_of, planned_packing, precision_of
from unsloth_ddp.utils.memory_limits import FILLED
from unsloth_ddp.utils.tables import Column, fit_text, output_width, render_pairs, render_table, wrap_text
from unsloth_ddp.utils.units import GIB, MIB, counted, shown_bytes, shown_seconds

NO_SPEED = (
    "The time is a guess from measured runs with packed rows (docs/speed.md): padded rows take longer, and start-up, "
    "evaluation and "
    "saving come on top. --tokens_per_second, the speed that a short run logs, gives a better one (docs/plan.md#time)."
)
# Columns of the table of memory that a narrow terminal leaves out; the JSON file has them.
NOT_IN_NARROW = ("optimizer", "working", "loading")
COLOURS = {"fits": "green", "tight": "yellow", "unknown": "yellow", "does not fit": "bold red"}


def render_plan(plan: Plan, *, width: int | None = None, colour: bool = False) -> str:
    """Return the whole plan as text."""
    settings, hardware = plan.settings, plan.hardware
    width = width or output_width()
    of_gpu = f" (of {shown_bytes(hardware.gpu_memory)})" if hardware.gpu_memory else ""
    unit, one = ("GiB", GIB) if max(row.memory.total for row in plan.memory) >= GIB else ("MiB", MIB)
    memory = _memory_table(settings, plan, one, width, colour)
    tables = [
        ("Run", render_pairs(dict(_run_rows(plan)), width=width)),
        (f"Memory of one GPU{of_gpu} in {unit}; * is the run as set, ≥ a lower bound", memory),
        *_time_table(hardware, plan, width),
    ]
    parts = [f"{fit_text(title, width)}\n{table}" for title, table in tables]
    parts[1] += "\n" + "\n".join(wrap_text(verdict_sentence(plan), width))
    lines = ["\n  ".join(wrap_text(f"- {text}", width - 2)) for text in notes(plan)]
    return "\n\n".join([*parts, "\n".join(lines)])


def _run_rows(plan: Plan) -> list[tuple[str, str]]:
    settings, shape, rows, hardware = plan.settings, plan.shape, plan.rows, plan.hardware
    batch, unit = plan.batch, rows.unit.removesuffix("s")
    amount = f"{'the first ' if rows.streamed else ''}{rows.units:,}"
    per_epoch = "" if rows.streamed else f" ({batch.steps_per_epoch(rows.units):,} per epoch)"
    return [
        ("model", f"{settings.model} ({shape.parameters:,} parameters; LoRA trains {shape.trained('lora'):,})"),
        ("training", f"method {settings.method}, {precision_of(settings)}, backend {backend_of(settings)}, "
                     f"gradient_checkpointing {_chosen(plan).checkpointing}, {settings.optim}"),
        ("hardware", f"{counted(hardware.nodes, 'node')} x {counted(hardware.gpus_per_node, 'GPU')}"),
        (rows.unit, f"{amount} ({counted(rows.tokens, 'token')}, mean {rows.mean:,.0f}, longest {rows.longest:,})"),
        ("global batch", f"{counted(batch.per_device, unit)} per device x {batch.accumulation} accumulation x "
                         f"{counted(batch.processes, 'process')} = {counted(batch.global_batch, unit)}"),
        ("tokens per step", f"{plan.tokens_a_step:,.0f} on average; the largest micro-batch has {plan.micro_batch:,}"
                            f"{' with padding' if rows.packing is None else ''}"),
        ("CUDA graphs", describe_graphs(plan)),
        ("steps", f"{plan.steps:,}{per_epoch}"),
        *([] if hardware.speed else [("time, a guess", _guessed_time(plan))]),
        ("model work", f"{shape.flops_a_token(settings.method) / 1e9:,.4g} GFLOP per token"),
    ]  # fmt: skip


def _guessed_time(plan: Plan) -> str:
    least, most, gpu = guess_hours(plan)
    gpus = plan.hardware.processes
    shown = "under a minute" if most < 1 / 60 else f"{shown_seconds(least * 3600)} to {shown_seconds(most * 3600)}"
    return f"{shown} on {counted(gpus, 'GPU')} ({gpu})"


def describe_graphs(plan: Plan) -> str:
    """Return whether a run with DDP is planned with CUDA graphs, and the reason."""
    if plan.rung.captured:
        return f"on: {plan.graphs}"
    refused = "; a run refuses --cuda_graphs on" if plan.settings.cuda_graphs == "on" else ""
    return f"off: {plan.graphs}{refused}"


def _memory_table(settings: Settings, plan: Plan, unit: int, width: int, colour: bool) -> str:
    numbers = ("weights", "gradients", "optimizer", "working", "loading", "peak")
    columns = [Column("method"), Column("sharding"), Column("recompute")]
    columns += [Column(name, "right", optional=name in NOT_IN_NARROW) for name in numbers]
    rows = []
    for one in plan.memory:
        memory = one.memory
        working = memory.copies + memory.activations
        amounts = (memory.weights, memory.gradients, memory.optimizer, working, memory.loading)
        chosen = "*" if _is_chosen(settings, one) else ""
        peak = f"{'≥' if memory.lower_bound else ''}{memory.total / unit:,.1f}"
        # Its own name would make the widest table wrap.
        config = "hybrid" if one.copies > 1 else one.config
        cells = [one.method + chosen, config, one.checkpointing, *(f"{n / unit:,.1f}" for n in amounts), peak]
        rows.append([*cells, one.verdict])
    columns.append(Column("verdict", styles=COLOURS))
    if all(one.verdict == "-" for one in plan.memory):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return render_table(columns, rows, width=width, colour=colour)


def _is_chosen(settings: Settings, row: MemoryRow) -> bool:
    return row.method == settings.method and row.sharding == "none"


def _chosen(plan: Plan) -> MemoryRow:
    return next(row for row in plan.memory if _is_chosen(plan.settings, row))


def _time_table(hardware: Hardware, plan: Plan, width: int) -> list[tuple[str, str]]:
    """Return title and table of the duration of the run over each network; nothing without a measured speed."""
    # Machines are not joined by a network where there is one, so its lines would be the same.
    shown = plan.durations if hardware.nodes > 1 else plan.durations[:1]
    columns = [
        Column("network"),
        *(Column(name, "right") for name in ("all-reduce", "even rows", "efficiency", "run", "GPU-hours")),
    ]
    rows = [
        [f"{one.network * 8 / 1e9:,.6g} Gbit/s" if hardware.nodes > 1 else "-",
         shown_seconds(one.all_reduce), _percent(plan.even), _percent(one.efficiency), "< 1 min" if one.hours < 1 / 60 else shown_seconds(one.hours * 3600),
         "< 0.1" if (spent := one.hours * hardware.processes) < 0.1 else f"{spent:,.1f}"]
        for one in shown
    ]  # fmt: skip
    return [("Time of the run with DDP", render_table(columns, rows, width=width))] if rows else []


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def verdict_sentence(plan: Plan) -> str:
    """Return the answer to "does it fit?" for the run as set."""
    settings, limit = plan.settings, plan.hardware.gpu_memory
    if not limit:
        return "Give --gpu_memory, such as 80GB, to learn what fits; without it everything is taken to fit."
    mine = _chosen(plan)
    gpu = f"a GPU of {shown_bytes(limit)}"
    needed = f"needs about {shown_bytes(mine.memory.total)} at its peak"
    if mine.verdict == "fits":
        return f"The run fits: method {settings.method} with DDP {needed} on {gpu}."
    if mine.verdict == "unknown":
        return f"The run may fit: method {settings.method} with DDP needs at least {shown_bytes(mine.memory.total)} on {gpu}."
    if mine.verdict == "tight":
        return f"The run may not fit: method {settings.method} with DDP {needed} on {gpu}, and {1 - FILLED:.0%} should stay free."
    others = [row for row in plan.memory if row.verdict in ("fits", "unknown")]
    said = f"The run does not fit: method {settings.method} with DDP {needed} on {gpu}. "
    if not others:
        return (
            f"{said}No method and sharding in the table fits either: take larger GPUs, a smaller model, or shorten "
            "--max_length."
        )
    certain = [row for row in others if row.verdict == "fits"]
    named = [f"{row.method} with {'DDP' if row.sharding == 'none' else row.config}" for row in certain or others]
    return f"{said}What {'fits' if certain else 'may fit'} by the table: {', '.join(named[:4])}."


def notes(plan: Plan) -> list[str]:
    """Return the sentences on what the tables rest on, and what they leave out."""
    hardware = plan.hardware
    said = [
        "Memory: peak is the highest of the backward pass, the optimizer step and loading. Up to "
        f"{FILLED:.0%} of a GPU counts as a fit. Runs took up to twice as much as a lower bound (docs/plan.md#memory)."
    ]
    if offloaded := [row for row in plan.memory if row.offload != "none" and row.verdict != "does not fit"]:
        kept = ", ".join(
            f"{row.method} with {row.config} {shown_bytes(row.memory.host * hardware.gpus_per_node)}"
            for row in offloaded
        )
        said.append(
            f"Host memory of a node: {kept}, at least. Every step moves it between host and GPUs; measured "
            "steps with ZeRO took about 5 to 10 times as long (docs/sharding.md#cpu-offload)."
        )
    if plan.shape.has_experts:
        said.append(
            "Mixture of experts: only one was measured, with FSDP2 (docs/sharding.md), so take every figure of memory as a lower bound."
            + (" With the transformers backend QLoRA leaves the experts in 16 bit." if plan.shape.experts else "")
        )
    if plan.rows.pixels is not None and (numbers := plan.shape.numbers_a_patch):
        said.append(
            f"Images: a {plan.rows.unit.removesuffix('s')} has {plan.rows.pixels.mean() / numbers:,.0f} patches on average, each of the work of "
            f"{plan.shape.tokens_a_pixel * numbers:.2g} tokens in the tower."
            + (" What a trained tower keeps was not held against a run on a GPU." if plan.shape.tower_trained else "")
        )
    if plan.settings.reference_model:
        said.append(
            f"Reference: {plan.settings.reference_model} is "
            + (
                "beside the model in each step, and works with DDP only."
                if plan.settings.streaming
                else "loaded beside the model before step 1, which counts as loading; it works with DDP and FSDP2."
            )
        )
    if hardware.inside is None and hardware.gpus_per_node > 1:
        said.append("The links inside a node are not counted: give --node_bandwidth (preflight measures it).")
    if plan.durations:
        said.append(
            "Time: all-reduce averages the gradients of a step; efficiency is a GPU's speed relative to one alone; even rows is the part that uneven rows allow, as a step "
            "lasts as long as its GPU with the most tokens. Start-up, evaluation, saving, congestion and slow machines come "
            "on top (docs/plan.md#time)."
        )
    else:
        said.append(NO_SPEED)
    if plan.rows.streamed:
        unit = plan.rows.unit.removesuffix("s")
        said.append(
            f"Rows are streamed: the plan is made from the first {counted(plan.rows.units, unit)}, and memory is that of "
            f"micro-batches with {plan.settings.longest_example:,} tokens per {unit}."
            + (" As in a run, CUDA graphs are assumed however much is padded." if plan.rung.captured else "")
        )
    if plan.settings.packing == "auto":
        decision = planned_packing(plan.settings, plan.shape, plan.hardware.capability, images=plan.rows.images)
        planned = "packed rows, for which this model has a kernel with torch 2.12 on"
        if not decision.packed:
            planned = f"padded rows, because {decision.reason}"
            if not plan.shape.packing.wrong:
                planned += "; --packing on plans packs"
        said.append(f"packing auto is planned as {planned}.")
    return said


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Return everything that was computed, in bytes and seconds."""
    rows = plan.rows
    memory = [
        {
            "method": m.method,
            "sharding": m.sharding,
            "offload": m.offload,
            "model_copies": m.copies,
            "gradient_checkpointing": m.checkpointing,
            "verdict": m.verdict,
            "total": m.memory.total,
            **dataclasses.asdict(m.memory),
        }
        for m in plan.memory
    ]
    given = ("settings", "shape", "rows", "hardware")
    content = dataclasses.asdict(plan)
    return {
        **{name: content[name] for name in given},
        "rows": {
            rows.unit: rows.units,
            "tokens": rows.tokens,
            "longest": rows.longest,
            "streamed": rows.streamed,
            "supervised": int(rows.supervised.sum()),
        },
        "plan": {**{name: value for name, value in content.items() if name not in given}, "memory": memory},
        "notes": [verdict_sentence(plan), *notes(plan)],
    }
