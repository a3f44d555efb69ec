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


@dataclass(frozen=True)
class Measurement:
    """One measured speed; `tokens_a_micro_batch` is None where the result does not state it."""

    name: str
    method: str
    backend: str
    precision: str
    gradient_checkpointing: str
    rows: str
    tokens_a_micro_batch: float | None
    flops_a_token: float
    tokens_per_second_per_gpu: float

    @property
    def flops_a_second(self) -> float:
        """Model FLOP per second."""
        return self.flops_a_token * self.tokens_per_second_per_gpu

    @property
    def circumstances(self) -> tuple[Any, ...]:
        """Everything but the model: measurements that agree here differ only in the model's size."""
        return (
            self.method,
            self.backend,
            self.precision,
            self.gradient_checkpointing,
            self.rows,
            self.tokens_a_micro_batch,
        )


@dataclass(frozen=True)
class Calibration:
    """Measurements of one kind of GPU, and their source."""

    gpu: str
    source: str
    measurements: list[Measurement]


@dataclass(frozen=True)
class SpeedQuery:
    """The run whose speed is estimated, in the terms of a Measurement."""

    method: str
    backend: str
    precision: str
    gradient_checkpointing: str
    rows: str
    tokens_a_micro_batch: float
    flops_a_token: float


@dataclass(frozen=True)
class SpeedEstimate:
    """Estimated tokens per second of one GPU, the measurements used, and how they differ from the planned run."""

    tokens_per_second: float
    sources: list[str]
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

    The measurements with the nearest circumstances are used. Between two model sizes the work per second is interpolated
    over the logarithm of the work per token; beyond them, and with one alone, it is taken as constant. Measurements
    TOO_FAR from the run are not used.
    """
    same = [m for m in calibration.measurements if _is_alike(m, wanted)]
    if not same:
        return None
    nearest = min(same, key=lambda m: _distance(m, wanted))
    alike = sorted((m for m in same if m.circumstances == nearest.circumstances), key=lambda m: m.flops_a_token)
    below = [m for m in alike if m.flops_a_token <= wanted.flops_a_token][-1:]
    above = [m for m in alike if m.flops_a_token > wanted.flops_a_token][:1]
    sources = [*below, *above]
    reached = sources[0].flops_a_second
    if below and above:
        low, high = below[0], above[0]
        part = math.log(wanted.flops_a_token / low.flops_a_token) / math.log(high.flops_a_token / low.flops_a_token)
        reached = low.flops_a_second + part * (high.flops_a_second - low.flops_a_second)
    return SpeedEstimate(reached / wanted.flops_a_token, [m.name for m in sources], _differences(nearest, wanted))


def _is_alike(one: Measurement, wanted: SpeedQuery) -> bool:
    ratios = [wanted.flops_a_token / one.flops_a_token]
    if one.tokens_a_micro_batch:
        ratios.append(wanted.tokens_a_micro_batch / one.tokens_a_micro_batch)
    near = all(1 / TOO_FAR <= ratio <= TOO_FAR for ratio in ratios)
    # The measured speeds of padded and packed rows of the same model are 24 times apart.
    return near and (one.method, one.precision, one.rows) == (wanted.method, wanted.precision, wanted.rows)


def _distance(one: Measurement, wanted: SpeedQuery) -> tuple[float, ...]:
    tokens = abs(math.log(one.tokens_a_micro_batch / wanted.tokens_a_micro_batch)) if one.tokens_a_micro_batch else 10.0
    return (
        one.gradient_checkpointing != wanted.gradient_checkpointing,
        one.backend != wanted.backend,
        tokens,
        abs(math.log(one.flops_a_token / wanted.flops_a_token)),
    )


def _differences(one: Measurement, wanted: SpeedQuery) -> list[str]:
    found = [
        f"{name.replace('_', ' ')} {getattr(one, name)}, not {getattr(wanted, name)}"
        for name in ("gradient_checkpointing", "backend")
        if getattr(one, name) != getattr(wanted, name)
    ]
    measured = one.tokens_a_micro_batch
    if measured is None:
        found.append("size of the micro-batch unknown")
    elif not 0.5 <= measured / wanted.tokens_a_micro_batch <= 2:
        found.append(f"{measured:,.0f} tokens per micro-batch, not {wanted.tokens_a_micro_batch:,.0f}")
    ratio = wanted.flops_a_token / one.flops_a_token
    if not 0.5 <= ratio <= 2:
        found.append(f"a model with {1 / ratio:.2g} times the work per token")
    return found


def _same_model(one: str | None, other: str | None) -> bool:
    return one == other or os.path.realpath(str(one)) == os.path.realpath(str(other))


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
        if not _same_model(settings["model"], model):
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
