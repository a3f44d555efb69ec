"""Read and write measured speeds, and estimate from them the speed of another model.

A calibration is a JSON file:

    {"format": 1, "gpu": "NVIDIA H200", "source": "who measured what, when, with which versions",
     "measurements": [{"name": ..., "method": "lora", "backend": "unsloth", "precision": "bf16",
                       "gradient_checkpointing": "none", "rows": "full", "tokens_a_micro_batch": 16384,
                       "flops_a_token": 3.05e10, "tokens_per_second_per_gpu": 17100}, ...]}

rows is full (all of max_length), padded (of different lengths) or packed. Tokens are counted without padding.
flops_a_token is model work as ModelShape.flops_a_token counts it. A plan has no other source of seconds.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsloth_ddp.data.packing import best_fit
from unsloth_ddp.plan.rows import RowLengths
from unsloth_ddp.plan.shape import ModelShape
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.json_file import write_as_asked

SHIPPED = {"h200": Path(__file__).with_name("h200.json")}
ROWS = ("full", "padded", "packed")
# Rows count as full where they fill this share of max_length on average.
FULL = 0.9
# A measurement is not used for a model with this many times its work per token, or for micro-batches this much larger.
TOO_FAR = 5


@dataclass(frozen=True, kw_only=True)
class SpeedQuery:
    """The run whose speed is estimated; `tokens_a_micro_batch` is None where a measurement does not state it."""

    method: str
    backend: str
    precision: str
    gradient_checkpointing: str
    rows: str
    tokens_a_micro_batch: float | None
    flops_a_token: float


@dataclass(frozen=True, kw_only=True)
class Measurement(SpeedQuery):
    """The measured speed of one run."""

    name: str
    tokens_per_second_per_gpu: float


@dataclass(frozen=True)
class Calibration:
    """Measurements of one kind of GPU, and their source."""

    gpu: str
    source: str
    measurements: list[Measurement]


@dataclass(frozen=True)
class SpeedEstimate:
    """Estimated tokens per second of one GPU, the measurement used, and how it differs from the planned run."""

    tokens_per_second: float
    source: str
    differences: list[str]


def load_calibration(name: str) -> Calibration:
    """Read a calibration from a file, or the shipped one by its name (h200).

    Raises:
        UserError: it cannot be read, or a field is missing or wrong.
    """
    path = SHIPPED.get(name, Path(name).expanduser())
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        measurements = [Measurement(**one) for one in content["measurements"]]
        calibration = Calibration(str(content["gpu"]), str(content["source"]), measurements)
    except OSError as error:
        raise UserError(f"--calibration {name} cannot be read: {error.strerror}; shipped is h200.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--calibration {name} is not a calibration file ({error}); write one with --calibrate."
        ) from None
    if content.get("format") != 1 or not measurements:
        raise UserError(f"--calibration {name} has no format 1 or no measurements; write one with --calibrate.")
    texts = [f.name for f in dataclasses.fields(Measurement) if f.type == "str"]
    for one in measurements:
        for field in texts:
            value = getattr(one, field)
            if not isinstance(value, str):
                raise UserError(f"--calibration {name}: {field} is {value!r}, but it has to be text; put it in quotes.")
        known = 1 if one.tokens_a_micro_batch is None else one.tokens_a_micro_batch
        numbers = (one.flops_a_token, one.tokens_per_second_per_gpu, known)
        if one.rows not in ROWS or not all(isinstance(n, (int, float)) and 0 < n < math.inf for n in numbers):
            raise UserError(
                f"--calibration {name}: {one.name} has unknown rows or a figure that is not above 0; correct it."
            )
    return calibration


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration as load_calibration reads it.

    Raises:
        UserError: it cannot be written.
    """
    write_as_asked("--calibration", path, {"format": 1, **dataclasses.asdict(calibration)})


def kind_of_rows(mean: float, max_length: int) -> str:
    """Return full or padded for rows of `mean` tokens in a run with this max_length."""
    return "full" if mean > FULL * max_length else "padded"


def estimate_speed(calibration: Calibration, wanted: SpeedQuery) -> SpeedEstimate | None:
    """Estimate the speed of a model of another size from its work per token; None without a similar measurement.

    The measurement with the nearest circumstances is used, and its work per second taken as that of the run. Measurements
    TOO_FAR from the run are not used.
    """
    alike = [one for one in calibration.measurements if _is_alike(one, wanted)]
    if not alike:
        return None
    nearest = min(alike, key=lambda one: _distance(one, wanted))
    speed = nearest.tokens_per_second_per_gpu * nearest.flops_a_token / wanted.flops_a_token
    return SpeedEstimate(speed, nearest.name, _differences(nearest, wanted))


