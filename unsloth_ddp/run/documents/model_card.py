"""Write the model card of a finished adapter or model.

The Hub shows the card, so it names local models and files without their folders.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jinja2

from unsloth_ddp.config.questionable import ADAPTER
from unsloth_ddp.config.task_options import TaskSettings
from unsloth_ddp.run.documents.described import describe_data, describe_method, results, show
from unsloth_ddp.run.documents.files import CARD_FILE
from unsloth_ddp.run.documents.record import RunRecord, is_number
from unsloth_ddp.run.documents.report import TEMPLATES
from unsloth_ddp.utils.files.safe import write_new_file
from unsloth_ddp.utils.redaction import hide, printable
from unsloth_ddp.utils.units import counted

# The settings that say how the weights came to be, apart from model and data, which have places of their own.
SETTINGS = (
    "method", *ADAPTER, "full_weights", "max_length", "overlong", "loss_on", "num_train_epochs", "max_steps",
    "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "optim", "seed",
)  # fmt: skip
FULL_ONLY = ("full_weights",)


def write_card(run: RunRecord) -> list[Path]:
    """Write the card of a run into its folder, and into the merged model's; return the cards.

    Raises:
        OSError: they cannot be written.
    """
    merged = run.folder / "merged"
    folders = {run.folder: run.settings.get("method") != "full"}
    if run.settings.get("merge") and merged.is_dir():
        folders[merged] = False
    for folder, is_adapter in folders.items():
        write_new_file(folder / CARD_FILE, render_card(run, adapter=is_adapter))
    return [folder / CARD_FILE for folder in folders]


def render_card(run: RunRecord, *, adapter: bool) -> str:
    """Return the card as Markdown with the Hub's metadata."""
    # Escaping is that of Markdown here (see code), not of HTML.
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES))  # noqa: S701
    environment.filters |= {"code": code, "plain": plain}
    settings = run.settings
    name = str(settings["model"])
    full = settings.get("method") == "full"
    body = environment.get_template("card.md.jinja").render(
        title=plain(run.name),
        kind="adapter" if adapter else "model",
        settings=settings,
        base=name.rstrip("/").rpartition("/")[2] if _is_local(run) else name,
        method=describe_method(run),
        rows=_rows(run),
        unsloth=run.fact("backend") == "unsloth",
        results=_results(run),
        auto_class=_auto_class(run),
        quantized=adapter and settings.get("method") == "qlora",
        unquantized=_loads_images(run) and run.record.get("model", {}).get("unquantized"),
        place=json.dumps(hide(str(settings.get("hub_model_id") or run.name))),
        sources=_sources(run),
        data=describe_data(run),
        shown=[
            (name, show(value))
            for name, value in _shown_settings(settings).items()
            if name not in (ADAPTER if full else FULL_ONLY)
        ],
        versions=run.fact("versions") or {},
        licence=run.record.get("model", {}).get("license"),
    )
    return f"---\n{_metadata(run, adapter=adapter)}\n---\n\n{body}"


def _shown_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of SETTINGS, after the task of a preference run and its options with other values."""
    shown = {name: settings[name] for name in SETTINGS if name in settings}
    standard = dataclasses.asdict(TaskSettings())
    task_settings = TaskSettings(**{name: settings.get(name, value) for name, value in standard.items()})
    if not task_settings.trains_preferences:
        return shown
    resolved = {"beta": task_settings.resolved_beta, "sft_weight": task_settings.resolved_sft_weight or None}
    of_task = dataclasses.asdict(task_settings) | resolved
    return {name: value for name, value in of_task.items() if value != standard[name]} | shown


def code(text: Any) -> str:
    """Return a text as a Markdown code span, in which nothing is markup, fit for a table's cell."""
    shown = printable(hide(str(text))).replace("`", "'").replace("|", "\\|").strip()
    return f"`{shown}`" if shown else "none"


def plain(text: Any) -> str:
    """Return a text as Markdown prose, with everything escaped that is markup there."""
    return re.sub(r"([\\`*_{}\[\]()<>#+!|~&-])", r"\\\1", printable(hide(str(text))))


def _is_local(run: RunRecord) -> bool:
    return bool(run.record.get("model", {}).get("local", True))


def _metadata(run: RunRecord, *, adapter: bool) -> str:
    from huggingface_hub import ModelCardData

    licence = run.record.get("model", {}).get("license") or {}
    tags = [
        *(["unsloth"] if run.fact("backend") == "unsloth" else []),
        "trl",
        str(run.settings.get("task", "sft")),
        *([str(run.settings.get("method"))] if adapter else []),
    ]
    data = ModelCardData(
        # The Hub takes repository ids only.
        base_model=None if _is_local(run) else hide(str(run.settings["model"])),
        library_name="peft" if adapter else "transformers",
        pipeline_tag="image-text-to-text" if _loads_images(run) else "text-generation",
        tags=tags,
        datasets=run.record.get("data", {}).get("hub") or None,
        **licence,
    )
    return str(data.to_yaml()).strip()


def _rows(run: RunRecord) -> str:
    data = run.record.get("data")
    if not data:
        return "supervised rows"
    return "a stream of rows" if data["streamed"] else counted(data["train"]["rows"], "row")


def _results(run: RunRecord) -> list[tuple[str, str]]:
    # The last logged loss is that of a few steps; the mean says more.
    pairs = [(name, text) for name, text in results(run).items() if name != "loss"]
    accuracy_before = run.summary.get("demo_accuracy_before")
    if is_number(accuracy_before):
        pairs.append(("exact answers before training", f"{accuracy_before:.1%}"))
    if run.fact("device"):
        pairs.append(("trained on", f"{run.fact('world_size')} x {plain(run.fact('device'))}, {run.fact('precision')}"))
    return pairs


def _sources(run: RunRecord) -> str:
    hub = set(run.record.get("data", {}).get("hub") or [])
    return ", ".join(
        code(name if name in hub else Path(name).name) for name in map(str, run.settings.get("dataset") or [])
    )


def _loads_images(run: RunRecord) -> bool:
    return _auto_class(run) == "AutoModelForImageTextToText"


def _auto_class(run: RunRecord) -> str:
    """Return the class of Transformers that loads the model; records of earlier versions name none."""
    return str(run.record.get("model", {}).get("auto_class", "AutoModelForCausalLM"))
