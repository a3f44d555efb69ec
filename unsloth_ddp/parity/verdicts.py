"""What launches came to, held against the first one: differences, tolerances, the verdict."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unsloth_ddp.parity.launches import Launch
from unsloth_ddp.parity.weights import update_difference
from unsloth_ddp.utils.errors import UserError

# Above this share of the update, the rounding of the saved weights hides what is looked for.
COARSEST_FLOOR = 0.1


@dataclass(frozen=True)
class Tolerance:
    """How far the update and the losses of two layouts may be apart, relatively, and why."""

    value: float
    reason: str


FP32 = "fp32 differs by rounding alone; measured: at most 3.5e-7 on a CPU, 2.6e-7 on H200s"
UNSLOTH_FP32 = "fp32 differs by rounding alone; measured with Unsloth on H200s: at most 1.1e-6"
AUTOCAST = "16-bit products depend on the shape of the batch; measured with Unsloth and bf16 on H200s: 2e-2 to 4e-2"
TOLERANCES: dict[tuple[str, str], Tolerance] = {
    ("transformers", "fp32"): Tolerance(1e-6, FP32),
    ("unsloth", "fp32"): Tolerance(5e-6, UNSLOTH_FP32),
    ("unsloth", "bf16"): Tolerance(6e-2, AUTOCAST),
    ("transformers", "bf16"): Tolerance(6e-2, AUTOCAST + "; with Transformers on a CPU 3e-3"),
    ("unsloth", "fp16"): Tolerance(6e-2, AUTOCAST + "; fp16 is held to the same, not measured"),
    ("transformers", "fp16"): Tolerance(6e-2, AUTOCAST + "; fp16 is held to the same, not measured"),
}


def widened(tolerance: Tolerance, floor: float) -> Tolerance:
    """The tolerance where weights are stored whose own rounding hides `floor` of the update."""
    if not floor:
        return tolerance
    return Tolerance(
        tolerance.value + floor, f"{tolerance.reason}; {floor:.1e} more for the rounding of stored weights"
    )


@dataclass
class Outcome:
    """What a launch came to. `error` holds its last lines where it failed."""

    launch: Launch
    seconds: float
    folder: Path
    losses: list[float] = dataclasses.field(default_factory=list)
    error: str = ""


@dataclass
class Row:
    """One line of the table; the differences are relative to the first launch, None for a failed one."""

    launch: Launch
    seconds: float
    update: float | None
    loss: float | None
    verdict: Literal["reference", "agrees", "differs", "failed"]


def loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference of a step's loss; infinite where a step is missing or not finite."""
    if len(losses) != len(reference) or not losses:
        return math.inf
    differences = [abs(a - b) / abs(b) if b else abs(a) for a, b in zip(losses, reference, strict=True)]
    return max(differences) if all(math.isfinite(d) for d in differences) else math.inf


def judge(update: float, loss: float, tolerance: Tolerance) -> Literal["agrees", "differs"]:
    """A NaN does not agree."""
    return "agrees" if update <= tolerance.value and loss <= tolerance.value else "differs"


def compare(reference: Outcome, outcome: Outcome, initial: Path | None, tolerance: Tolerance) -> tuple[Row, Tolerance]:
    """The table's row of one launch and the tolerance it was held to; `initial` as in update_difference."""
    launch, seconds = outcome.launch, outcome.seconds
    if outcome.error:
        return Row(launch, seconds, None, None, "failed"), tolerance
    if outcome is reference:
        return Row(launch, seconds, 0.0, 0.0, "reference"), tolerance
    update, floor = update_difference(reference.folder, outcome.folder, initial, len(reference.losses))
    if floor > COARSEST_FLOOR:
        raise UserError(
            f"The saved weights are rounded so coarsely ({floor:.0%} of the update) that the updates cannot be compared; "
            "use --backend transformers, or --method lora."
        )
    held_to = widened(tolerance, floor)
    loss = loss_difference(outcome.losses, reference.losses)
    return Row(launch, seconds, update, loss, judge(update, loss, held_to)), held_to


def verdict(rows: Sequence[Row], tolerance: Tolerance) -> tuple[bool, str]:
    """Whether all launches agree, and the sentence to end with."""
    failed = [row for row in rows if row.verdict == "failed"]
    different = [row for row in rows if row.verdict == "differs"]
    if failed:
        return False, f"FAILED: {len(failed)} of {len(rows)} launches did not run to their end."
    if different:
        worst = max(different, key=lambda row: max(row.update or 0, row.loss or 0)).launch
        return False, (
            f"DIFFER: {len(different)} of {len(rows)} launches are further than {tolerance.value:.1e} from the first, "
            f"the worst {worst.launcher} with {worst.processes} process(es), {worst.shape}."
        )
    return True, f"AGREE: all {len(rows)} launches take the same steps, within {tolerance.value:.1e}."
