"""Decide whether rows are packed, which rows share a pack, and how many packs a step holds. Pure arithmetic.

A pack is several rows concatenated into one sequence, each with its own positions. Attention does not cross row
boundaries, so the loss of a row is the same as without packing. Which rows share a pack depends only on the row
lengths.
"""

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

import numpy as np

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BatchPlan, nearest_multiple, plan_batch
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.units import counted

# Smallest fraction of the requested rows that a step may hold in exchange for fuller packs.
ENOUGH_ROWS = 0.8


@dataclass(frozen=True)
class Packing:
    """The rows of each pack: pack i holds `rows[starts[i] : starts[i + 1]]`, in the order of the data.

    Args:
        capacity: maximum tokens of a pack of several rows; a longer row is a pack by itself.
        rows: int64 (rows,), each row once.
        starts: int64 (packs + 1,).
        tokens: int64 (packs,), the tokens of each pack.
    """

    capacity: int
    rows: np.ndarray
    starts: np.ndarray
    tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def members(self, pack: int) -> np.ndarray:
        """Return the rows of one pack."""
        return self.rows[self.starts[pack] : self.starts[pack + 1]]

    def sums(self, of_rows: np.ndarray) -> np.ndarray:
        """Return the summed values of each pack's rows, (packs,)."""
        return np.add.reduceat(of_rows[self.rows], self.starts[:-1])

    @property
    def rows_a_pack(self) -> float:
        """Mean number of rows in a pack."""
        return len(self.rows) / len(self)

    @property
    def tokens_a_pack(self) -> float:
        """Mean number of tokens in a pack."""
        return float(self.tokens.mean())

    @property
    def longest(self) -> int:
        """Tokens of the largest pack."""
        return int(self.tokens.max())

    @property
    def fill(self) -> float:
        """Mean tokens of a pack over those of the largest."""
        return self.tokens_a_pack / self.longest


