"""Write report.html: a run on one page, in one file that needs no server, no script and no network."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jinja2

from unsloth_ddp.config.options import Settings
from unsloth_ddp.run.documents.charts import Chart, Line, line_chart
from unsloth_ddp.run.documents.described import (
    MACHINE,
    describe_data,
    describe_method,
    gaps,
    results,
    show,
    show_result,
)
from unsloth_ddp.run.documents.files import REPORT_FILE
from unsloth_ddp.run.documents.record import RunRecord, is_number
from unsloth_ddp.run.next_steps import next_steps
from unsloth_ddp.utils.files.safe import write_whole
from unsloth_ddp.utils.redaction import hide
from unsloth_ddp.utils.units import GIB, counted, shown_bytes

TEMPLATES = Path(__file__).parent / "templates"
# What a page shows of long lists.
OPEN_ANSWERS, MOST_ANSWERS, MOST_RANKS = 4, 50, 32


@functools.cache
def templates() -> jinja2.Environment:
    """Return the templates; what they print is escaped for HTML and XML, whatever the file's name."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_printable,
    )


def write_report(run: RunRecord) -> Path:
    """Write the report of a run into its folder, whole or not at all, and return its path.

    Raises:
        OSError: it cannot be written.
    """
    path = run.folder / REPORT_FILE
    write_whole(path, render_report(run))
    return path


def render_report(run: RunRecord) -> str:
    """Return the report of a run as HTML."""
    parts = run.parts
    return (
        templates()
        .get_template("report.html.jinja")
        .render(
            name=run.name,
            state=run.state,
            sentence=_sentence(run),
            problems=_problems(run),
            tiles=_tiles(run),
            charts=curves(run),
            ranks=_ranks(run),
            answers=_answers(run),
            data=_data(run),
            given=_given(run.settings),
            settings=[(name, show(value)) for name, value in run.settings.items()],
            hardware=_hardware(run),
            versions=list((run.fact("versions") or {}).items()),
            parts=[_part(part) for part in parts],
            next_steps=next_steps(run),
        )
    )


def curves(run: RunRecord) -> list[Chart]:
    """Return the charts of what was logged, those without a value left out."""
    memory = [
        (float(entry["step"]), max(values) / GIB)
        for entry in run.history
        if (values := _per_rank(entry, "memory_bytes"))
    ]
    charts = [
        loss_chart(run),
        *pair_charts(run),
        line_chart("Learning rate", [Line("learning rate", run.series("learning_rate"))], from_zero=True),
        line_chart("Tokens per second, all ranks", [Line("tokens/s", run.series("tokens_per_second"))], from_zero=True),
        line_chart(
            "Memory of the fullest rank", [Line("memory", memory)], from_zero=True, shown=lambda gib: f"{gib:.3g} GiB"
        ),
        line_chart("Gradient norm", [Line("gradient norm", run.series("grad_norm"))], from_zero=True),
    ]
    return [chart for chart in charts if chart is not None]


def pair_charts(run: RunRecord) -> list[Chart | None]:
    """Return the charts of a run that compares answers; None for what was not logged."""
    rewards = [Line(name, run.series(f"rewards/{name}", gaps=True)) for name in ("chosen", "rejected")]
    accuracy = [
        Line(name, run.series(key, gaps=True))
        for name, key in (("training", "rewards/accuracies"), ("evaluation", "eval_rewards/accuracies"))
    ]
    return [
        line_chart("Rewards", rewards),
        line_chart("KL of the model and its reference", [Line("kl", run.series("kl", gaps=True))], from_zero=True),
        line_chart("Reward accuracy", accuracy, from_zero=True, shown="{:.0%}".format),
    ]


def loss_chart(run: RunRecord) -> Chart | None:
    """Return the chart of training and evaluation loss; None if nothing was logged."""
    found = run.series("eval_loss", gaps=True)
    return line_chart(
        "Loss",
        [Line("training", run.series("loss", gaps=True)), Line("evaluation", found)],
        note="" if found else "The run has no evaluation rows, or ended before the first evaluation.",
    )


def _printable(value: Any) -> Any:
    """Return a value that a template prints, with secrets hidden and without halves of characters."""
    if isinstance(value, jinja2.Undefined) or type(value) is not str:
        return value
    return hide(value).encode("utf-8", "replace").decode("utf-8")


def _sentence(run: RunRecord) -> str:
    model = str(run.settings["model"]).rstrip("/").rpartition("/")[2]
    processes, device = run.fact("world_size"), run.fact("device")
    on = f" on {processes} x {device}" if processes and device else ""
    end = f"{run.step:,} of {counted(run.max_steps, 'step')}" if run.max_steps else counted(run.step, "step")
    cause = run.parts[-1].get("cause") if run.parts else None
    if run.state == "stopped":
        end += f"; stopped on {cause}"
    elif run.state == "unfinished":
        end += "; the run was killed or failed, or still runs, and this is what its newest checkpoint holds"
    return f"{model}, {describe_method(run)}{on}: {end}."


