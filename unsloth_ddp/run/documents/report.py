"""Write report.html: a run on one page, in one file that needs no server, no script and no network."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jinja2

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.images.files import THUMBNAIL_START
from unsloth_ddp.run.documents.charts import BOTTOM, HEIGHT, LEFT, RIGHT, WIDTH, Chart, Line, line_chart
from unsloth_ddp.run.documents.described import MACHINE, describe_data, describe_method, gaps, results, show
from unsloth_ddp.run.documents.files import REPORT_FILE
from unsloth_ddp.run.documents.record import RunRecord, is_number
from unsloth_ddp.run.next_steps import next_steps
from unsloth_ddp.utils.files.safe import write_whole
from unsloth_ddp.utils.redaction import hide
from unsloth_ddp.utils.units import GIB, counted, shown_bytes

TEMPLATES = Path(__file__).parent / "templates"
THUMBNAIL = re.compile(f"{THUMBNAIL_START}[A-Za-z0-9+/=]+")
# What a page shows of long lists.
OPEN_ANSWERS, MOST_ANSWERS = 4, 50


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
    # What the template prints is escaped, and made printable.
    loader, undefined = jinja2.FileSystemLoader(TEMPLATES), jinja2.StrictUndefined
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=undefined, finalize=_printable)
    default = dataclasses.asdict(Settings())
    settings = [(name, show(value)) for name, value in run.settings.items()]
    return environment.get_template("report.html.jinja").render(
        name=run.name,
        state=run.state,
        sentence=_sentence(run),
        problems=[
            *gaps(run),
            *([] if run.record else ["The run has no record.json, so rows, parts and answers are not known."]),
        ],
        tiles=_tiles(run),
        charts=curves(run),
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=WIDTH - RIGHT,
        bottom=HEIGHT - BOTTOM,
        answers=_answers(run),
        data=_data(run),
        first_image=_first_image(run),
        given=[(name, value) for name, value in settings if default.get(name) != run.settings[name]],
        settings=settings,
        hardware=_hardware(run),
        versions=list((run.fact("versions") or {}).items()),
        parts=run.parts,
        next_steps=next_steps(run),
    )


def curves(run: RunRecord) -> list[Chart]:
    """Return the charts of what was logged, those without a value left out."""

    def chart(title: str, lines: dict[str, str], **options: Any) -> Chart | None:
        return line_chart(title, [Line(name, run.series(key, gaps=True)) for name, key in lines.items()], **options)

    evaluated = run.last("eval_loss") is not None
    note = "" if evaluated else "The run has no evaluation rows, or ended before the first evaluation."
    both = {"training": "rewards/accuracies", "evaluation": "eval_rewards/accuracies"}
    memory = Line("memory", [(step, peak / GIB) for step, peak in run.series("peak_memory_bytes")])
    charts = [
        chart("Loss", {"training": "loss", "evaluation": "eval_loss"}, note=note),
        chart("Rewards", {"chosen": "rewards/chosen", "rejected": "rewards/rejected"}),
        chart("KL of the model and its reference", {"training": "kl", "evaluation": "eval_kl"}, from_zero=True),
        chart("Reward accuracy", both, from_zero=True, shown="{:.0%}".format),
        chart("Learning rate", {"learning rate": "learning_rate"}, from_zero=True),
        chart("Tokens per second, all ranks", {"tokens per second": "tokens_per_second"}, from_zero=True),
        line_chart("Peak memory of the fullest rank", [memory], from_zero=True, shown="{:.3g} GiB".format),
        chart("Gradient norm", {"gradient norm": "grad_norm"}, from_zero=True),
    ]
    return [chart for chart in charts if chart is not None]


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


def _tiles(run: RunRecord) -> list[dict[str, str]]:
    accuracy = run.summary.get("demo_accuracy_before")
    notes = {
        "steps": f"of {run.max_steps:,}" if run.max_steps else "",
        "loss": "last log line",
        "exact answers": f"{accuracy:.1%} before" if is_number(accuracy) else "",
        "peak memory": "of the fullest rank",
        "training time": f"in {len(run.parts)} parts" if len(run.parts) > 1 else "",
    }
    return [{"name": name, "value": text, "note": notes.get(name, "")} for name, text in results(run).items()]


def _answers(run: RunRecord) -> dict[str, Any] | None:
    answers = run.record.get("answers")
    if not answers or not isinstance(answers, list):
        return None
    exact_before, exact_after = (
        sum(bool(answer[f"exact_{when}"]) for answer in answers) for when in ("before", "after")
    )
    count = len(answers)
    shown = f" The page shows the first {MOST_ANSWERS}." if count > MOST_ANSWERS else ""
    return {
        "sentence": f"{exact_before:,} of {count:,} held-out questions were answered exactly before training, "
        f"{exact_after:,} after." + shown,
        "open": answers[:OPEN_ANSWERS],
        "folded": answers[OPEN_ANSWERS:MOST_ANSWERS],
    }


def _data(run: RunRecord) -> list[tuple[str, str]]:
    sources = [("rows from", show(run.settings.get("dataset")))]
    if run.settings.get("eval_dataset"):
        sources.append(("evaluated on", show(run.settings["eval_dataset"])))
    return [*sources, *describe_data(run)]


def _first_image(run: RunRecord) -> str | None:
    """Return the data URI of the thumbnail, if it is one."""
    uri = (run.record.get("data") or {}).get("first_image")
    return uri if isinstance(uri, str) and THUMBNAIL.fullmatch(uri) else None


def _hardware(run: RunRecord) -> list[tuple[str, str]]:
    machine = {name: run.fact(name) for name in MACHINE}
    # Of replicas there is one but with hybrid sharding.
    machine = {name: value for name, value in machine.items() if (name, value) != ("copies", 1)}
    hardware = dict((run.parts[-1].get("hardware") if run.parts else None) or {})
    if memory := hardware.pop("gpu_memory_bytes", None):
        hardware["gpu_memory"] = shown_bytes(memory)
    if seconds := dict(run.summary.get("seconds") or {}):
        total = seconds.pop("to_first_step", 0)
        parts = ", ".join(f"{name.replace('_', ' ')} {value:.0f} s" for name, value in seconds.items() if value >= 0.5)
        hardware["time to the first step"] = f"{total:.0f} s" + (f" ({parts})" if parts else "")
    return [(name.replace("_", " "), show(value)) for name, value in {**machine, **hardware}.items() if value]
