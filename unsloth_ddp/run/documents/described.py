"""Put what is known of a run into names and texts, for its report, its model card and the comparison of runs."""

import json
from collections.abc import Callable
from typing import Any

from unsloth_ddp.run.documents.record import RunRecord, is_number
from unsloth_ddp.utils.units import counted, shown_bytes, shown_seconds

METHODS = {"lora": "LoRA", "qlora": "QLoRA (4-bit base weights)", "full": "full training"}
TASKS = {"dpo": "DPO", "orpo": "ORPO", "simpo": "SimPO", "cpo": "CPO", "kto": "KTO"}
# What a run computes on and how, by the names of summary.json and of a record's parts.
MACHINE = (
    "world_size", "nodes", "device", "sharding", "copies", "backend", "precision", "gradient_checkpointing",
    "global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps",
)  # fmt: skip


def results(run: RunRecord) -> dict[str, str]:
    """Return the texts of the known results, by name; a loss may be infinite or not a number."""
    number, loss, share = "{:,.0f}".format, "{:.4f}".format, "{:.1%}".format
    values: dict[str, tuple[Any, Callable[[float], str]]] = {
        "steps": (run.step, number),
        "loss": (run.last("loss"), loss),
        "mean training loss": (run.summary.get("train_loss"), loss),
        "evaluation loss": (run.eval_loss, loss),
        "reward accuracy": (run.last("eval_rewards/accuracies"), share),
        "exact answers": (run.summary.get("demo_accuracy_after"), share),
        "tokens seen": (run.summary.get("tokens"), number),
        "tokens/s": (run.tokens_per_second, number),
        "peak memory": (run.summary.get("peak_memory_bytes"), shown_bytes),
        "training time": (run.seconds, shown_seconds),
    }
    return {
        name: form(value) if is_number(value) else "not a number"
        for name, (value, form) in values.items()
        if is_number(value) or isinstance(value, float)
    }


def describe_method(run: RunRecord) -> str:
    """Return the method of a run, after its task if it trains on preferences."""
    method, task = str(run.settings.get("method")), TASKS.get(str(run.settings.get("task")))
    return (f"{task} and " if task else "") + METHODS.get(method, method)


def describe_data(run: RunRecord) -> list[tuple[str, str]]:
    """Return names and texts of the rows; empty if the run has no record."""
    data = run.record.get("data")
    if not data:
        return []
    train, evaluation = data["train"], data["evaluation"]
    pairs = [
        ("training rows", f"{'the first rows: ' if data['streamed'] else ''}{train['rows']:,}"),
        ("tokens", f"{train['tokens']:,}, {train['tokens'] / train['rows']:,.0f} a row"),
        ("supervised tokens", f"{train['supervised']:,} ({train['supervised'] / train['tokens']:.1%})"),
        ("longest row", counted(train["longest"], "token")),
    ]
    for name in ("truncated", "dropped"):
        if train[name]:
            pairs.append((f"{name} rows", f"{train[name]:,} over {run.settings.get('max_length')} tokens"))
    pairs.append(("packing", f"{counted(data['packs'], 'pack')} ({data['packing']})" if data["packs"] else "off"))
    return [*pairs, ("evaluation rows", f"{evaluation['rows']:,}" if evaluation else "none")]


def gaps(run: RunRecord) -> list[str]:
    """Return a sentence for each kind of loss that was not always a number."""
    sentences = []
    for name, key in (("training", "loss"), ("evaluation", "eval_loss")):
        logged = run.series(key, gaps=True)
        missing = [step for step, value in logged if not is_number(value)]
        if missing:
            sentences.append(
                f"The {name} loss was not a number (NaN or infinite) in {len(missing):,} of {len(logged):,} log lines, "
                f"first at step {missing[0]:,.0f}."
            )
    return sentences


def show(value: Any) -> str:
    if value is None or value in ([], {}):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return json.dumps(value) if isinstance(value, dict) else str(value)
