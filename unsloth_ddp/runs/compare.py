"""Compare two runs: settings, rows, machine, results, and the losses at common steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from unsloth_ddp.checkpoints import manifest
from unsloth_ddp.checkpoints.manifest import Damaged
from unsloth_ddp.config.options import OPTIONS
from unsloth_ddp.run.documents.described import MACHINE, gaps, results, show, show_result
from unsloth_ddp.run.documents.record import RunRecord, is_number
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.redaction import hide, printable
from unsloth_ddp.utils.tables import Column, fit_text, render_pairs, render_table

# Where the run is written says nothing about it.
NOT_COMPARED = ("run_name", "output_dir", "overwrite", "resume")
# How the tables call the two runs, whose names may be as wide as a terminal.
LETTERS = ("A", "B")
# Steps of a curve that the tables show; the JSON file has all that both runs logged.
SHOWN_STEPS = 20
Point = tuple[float, float]


@dataclass(frozen=True)
class Comparison:
    """In what two runs differ: {name: [value of the first, of the second]}, and their losses at common steps."""

    names: tuple[str, str]
    notes: list[str] = field(default_factory=list)
    settings: dict[str, list[Any]] = field(default_factory=dict)
    data: dict[str, list[Any]] = field(default_factory=dict)
    machine: dict[str, list[Any]] = field(default_factory=dict)
    results: dict[str, list[Any]] = field(default_factory=dict)
    losses: list[tuple[float, float, float]] = field(default_factory=list)
    evaluations: list[tuple[float, float, float]] = field(default_factory=list)


def compare_runs(first: RunRecord, second: RunRecord) -> Comparison:
    """Compare two runs in any state.

    Raises:
        UserError: both are the same folder.
    """
    runs = (first, second)
    if first.folder.resolve() == second.folder.resolve():
        raise UserError(f"--compare {first.folder} {second.folder} names one run twice; name two.")
    names = (first.name, second.name)
    if names[0] == names[1]:
        names = (
            f"{first.folder.resolve().parent.name}/{first.name}",
            f"{second.folder.resolve().parent.name}/{second.name}",
        )
    notes = [note for run, name in zip(runs, names, strict=True) for note in _notes(run, name)]
    return Comparison(
        names=names,
        notes=notes,
        settings=_differences(*({k: v for k, v in run.settings.items() if k not in NOT_COMPARED} for run in runs)),
        data=_differences(*map(_data, runs)),
        machine=_differences(*map(_machine, runs)),
        results={name: list(pair) for name, pair in _both(*map(_results, runs)).items()},
        losses=_common(first.series("loss"), second.series("loss")),
        evaluations=_common(first.series("eval_loss"), second.series("eval_loss")),
    )


def render_comparison(compared: Comparison) -> str:
    """Return the comparison as text, with a table for each part that differs."""
    named = render_pairs({letter: _clean(name) for letter, name in zip(LETTERS, compared.names, strict=True)})
    parts = [named, *(fit_text(_clean(note)) for note in compared.notes)]
    for title, differing in (("Settings", compared.settings), ("Data", compared.data), ("Machine", compared.machine)):
        if differing:
            rows = [[_clean(name), *(_clean(_value(value)) for value in pair)] for name, pair in differing.items()]
            parts.append(_table(title, rows))
        else:
            parts.append(f"{title}: no difference.")
    rows = []
    for name, pair in compared.results.items():
        shown = ["" if value is None else show_result(name, value) for value in pair]
        rows.append([name, *shown, _change(name, pair)])
    parts.append(_table("Results", rows, right=True, change=True))
    for title, points in (("Loss", compared.losses), ("Evaluation loss", compared.evaluations)):
        if points:
            spread = _spread(points, SHOWN_STEPS)
            table = [[f"step {step:,.0f}", f"{a:.4f}", f"{b:.4f}", f"{b - a:+.4f}"] for step, a, b in spread]
            parts.append(_table(title, table, right=True, change=True))
            if len(spread) < len(points):
                parts[-1] += (
                    f"\n{len(spread)} of the {len(points):,} steps that both runs logged; --json FILE writes all."
                )
    if not compared.losses:
        parts.append("Loss: no step was logged by both runs.")
    return "\n\n".join(parts)


def _spread(points: Sequence[Any], most: int) -> list[Any]:
    """Return at most so many points, evenly spread, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def _common(first: Sequence[Point], second: Sequence[Point]) -> list[tuple[float, float, float]]:
    # A step that a resumed run evaluated twice keeps the later value.
    others = dict(second)
    return [(step, value, others[step]) for step, value in dict(first).items() if step in others]


def _notes(run: RunRecord, name: str) -> list[str]:
    notes = []
    if run.state != "finished":
        kept = (
            f"its newest checkpoint, of step {run.step:,}" if run.checkpoint else "its settings: it has no checkpoint"
        )
        notes.append(f"{name} is {run.state}; it is compared by {kept}.")
    if unknown := [option for option in run.settings if option not in OPTIONS]:
        notes.append(f"{name} was made by another version of the kit: this one has no option {', '.join(unknown[:5])}.")
    notes += [f"{name}: {sentence}" for sentence in gaps(run)]
    if not run.record:
        notes.append(f"{name} has no record.json, as runs of earlier versions; its rows are not known.")
    return notes


def _both(first: dict[str, Any], second: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (first.get(name), second.get(name)) for name in {**first, **second}}


def _differences(first: dict[str, Any], second: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: [a, b] for name, (a, b) in _both(first, second).items() if a != b}


def _data(run: RunRecord) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if data := run.record.get("data"):
        train, evaluation = data["train"], data["evaluation"] or {}
        found = {name: train[name] for name in ("rows", "tokens", "supervised", "longest", "truncated", "dropped")}
        found["supervised share"] = f"{train['supervised'] / train['tokens']:.1%}" if train["tokens"] else None
        found |= {"evaluation rows": evaluation.get("rows", 0), "packs": data["packs"]}
    if run.checkpoint:
        try:
            identity = manifest.read_manifest(run.checkpoint).run
        except Damaged:
            identity = {}
        found |= {"checksum of the rows": identity.get("data"), "base weights": identity.get("model_weights")}
    return found


def _machine(run: RunRecord) -> dict[str, Any]:
    versions = {f"{name} version": value for name, value in (run.fact("versions") or {}).items()}
    return {**{name: run.fact(name) for name in MACHINE}, **versions}


def _results(run: RunRecord) -> dict[str, Any]:
    # JSON has no NaN.
    return {name: value for name, value in results(run).items() if is_number(value)}


def _change(name: str, pair: Sequence[Any]) -> str:
    first, second = pair
    if first is None or second is None:
        return ""
    if name in ("tokens/s", "peak memory", "training time", "tokens seen", "steps"):
        return f"{second / first - 1:+.1%}" if first else ""
    return f"{second - first:+.1%}" if name == "exact answers" else f"{second - first:+.4f}"


def _value(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else show(value)


def _clean(text: str) -> str:
    return hide(printable(text))


def _table(title: str, rows: list[list[str]], *, right: bool = False, change: bool = False) -> str:
    align: Any = "right" if right else "left"
    columns = [Column(title), *(Column(letter, align) for letter in LETTERS)]
    if change:
        columns.append(Column("change", "right"))
    return render_table(columns, rows)