def _is_alike(one: Measurement, wanted: SpeedQuery) -> bool:
    near = all(1 / TOO_FAR <= ratio <= TOO_FAR for ratio in (_times_tokens(one, wanted) or 1, _times_work(one, wanted)))
    # The measured speeds of padded and packed rows of the same model are 24 times apart.
    return near and (one.method, one.precision, one.rows) == (wanted.method, wanted.precision, wanted.rows)


def _times_tokens(one: Measurement, wanted: SpeedQuery) -> float | None:
    """Return how many times the tokens of a measured micro-batch the wanted one has; None if it is not known."""
    if not one.tokens_a_micro_batch or not wanted.tokens_a_micro_batch:
        return None
    return wanted.tokens_a_micro_batch / one.tokens_a_micro_batch


def _times_work(one: Measurement, wanted: SpeedQuery) -> float:
    return wanted.flops_a_token / one.flops_a_token


def _distance(one: Measurement, wanted: SpeedQuery) -> tuple[float, ...]:
    tokens = _times_tokens(one, wanted)
    return (
        one.gradient_checkpointing != wanted.gradient_checkpointing,
        one.backend != wanted.backend,
        abs(math.log(tokens)) if tokens else math.inf,
        abs(math.log(_times_work(one, wanted))),
    )


def _differences(one: Measurement, wanted: SpeedQuery) -> list[str]:
    found = [
        f"{name.replace('_', ' ')} {getattr(one, name)}, not {getattr(wanted, name)}"
        for name in ("gradient_checkpointing", "backend")
        if getattr(one, name) != getattr(wanted, name)
    ]
    tokens, work = _times_tokens(one, wanted), _times_work(one, wanted)
    if tokens is None:
        found.append("size of the micro-batch unknown")
    elif not 0.5 <= tokens <= 2:
        found.append(f"{one.tokens_a_micro_batch:,.0f} tokens per micro-batch, not {wanted.tokens_a_micro_batch:,.0f}")
    if not 0.5 <= work <= 2:
        found.append(f"a model with {1 / work:.2g} times the work per token")
    return found


def measure_run(folder: Path, model: str | None, shape: ModelShape, rows: RowLengths) -> tuple[str, Measurement]:
    """Return the GPU's name and a measurement of a finished run: the median of its logged speeds but the first two.

    Method and packing are those of the run, not of the plan.

    Args:
        model: name of the model that has `shape`.
        shape: shape of the run's model.
        rows: rows of the run, not packed.

    Raises:
        UserError: the folder holds no finished run, too few log lines to time, or a run of another model.
    """
    try:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        settings = summary["settings"]
        if os.path.realpath(settings["model"]) != os.path.realpath(str(model)):
            raise UserError(
                f"--calibrate {folder}: this run trained {settings['model']}, not {model}; write the file with --model "
                f"{settings['model']}, then plan for {model} with that file."
            )
        logged = [entry["tokens_per_second"] for entry in history if "tokens_per_second" in entry and "loss" in entry]
        # The first log line includes compilation; the second may.
        speeds = logged[2:]
        if len(speeds) < 3:
            raise UserError(
                f"--calibrate {folder}: the run logged {len(speeds)} usable speeds; train longer, or lower logging_steps."
            )
        mean = tokens_a_unit(summary, rows)
        return summary["device"], Measurement(
            name=folder.name,
            method=settings["method"],
            backend=summary["backend"],
            precision=summary["precision"],
            gradient_checkpointing=summary["gradient_checkpointing"],
            rows="packed" if summary["packing"] else kind_of_rows(mean, settings["max_length"]),
            tokens_a_micro_batch=summary["per_device_train_batch_size"] * mean,
            flops_a_token=shape.flops_a_token(settings["method"]),
            tokens_per_second_per_gpu=statistics.median(speeds) / summary["world_size"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        raise UserError(
            f"--calibrate {folder} is not the folder of a finished run ({reason}); give outputs/RUN."
        ) from None


def tokens_a_unit(summary: dict[str, Any], rows: RowLengths) -> float:
    """Return the mean tokens of a row, or of a pack where the run packed rows."""
    if not summary["packing"]:
        return rows.mean
    if summary["packs"]:
        return rows.tokens / summary["packs"]
    # A streamed run does not count its packs.
    return rows.packed(best_fit(rows.each, summary["settings"]["max_length"])).mean