def _problems(run: RunRecord) -> list[str]:
    found = gaps(run)
    if not run.record:
        found.append("The run has no record.json, so rows, parts and answers are not known.")
    return found


def _tiles(run: RunRecord) -> list[dict[str, str]]:
    before = run.summary.get("demo_accuracy_before")
    notes = {
        "steps": f"of {run.max_steps:,}" if run.max_steps else "",
        "loss": "last log line",
        "exact answers": f"{before:.1%} before" if is_number(before) else "",
        "peak memory": "of the fullest rank",
        "training time": f"in {len(run.parts)} parts" if len(run.parts) > 1 else "",
    }
    return [
        {"name": name, "value": show_result(name, value), "note": notes.get(name, "")}
        for name, value in results(run).items()
    ]


def _per_rank(entry: dict[str, Any], name: str) -> list[float]:
    """Return a log entry's value of each rank; empty if it has none."""
    ranks = entry.get("ranks")
    values = ranks.get(name) if isinstance(ranks, dict) else None
    return values if isinstance(values, list) and all(map(is_number, values)) else []


def _ranks(run: RunRecord) -> dict[str, Any] | None:
    """Return the mean own seconds a step and the last memory of the slowest ranks; None for one process."""
    entries = [entry for entry in run.history if _per_rank(entry, "memory_bytes")]
    memory = _per_rank(entries[-1], "memory_bytes") if entries else []
    if len(memory) < 2:
        return None
    timed = [s for entry in entries if len(s := _per_rank(entry, "seconds")) == len(memory)]
    means = [sum(values) / len(timed) for values in zip(*timed, strict=True)]
    order = sorted(range(len(memory)), key=lambda rank: -means[rank] if means else rank)
    sentence = "Own seconds were not measured: with sharded weights every forward pass waits for other ranks."
    if means:
        sentence = (
            "Own seconds are those of a step in which a rank waits for no other: reading its rows, and its forward and "
            "backward passes without the last backward pass, in which gradients are exchanged. The slowest rank makes all "
            "others wait."
        )
    if len(memory) > MOST_RANKS:
        sentence += f" The table has the first {MOST_RANKS} of {len(memory)} ranks."
    return {
        "rows": [
            (rank, f"{means[rank]:.4f}" if means else "-", shown_bytes(memory[rank])) for rank in order[:MOST_RANKS]
        ],
        "sentence": sentence,
    }


def _answers(run: RunRecord) -> dict[str, Any] | None:
    answers = run.record.get("answers")
    if not answers or not isinstance(answers, list):
        return None
    before, after = (sum(bool(one[f"exact_{when}"]) for one in answers) for when in ("before", "after"))
    count = len(answers)
    shown = f" The page shows the first {MOST_ANSWERS}." if count > MOST_ANSWERS else ""
    return {
        "sentence": f"{before:,} of {count:,} held-out questions were answered exactly before training, {after:,} after."
        + shown,
        "open": answers[:OPEN_ANSWERS],
        "folded": answers[OPEN_ANSWERS:MOST_ANSWERS],
    }


def _data(run: RunRecord) -> list[tuple[str, str]]:
    sources = [("rows from", show(run.settings.get("dataset")))]
    if run.settings.get("eval_dataset"):
        sources.append(("evaluated on", show(run.settings["eval_dataset"])))
    return [*sources, *describe_data(run)]


def _given(settings: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the settings that are not the defaults."""
    default = dataclasses.asdict(Settings())
    return [(name, show(value)) for name, value in settings.items() if default.get(name) != value]


def _hardware(run: RunRecord) -> list[tuple[str, str]]:
    found = {name: run.fact(name) for name in MACHINE}
    hardware = dict((run.parts[-1].get("hardware") if run.parts else None) or {})
    if memory := hardware.pop("gpu_memory_bytes", None):
        hardware["gpu_memory"] = shown_bytes(memory)
    if seconds := dict(run.summary.get("seconds") or {}):
        total = seconds.pop("to_first_step", 0)
        parts = ", ".join(f"{name.replace('_', ' ')} {value:.0f} s" for name, value in seconds.items())
        hardware["time to the first step"] = f"{total:.0f} s ({parts})"
    return [(name.replace("_", " "), show(value)) for name, value in {**found, **hardware}.items() if value]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    on = f"{part.get('world_size')} x {part.get('device')}"
    ended = str(part.get("ended") or "")
    cause = part.get("cause") or ("its last step" if ended else "a kill or an error")
    return {
        "began": str(part.get("began", ""))[:19].replace("T", " "),
        "ended": ended[:19].replace("T", " "),
        "first": part.get("first_step", ""),
        "last": part.get("last_step", ""),
        "on": on,
        "cause": cause,
    }
