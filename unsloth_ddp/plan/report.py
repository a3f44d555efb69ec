"""Write a plan as tables and JSON."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from unsloth_ddp.plan.compute import MemoryRow, Plan, guess_hours
from unsloth_ddp.sizing.choose import backend_of, planned_packing, precision_of
from unsloth_ddp.utils.memory_limits import FILLED
from unsloth_ddp.utils.tables import Column, fit_text, output_width, render_pairs, render_table, wrap_text
from unsloth_ddp.utils.units import GIB, MIB, counted, shown_bytes, shown_seconds

TIME_IS_A_GUESS = (
    "The time is a guess from measured runs with packed rows (docs/speed.md): padded rows take longer, and start-up, "
    "evaluation and saving come on top. A run shows the time that is left from its first steps on."
)
# Columns of the table of memory that a narrow terminal leaves out; the JSON file has them.
NOT_IN_NARROW = ("optimizer", "working", "loading")
COLOURS = {"fits": "green", "tight": "yellow", "unknown": "yellow", "does not fit": "bold red"}


def render_plan(plan: Plan, *, width: int | None = None, colour: bool = False) -> str:
    """Return the whole plan as text."""
    width = width or output_width()
    gpu_memory = plan.hardware.gpu_memory
    of_gpu = f" (of {shown_bytes(gpu_memory)})" if gpu_memory else ""
    unit, size = ("GiB", GIB) if max(row.memory.total for row in plan.memory) >= GIB else ("MiB", MIB)
    title = f"Memory of one GPU{of_gpu} in {unit}; * is the run as set, ≥ a lower bound"
    blocks = [
        ["Run", render_pairs(dict(_run_rows(plan)), width=width)],
        [fit_text(title, width), _memory_table(plan, size, width, colour), *wrap_text(verdict_sentence(plan), width)],
        ["\n  ".join(wrap_text(f"- {note}", width - 2)) for note in notes(plan)],
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks)


def _run_rows(plan: Plan) -> list[tuple[str, str]]:
    settings, shape, rows, hardware = plan.settings, plan.shape, plan.rows, plan.hardware
    batch, unit = plan.batch, rows.unit.removesuffix("s")
    amount = f"{'the first ' if rows.streamed else ''}{rows.units:,}"
    per_epoch = "" if rows.streamed else f" ({batch.steps_per_epoch(rows.units):,} per epoch)"
    return [
        ("model", f"{settings.model} ({shape.parameters:,} parameters; LoRA trains {shape.trained('lora'):,})"),
        ("training", f"method {settings.method}, {precision_of(settings)}, backend {backend_of(settings)}, "
                     f"gradient_checkpointing {_as_set(plan).checkpointing}, {settings.optim}"),
        ("hardware", f"{counted(hardware.nodes, 'node')} x {counted(hardware.gpus_per_node, 'GPU')}"),
        (rows.unit, f"{amount} ({counted(rows.tokens, 'token')}, mean {rows.mean:,.0f}, longest {rows.longest:,})"),
        ("global batch", f"{counted(batch.per_device, unit)} per device x {batch.accumulation} accumulation x "
                         f"{counted(batch.processes, 'process')} = {counted(batch.global_batch, unit)}"),
        ("tokens per step", f"{plan.tokens_a_step:,.0f} on average; the largest micro-batch has {plan.micro_batch:,}"
                            f"{' with padding' if rows.packing is None else ''}"),
        ("CUDA graphs", describe_graphs(plan)),
        ("steps", f"{plan.steps:,}{per_epoch}"),
        ("time, a guess", _guessed_time(plan)),
        ("model work", f"{shape.flops_a_token(settings.method) / 1e9:,.4g} GFLOP per token"),
    ]  # fmt: skip


def _guessed_time(plan: Plan) -> str:
    fewest, most_hours, gpu = guess_hours(plan)
    range_of_time = f"{shown_seconds(fewest * 3600)} to {shown_seconds(most_hours * 3600)}"
    if most_hours < 1 / 60:
        range_of_time = "under a minute"
    return f"{range_of_time} on {counted(plan.hardware.processes, 'GPU')} ({gpu})"


def describe_graphs(plan: Plan) -> str:
    """Return whether a run with DDP is planned with CUDA graphs, and the reason."""
    if plan.rung.captured:
        return f"on: {plan.graphs}"
    refused = "; a run refuses --cuda_graphs on" if plan.settings.cuda_graphs == "on" else ""
    return f"off: {plan.graphs}{refused}"


def _memory_table(plan: Plan, unit: int, width: int, colour: bool) -> str:
    numbers = ("weights", "gradients", "optimizer", "working", "loading", "peak")
    columns = [Column("method"), Column("sharding"), Column("recompute")]
    columns += [Column(name, "right", optional=name in NOT_IN_NARROW) for name in numbers]
    rows = []
    for row in plan.memory:
        memory = row.memory
        working = memory.copies + memory.activations
        amounts = (memory.weights, memory.gradients, memory.optimizer, working, memory.loading)
        method = f"{row.method}*" if row is _as_set(plan) else row.method
        peak = f"{'≥' if memory.lower_bound else ''}{memory.total / unit:,.1f}"
        # Its own name would make the widest table wrap.
        config = "hybrid" if row.copies > 1 else row.config
        rows.append([method, config, row.checkpointing, *(f"{n / unit:,.1f}" for n in amounts), peak, row.verdict])
    columns.append(Column("verdict", styles=COLOURS))
    if not plan.hardware.gpu_memory:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return render_table(columns, rows, width=width, colour=colour)


def _as_set(plan: Plan) -> MemoryRow:
    """Return the row of the run as it is set: with DDP, unless a launcher says otherwise."""
    return next(row for row in plan.memory if row.method == plan.settings.method and row.sharding == "none")


def verdict_sentence(plan: Plan) -> str:
    """Return the answer to "does it fit?" for the run as set."""
    limit = plan.hardware.gpu_memory
    if not limit:
        return "Give --gpu_memory, such as 80GB, to learn what fits; without it everything is taken to fit."
    row = _as_set(plan)
    run = f"method {plan.settings.method} with DDP needs"
    peak = f"{shown_bytes(row.memory.total)} at its peak on a GPU of {shown_bytes(limit)}"
    if row.verdict == "fits":
        return f"The run fits: {run} about {peak}."
    if row.verdict == "unknown":
        return f"The run may fit: {run} at least {peak}."
    if row.verdict == "tight":
        return f"The run may not fit: {run} about {peak}, and {1 - FILLED:.0%} should stay free."
    refusal = f"The run does not fit: {run} about {peak}. "
    fitting = [row for row in plan.memory if row.verdict == "fits"]
    others = fitting or [row for row in plan.memory if row.verdict == "unknown"]
    if not others:
        return (
            f"{refusal}No method and sharding in the table fits either: take larger GPUs, a smaller model, or shorten "
            "--max_length."
        )
    names = [f"{row.method} with {'DDP' if row.sharding == 'none' else row.config}" for row in others[:4]]
    return f"{refusal}What {'fits' if fitting else 'may fit'} by the table: {', '.join(names)}."


def notes(plan: Plan) -> Iterator[str]:
    """Yield the sentences on what the tables rest on, and what they leave out."""
    settings, shape, rows = plan.settings, plan.shape, plan.rows
    unit = rows.unit.removesuffix("s")
    yield (
        "Memory: peak is the highest of the backward pass, the optimizer step and loading. Up to "
        f"{FILLED:.0%} of a GPU counts as a fit. Runs took up to twice as much as a lower bound (docs/plan.md#memory)."
    )
    if offloaded := [row for row in plan.memory if row.offload != "none" and row.verdict != "does not fit"]:
        per_node = plan.hardware.gpus_per_node
        amounts = (f"{row.method} with {row.config} {shown_bytes(row.memory.host * per_node)}" for row in offloaded)
        yield (
            f"Host memory of a node: {', '.join(amounts)}, at least. Every step moves it between host and GPUs; "
            "measured steps with ZeRO took about 5 to 10 times as long (docs/sharding.md#cpu-offload)."
        )
    if shape.has_experts:
        yield (
            "Mixture of experts: only one was measured, with FSDP2 (docs/sharding.md), so take every figure of memory "
            "as a lower bound."
            + (" With the transformers backend QLoRA leaves the experts in 16 bit." if shape.experts else "")
        )
    if rows.pixels is not None and (numbers := shape.numbers_a_patch):
        yield (
            f"Images: a {unit} has {rows.pixels.mean() / numbers:,.0f} patches on average, each of the work of "
            f"{shape.tokens_a_pixel * numbers:.2g} tokens in the tower."
            + (" What a trained tower keeps was not held against a run on a GPU." if shape.tower_trained else "")
        )
    if settings.reference_model:
        use = "loaded beside the model before step 1, which counts as loading; it works with DDP and FSDP2."
        if settings.streaming:
            use = "beside the model in each step, and works with DDP only."
        yield f"Reference: {settings.reference_model} is {use}"
    yield TIME_IS_A_GUESS
    if rows.streamed:
        yield (
            f"Rows are streamed: the plan is made from the first {counted(rows.units, unit)}, and memory is that of "
            f"micro-batches with {settings.longest_example:,} tokens per {unit}."
            + (" As in a run, CUDA graphs are assumed however much is padded." if plan.rung.captured else "")
        )
    if settings.packing == "auto":
        decision = planned_packing(settings, shape, plan.hardware.capability, images=rows.images)
        planned = "packed rows, for which this model has a kernel with torch 2.12 on"
        if not decision.packed:
            packs = "" if shape.packing.wrong else "; --packing on plans packs"
            planned = f"padded rows, because {decision.reason}{packs}"
        yield f"packing auto is planned as {planned}."


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Return everything that was computed, in bytes and seconds."""
    content, rows = dataclasses.asdict(plan), plan.rows
    inputs = {name: content.pop(name) for name in ("settings", "shape", "rows", "hardware")}
    inputs["rows"] = {
        rows.unit: rows.units,
        "tokens": rows.tokens,
        "longest": rows.longest,
        "streamed": rows.streamed,
        "supervised": int(rows.supervised.sum()),
    }
    for row, written in zip(plan.memory, content["memory"], strict=True):
        written |= {
            **written.pop("memory"),
            "model_copies": written.pop("copies"),
            "gradient_checkpointing": written.pop("checkpointing"),
            "total": row.memory.total,
        }
    return {**inputs, "plan": content, "notes": [verdict_sentence(plan), *notes(plan)]}