class _Bins:
    """Open bins, by the space left in them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.opened = 0
        self.spaces: list[int] = []
        self.bins: dict[int, list[np.ndarray]] = {}

    def take(self, length: int, items: int) -> tuple[int, np.ndarray]:
        """Return (space, bins) for the next items of one length: the fullest bins that fit, or new ones."""
        at = bisect_left(self.spaces, length)
        if at == len(self.spaces):
            space = max(self.capacity, length)
            new = math.ceil(items / (space // length))
            self.opened += new
            return space, np.arange(self.opened - new, self.opened)
        space = self.spaces[at]
        missing = math.ceil(items / (space // length))
        stack, chosen = self.bins[space], []
        while stack and missing > 0:
            bins = stack.pop()
            chosen.append(bins[:missing])
            if len(bins) > missing:
                stack.append(bins[missing:])
            missing -= len(bins)
        if not stack:
            del self.bins[space], self.spaces[at]
        return space, np.concatenate(chosen)

    def put(self, space: int, bins: np.ndarray) -> None:
        """Put bins back with the space left in them."""
        if space and len(bins):
            if space not in self.bins:
                insort(self.spaces, space)
                self.bins[space] = []
            self.bins[space].append(bins)


def best_fit(lengths: np.ndarray, capacity: int) -> Packing:
    """Pack by best-fit decreasing: longest rows first, each into the fullest pack that has room.

    Rows of equal length are placed together, so the cost is O(rows log rows) for sorting, and one iteration per pair of
    a length and a space it is placed in.

    Args:
        lengths: int (rows,), each at least 1.
        capacity: maximum tokens of a pack; a longer row is a pack by itself.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    assert len(lengths), "there is nothing to pack"
    assert lengths.min() > 0, "a row has no token"
    order = np.argsort(-lengths, kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    pack_of = np.empty(len(lengths), dtype=np.int64)
    bins = _Bins(capacity)
    placed = 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        waiting = order[placed : placed + count]
        placed += count
        while len(waiting):
            space, chosen = bins.take(length, len(waiting))
            each = space // length
            now = min(len(waiting), each * len(chosen))
            pack_of[waiting[:now]] = np.repeat(chosen, each)[:now]
            full, rest = divmod(now, each)
            bins.put(space - each * length, chosen[:full])
            bins.put(space - rest * length, chosen[full:])
            waiting = waiting[now:]
    members = np.bincount(pack_of, minlength=bins.opened)
    return Packing(
        capacity=capacity,
        rows=np.argsort(pack_of, kind="stable"),
        starts=np.concatenate([[0], np.cumsum(members)]),
        tokens=np.bincount(pack_of, weights=lengths, minlength=bins.opened).astype(np.int64),
    )


@dataclass(frozen=True)
class PackingDecision:
    """The decision to pack rows or not, and the reason in a few words.

    Args:
        prompts_once: whether the prompt of a pair is computed once for both answers.
    """

    packed: bool
    reason: str
    prompts_once: bool = False


@dataclass(frozen=True)
class PackingObstacles:
    """Name what in a model is against packed rows.

    Args:
        wrong: the reason why packed rows would influence each other, if there is one.
        no_kernel: the reason why a GPU has no attention kernel for it, if there is one.
        no_kernel_with_images: the reason why it has none for rows with images.
    """

    wrong: str | None = None
    no_kernel: str | None = None
    no_kernel_with_images: str | None = None


def decide_packing(option: str, missing: str, kernel: str | None, wrong: str | None) -> PackingDecision:
    """Pack if attention has a kernel that skips the blocks between rows; without one, packing is slower than padding.

    Args:
        option: --packing.
        missing: the reason why there is no kernel, for the message.
        kernel: the attention kernel for rows of different lengths, if there is one.
        wrong: the reason why packed rows of this model would influence each other, if there is one.

    Raises:
        UserError: --packing is on but would change the result.
    """
    if option == "off":
        return PackingDecision(False, "--packing off")
    if wrong is not None:
        if option == "on":
            raise UserError(f"packing on would mix rows, because {wrong}; use --packing auto or off.")
        return PackingDecision(False, wrong)
    if option == "on":
        masked = f"{missing}, so a mask keeps rows apart, which is slow"
        return PackingDecision(True, f"as set; {f'{kernel} keeps rows apart' if kernel else masked}")
    if kernel is None:
        return PackingDecision(False, missing)
    return PackingDecision(True, f"{kernel} keeps rows apart")


def describe_backend(backend: str, precision: str, settings: Settings) -> str:
    """Describe where attention runs on a GPU, for the message on a missing kernel."""
    implementation = (
        f", {settings.attn_implementation}" if backend == "transformers" and settings.attn_implementation else ""
    )
    return f"backend {backend} ({precision}{implementation})"


def describe_older_gpu(name: str, capability: tuple[int, int]) -> str:
    """Describe a GPU that is older than flash attention, as an addition to `describe_backend`."""
    return f" on {name} (compute capability {capability[0]}.{capability[1]}, older than flash attention)"


@dataclass
class BatchRequest:
    """The requested size of a step (see the options of the same names).

    `plan` is the resulting plan in rows, or in packs of up to `max_length` tokens if `packing` is "on".

    Raises:
        UserError: the global batch does not divide, or contradicts the accumulation.
    """

    packing: Literal["auto", "on", "off"]
    max_length: int
    per_device: int
    processes: int
    global_batch: int | None = None
    accumulation: int | None = None
    global_tokens: int | None = None
    plan: BatchPlan = field(init=False)

    def __post_init__(self) -> None:
        self.plan = plan_batch(self.per_device, self.processes, self.global_batch, self.accumulation)

    @classmethod
    def of(cls, settings: Settings, processes: int) -> Self:
        """Return the request that these settings make."""
        per_device, accumulation = settings.rows_at_once, settings.gradient_accumulation_steps
        if settings.per_device_train_batch_size == "auto" and accumulation and settings.global_batch_size:
            # These two settings determine the micro-batch.
            per_device = max(1, settings.global_batch_size // (accumulation * processes))
        return cls(
            packing=settings.packing,
            max_length=settings.longest_pack,
            per_device=per_device,
            processes=processes,
            global_batch=settings.global_batch_size,
            accumulation=settings.gradient_accumulation_steps,
            global_tokens=settings.global_batch_tokens,
        )


def plan_step(
    request: BatchRequest, lengths: np.ndarray, choice: PackingDecision
) -> tuple[BatchPlan, Packing | None, PackingDecision]:
    """Plan the steps of a run for rows of these lengths: return the plan, the packs (None: rows), and the decision.

    With --packing on, every setting that counts rows counts packs. With --packing auto, settings count rows: a step
    holds the number of packs whose rows come nearest to the rows of an unpacked step, so that the same settings train
    alike on machines without packing.

    Raises:
        UserError: the batch does not divide, is given twice, or is given in tokens without packing.
    """
    plan, in_packs = request.plan, request.packing == "on"
    if not choice.packed:
        if request.global_tokens is not None:
            raise UserError(
                f"global_batch_tokens {request.global_tokens} needs packed rows, and rows are padded: {choice.reason}; "
                "give --global_batch_size instead, or --packing on."
            )
        return plan, None, choice
    packing = best_fit(lengths, request.max_length)
    fixed = request.global_batch is not None or request.accumulation is not None
    # The plan of as many packs as hold the rows asked for, or of as many as were asked for.
    by_count = plan if in_packs and fixed else _nearest_plan(plan, plan.global_batch / packing.rows_a_pack)
    if request.global_tokens is not None:
        packed = _nearest_plan(plan, request.global_tokens / packing.tokens_a_pack)
        if fixed and packed.global_batch != by_count.global_batch:
            name = "global_batch_size" if request.global_batch is not None else "gradient_accumulation_steps"
            raise UserError(
                f"global_batch_tokens {request.global_tokens} is {counted(packed.global_batch, 'pack')} a step and "
                f"{name} ({counted(plan.global_batch, 'pack' if in_packs else 'row')}) is {by_count.global_batch}; "
                "give only one of the two."
            )
        return packed, packing, choice
    if in_packs:
        return by_count, packing, choice
    packs, packing = _packs_for_rows(plan.global_batch, plan.processes, lengths, packing)
    return _nearest_plan(plan, packs), packing, choice


def _packs_for_rows(rows: int, processes: int, lengths: np.ndarray, full: Packing) -> tuple[int, Packing]:
    """Return how many packs hold about `rows` rows, and the packs, given the packs of full length.

    With 8 rows or more the number is a multiple of 8, so that a run takes the same steps on 1, 2, 4 and 8 processes. If
    the number of processes does not divide it, the nearest multiple is used. If packs of full length would hold too
    many rows, packs are made shorter.
    """
    eights = 8 * math.floor(rows / full.rows_a_pack / 8)
    numbers = [eights, eights + 8] if rows >= 8 else [*(n for n in (1, 2, 4) if n < rows), rows]
    packs = next((n for n in numbers if n * full.rows_a_pack >= ENOUGH_ROWS * rows), numbers[-1])
    packs = nearest_multiple(packs, processes)
    return packs, best_fit(lengths, capacity_for(lengths, rows / packs, full.capacity))


def capacity_for(lengths: np.ndarray, rows_a_pack: float, limit: int) -> int:
    """Return the smallest capacity, up to `limit`, with which full packs would hold `rows_a_pack` rows on average."""
    ascending = np.sort(np.asarray(lengths, dtype=np.int64))
    sums = np.concatenate([[0], np.cumsum(ascending)])

    def packs(capacity: int) -> int:
        joined = int(np.searchsorted(ascending, capacity, side="right"))
        return len(ascending) - joined + math.ceil(sums[joined] / capacity)

    between = range(int(ascending[0]), max(limit, int(ascending[0])))
    return between.start + bisect_left(between, True, key=lambda n: len(lengths) >= rows_a_pack * packs(n))


def _nearest_plan(plan: BatchPlan, packs: float) -> BatchPlan:
    """Return the plan nearest to this many packs a step, with at most the rows of `plan` in one forward pass."""
    each = nearest_multiple(packs / plan.processes, 1)
    at_once = max(size for size in range(1, min(each, plan.per_device) + 1) if each % size == 0)
    return BatchPlan(at_once, each // at_once, plan.processes)


class Units(Protocol):
    """The lengths of a training set's rows or packs: TokenizedRows, or those that a plan is made for."""

    @property
    def packing(self) -> Packing | None:
        """The packs, or None if rows are not packed."""

    @property
    def streamed(self) -> bool:
        """Return whether these are only the first rows of a stream."""

    @property
    def units(self) -> int:
        """Number of units that the batch plan counts: packs, or rows."""

    def lengths(self) -> np.ndarray:
        """Return the tokens of each unit and of the filler, int64 (units + 1,)."""
