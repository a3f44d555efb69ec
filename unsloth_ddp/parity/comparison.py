"""Compare the outcome of each launch with the first one: differences, tolerances, verdict."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unsloth_ddp.parity.launches import Launch
from unsloth_ddp.parity.weights import update_difference
from unsloth_ddp.utils.errors import UserError

# Above this share of the update, the rounding of saved weights hides the differences.
COARSEST_FLOOR = 0.1


@dataclass(frozen=True)
class Tolerance:
    """The relative difference allowed between the updates and losses of two layouts, and its reason."""

    value: float
    basis: str


# docs/parity.md has what was measured: how far rounding goes depends on the model and the rows.
FP32 = "fp32 layouts differ by rounding alone"
AUTOCAST = "16-bit products depend on the shape of the batch, so this shows gross errors only"


def choose_tolerance(backend: str, precision: str, task: str = "sft") -> Tolerance:
    """Return the tolerance for launches; differences of log-probabilities round more than losses."""
    if precision != "fp32":
        return Tolerance(6e-2, AUTOCAST)
    return Tolerance(5e-6 if backend == "unsloth" or task != "sft" else 1e-6, FP32)


@dataclass
class LaunchOutcome:
    """The result of one launch; `error` holds the last lines of a failed one."""

    launch: Launch
    seconds: float
    folder: Path
    losses: list[float] = dataclasses.field(default_factory=list)
    error: str = ""


@dataclass
class LaunchComparison:
    """One line of the table: differences relative to the first launch, None for a failed one."""

    launch: Launch
    seconds: float
    update: float | None
    loss: float | None
    verdict: Literal["reference", "agrees", "differs", "failed"]


def loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference of a step's loss; infinity where a step is missing or not finite."""
    if len(losses) != len(reference) or not losses:
        return math.inf
    differences = [abs(a - b) / abs(b) if b else abs(a) for a, b in zip(losses, reference, strict=True)]
    return max(differences) if all(math.isfinite(d) for d in differences) else math.inf


def judge_difference(update: float, loss: float, tolerance: Tolerance) -> Literal["agrees", "differs"]:
    """Return agrees if both differences are within the tolerance; NaN differs."""
    return "agrees" if update <= tolerance.value and loss <= tolerance.value else "differs"


def compare_launch(
    reference: LaunchOutcome, outcome: LaunchOutcome, initial: Path | None, tolerance: Tolerance
) -> tuple[LaunchComparison, Tolerance]:
    """Return the table's line of one launch and the tolerance it was judged by.

    Args:
        initial: folder of the model before training, as in update_difference.

    Raises:
        UserError: the saved weights are too coarse to compare.
    """
    launch, seconds = outcome.launch, outcome.seconds
    if outcome.error:
        return LaunchComparison(launch, seconds, None, None, "failed"), tolerance
    if outcome is reference:
        return LaunchComparison(launch, seconds, 0.0, 0.0, "reference"), tolerance
    update, floor = update_difference(reference.folder, outcome.folder, initial, len(reference.losses))
    if floor > COARSEST_FLOOR:
        raise UserError(
            f"The saved weights are rounded so coarsely ({floor:.0%} of the update) that the updates cannot be "
            "compared; use --backend transformers, or --method lora."
        )
    rounding = f"; {floor:.1e} more for the rounding of stored weights" if floor else ""
    allowed = Tolerance(tolerance.value + floor, tolerance.basis + rounding)
    loss = loss_difference(outcome.losses, reference.losses)
    return LaunchComparison(launch, seconds, update, loss, judge_difference(update, loss, allowed)), allowed


def overall_verdict(rows: Sequence[LaunchComparison], tolerance: Tolerance) -> tuple[bool, str]:
    """Return whether all launches agree, and the sentence that says so."""
    failed = [row for row in rows if row.verdict == "failed"]
    different = [row for row in rows if row.verdict == "differs"]
    if failed:
        return False, f"FAILED: {len(failed)} of {len(rows)} launches did not finish."
    if different:
        worst = max(different, key=lambda row: max(row.update or 0, row.loss or 0)).launch
        return False, (
            f"DIFFER: {len(different)} of {len(rows)} launches are more than {tolerance.value:.1e} from the first; "
            f"the largest difference is with {worst.name_for_people}."
        )
    largest = max(max(row.update or 0, row.loss or 0) for row in rows)
    return True, (
        f"AGREE: all {len(rows)} launches take the same steps; the largest difference is {largest:.1e}, and up to "
        f"{tolerance.value:.1e} is allowed."
    )
