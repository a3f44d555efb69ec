"""List the ways to compute a micro-batch, from the fastest to that of least memory, and choose the first that fits.

Pure functions of plain values. A run asks trials what a rung needs, and sharded runs, plan and preflight ask estimates.
A step that runs out of memory goes down the same ladder.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.order.packing import Units
from unsloth_ddp.distributed.wire import sendable
from unsloth_ddp.model.forward.gradient_checkpointing import KINDS
from unsloth_ddp.sizing.graphs import has_lora_dropout, kind_obstacle
from unsloth_ddp.sizing.micro_batch import (
    ENOUGH_TOKENS,
    ENOUGH_WITH_GRAPHS,
    largest_tokens,
    sizes_of,
    sizes_to_replay,
)


@sendable
@dataclass(frozen=True)
class Rung:
    """Describe a way to compute a micro-batch.

    Args:
        captured: replay a CUDA graph, instead of the backend's pass.
        kind: of gradient checkpointing.
        rows: rows (packs) of a micro-batch.
        passes: forward and backward passes that compute it, each over a part of its rows.
    """

    captured: bool
    kind: str
    rows: int
    passes: int = 1

    def __str__(self) -> str:
        how = "CUDA graphs and " if self.captured else ""
        split = f", each micro-batch in {self.passes} passes" if self.passes > 1 else ""
        return f"{how}gradient checkpointing {self.kind}{split}"


class OutOfMemory(Exception):
    """A pass ran out of memory, and this process cannot repeat it; the error of the GPU is the cause.

    Args:
        rung: that micro-batches were computed with.
        lowest: whether no rung needs less memory.
    """

    def __init__(self, rung: Rung, *, lowest: bool) -> None:
        super().__init__(f"out of memory with {rung}")
        self.rung = rung
        self.lowest = lowest


@dataclass(frozen=True)
class LadderFacts:
    """Hold what the ladder of a run follows from.

    Args:
        kinds: of gradient checkpointing that the backend's passes may use, cheapest first.
        sizes: rows (packs) that a micro-batch may have, ascending.
        captured_kinds: of gradient checkpointing with which passes can be captured; empty if none is captured.
        captured_sizes: rows (packs) that a captured micro-batch may have, ascending.
        tokens: rows -> tokens of the largest micro-batch of so many rows.
    """

    kinds: tuple[str, ...]
    sizes: tuple[int, ...]
    captured_kinds: tuple[str, ...]
    captured_sizes: tuple[int, ...]
    tokens: Callable[[int], int]

    def keeps_gpu_busy(self, rung: Rung) -> bool:
        """Return whether micro-batches are so large that recomputing to fit more rows costs more than it saves."""
        sizes, enough = (self.captured_sizes, ENOUGH_WITH_GRAPHS) if rung.captured else (self.sizes, ENOUGH_TOKENS)
        return rung.rows == sizes[-1] or self.tokens(rung.rows) >= enough


def ladder(facts: LadderFacts) -> list[Rung]:
    """Return the rungs of a run, from the fastest to the one that needs least memory.

    Micro-batches that keep the GPU busy come first: captured ones before the backend's, then by the cost of gradient
    checkpointing, then the largest. Smaller micro-batches follow by size.
    """
    captured = [Rung(True, kind, rows) for kind in facts.captured_kinds for rows in reversed(facts.captured_sizes)]
    computed = [Rung(False, kind, rows) for kind in facts.kinds for rows in reversed(facts.sizes)]
    rungs = captured + computed
    large = [rung for rung in rungs if facts.keeps_gpu_busy(rung)]
    small = [rung for rung in rungs if not facts.keeps_gpu_busy(rung)]
    # The sort keeps the order of rungs of one size.
    return large + sorted(small, key=lambda rung: -rung.rows)


def choose(rungs: Sequence[Rung], fits: Callable[[Rung], bool], tokens: Callable[[int], int]) -> Rung | None:
    """Return the first rung that fits; None if none does.

    What fits with more rows, or with less gradient checkpointing, is taken to fit with fewer rows and with more.

    Args:
        fits: rung -> whether it fits; called as seldom as possible, since a trial takes seconds.
        tokens: rows -> tokens of the largest micro-batch of so many rows.
    """
    answers: dict[Rung, bool] = {}

    def fits_cached(rung: Rung) -> bool:
        for other, answer in answers.items():
            less, more = (rung, other) if answer else (other, rung)
            if _needs_no_more(less, more):
                return answer
        answers[rung] = fits(rung)
        return answers[rung]

    for _, alike in groupby(rungs, key=lambda rung: (rung.captured, rung.kind)):
        group = list(alike)
        # The first of the group that fits is at `low` or behind it, and the one at `high` fits.
        low, high = 0, len(group)
        # A small one mostly fits, and then one trial is enough.
        middle = 0 if tokens(group[0].rows) <= 2 * ENOUGH_TOKENS else (len(group) - 1) // 2
        while low < high:
            if fits_cached(group[middle]):
                high = middle
            else:
                low = middle + 1
            middle = (low + high) // 2
        if high < len(group):
            return group[high]
    return None


def _needs_no_more(less: Rung, more: Rung) -> bool:
    """Return whether a rung certainly takes no more memory than another one."""
    return (
        less.captured == more.captured
        and KINDS.index(less.kind) >= KINDS.index(more.kind)
        and less.rows <= more.rows
        and less.passes >= more.passes
    )


def below(rung: Rung, facts: LadderFacts, most_rows: int) -> list[Rung]:
    """Return the rungs, in order, for a step that runs out of memory with `rung`; its micro-batches keep their rows.

    More is recomputed first; then a micro-batch is computed in 2, 4, ... passes, until each has one row.

    Args:
        most_rows: of a micro-batch, those of its packs counted each.
    """
    kinds = facts.kinds[facts.kinds.index(rung.kind) :] if rung.kind in facts.kinds else (rung.kind,)
    captured = [replace(rung, kind=kind) for kind in kinds if rung.captured and kind in facts.captured_kinds]
    # A captured pass has the memory of its compiled layers, which the backend's pass with the same kind hardly
    # undercuts.
    uncaptured_kinds = [kind for kind in kinds if kind not in {higher.kind for higher in captured}] or [kinds[-1]]
    computed = [replace(rung, captured=False, kind=kind) for kind in uncaptured_kinds]
    lower = [other for other in (*captured, *computed) if other != rung]
    passes = rung.passes
    while passes < most_rows:
        passes *= 2
        lower.append(Rung(False, kinds[-1], rung.rows, passes))
    return lower


@dataclass(frozen=True)
class StepDecision:
    """Hold how a run computes its micro-batches, and why.

    Args:
        rung_reason: why this rung, by the memory that it takes.
        graphs: why micro-batches are captured, or why not.
    """

    rung: Rung
    rung_reason: str
    graphs: str


def facts_of(settings: Settings, rows: Units, plan: BatchPlan, kinds: Sequence[str], *, captured: bool) -> LadderFacts:
    """Return the facts of a run or a plan.

    Args:
        plan: with any micro-batch.
        kinds: of gradient checkpointing that the backend's passes may use, cheapest first.
        captured: whether passes may be captured.
    """
    random = has_lora_dropout(settings)
    return LadderFacts(
        kinds=tuple(kinds),
        sizes=tuple(sizes_of(settings, plan)),
        captured_kinds=tuple(kind for kind in kinds if captured and kind_obstacle(kind, random=random) is None),
        captured_sizes=tuple(sizes_to_replay(settings, rows, plan)) if captured else (),
        tokens=lambda size: largest_tokens(rows, size, settings.longest_example),
    )
