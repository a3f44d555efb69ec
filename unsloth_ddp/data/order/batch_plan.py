"""Plan which rows an optimizer step sees, independently of the number of processes. Pure arithmetic.

The global batch (rows per optimizer step over all processes) stays the same when GPUs are added:

    global batch = per-device batch x accumulation x processes

Row order is a function of (rows, seed, epoch) alone. Micro-batches are dealt to the processes in turn, so step s
sees rows s x global batch to (s + 1) x global batch of that order in every layout of the same global batch. Within a
step, rows are arranged by length, which changes which process computes a row and when, but not the result. If rows are
packed (packing.py), a "row" here is a pack.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.units import counted

DEFAULT_GLOBAL_BATCH = 16
# A global batch that is so many times larger is not proposed.
MOST_TIMES = 16


@dataclass(frozen=True)
class BatchPlan:
    """Rows per forward pass of one process, forward passes per step, and processes."""

    per_device: int
    accumulation: int
    processes: int

    @property
    def global_batch(self) -> int:
        """Rows per optimizer step over all processes."""
        return self.per_device * self.accumulation * self.processes

    def steps_per_epoch(self, rows: int) -> int:
        """Return the optimizer steps in one pass over `rows`; the last step may hold fewer rows."""
        return math.ceil(rows / self.global_batch)

    def steps(self, rows: int, epochs: float, max_steps: int) -> int:
        """Return the optimizer steps of a run; a positive `max_steps` overrides `epochs`, as in Transformers."""
        return max_steps if max_steps > 0 else math.ceil(epochs * self.steps_per_epoch(rows))


def plan_batch(per_device: int, processes: int, global_batch: int | None, accumulation: int | None) -> BatchPlan:
    """Return the plan for a global batch or an accumulation (or both, if they agree).

    With neither, take the global batch nearest to DEFAULT_GLOBAL_BATCH that divides.

    Raises:
        UserError: the global batch does not divide, or contradicts the accumulation.
    """
    slots = per_device * processes
    if accumulation is None:
        rows = global_batch or nearest_multiple(DEFAULT_GLOBAL_BATCH, slots)
        if rows % slots:
            raise UserError(
                f"global_batch_size {rows} does not divide into {counted(per_device, 'row')} a device x "
                f"{counted(processes, 'process')} = {counted(slots, 'row')} at a time; the nearest that does is "
                f"{nearest_multiple(rows, slots)}."
            )
        accumulation = rows // slots
    plan = BatchPlan(per_device, accumulation, processes)
    if global_batch is not None and global_batch != plan.global_batch:
        raise UserError(
            f"global_batch_size {global_batch} and gradient_accumulation_steps {accumulation} disagree: "
            f"{counted(per_device, 'row')} a device x {accumulation} x {counted(processes, 'process')} = "
            f"{plan.global_batch}; give only one of the two."
        )
    return plan


def check_layouts(
    plan: BatchPlan, nodes: range, per_node: int, plan_of: Callable[[int], BatchPlan], option: str
) -> None:
    """Refuse a job that could lose nodes and go on with a number of processes that cannot take the same steps.

    Args:
        nodes: the numbers of nodes with which the job may go on.
        per_node: processes on each node.
        plan_of: returns the plan that a number of processes makes, or raises a UserError.
        option: sets the global batch in the units of `plan`, rows or packs.

    Raises:
        UserError: naming the first number of nodes that cannot share a step.
    """

    def takes_the_same(count: int) -> bool:
        if plan.global_batch % (count * per_node):
            return False
        try:
            return plan_of(count * per_node).global_batch == plan.global_batch
        except UserError:
            return False

    wrong = [count for count in nodes if not takes_the_same(count)]
    if not wrong:
        return
    remedies = []
    slots = plan.per_device
    for count in nodes:
        slots = min(math.lcm(slots, plan.per_device * count * per_node), MOST_TIMES * plan.global_batch + 1)
    larger = math.ceil((plan.global_batch + 1) / slots) * slots if plan.global_batch % slots else plan.global_batch
    if larger <= MOST_TIMES * plan.global_batch:
        remedies.append(f"{option} {larger}, which {nodes.start} to {nodes.stop - 1} nodes can share")
    if wrong[-1] < nodes.stop - 1:
        remedies.append(f"--min_nodes {wrong[-1] + 1}")
    raise UserError(
        f"min_nodes {nodes.start} allows this job to go on with {counted(wrong[0], 'node')}, but "
        f"{counted(wrong[0] * per_node, 'process')} cannot share the {plan.global_batch} of a step; give "
        f"{', or '.join(remedies) or 'another number of nodes'}."
    )


def nearest_multiple(number: float, slots: int) -> int:
    """Return the multiple of `slots` nearest to `number`, at least `slots`; of two equally near ones, the larger."""
    return max(1, math.floor(number / slots + 0.5)) * slots


def rows_at_once(rows: int, limit: int, processes: int) -> int:
    """Return the batch size of a process with which `rows` fill the fewest batches of at most `limit` rows evenly.

    With batches of `limit` rows, the last batch would be padded with filler rows, which cost as much as other rows.
    """
    batches = math.ceil(rows / (limit * processes))
    return math.ceil(rows / (batches * processes)) if batches else limit


class RowOrder:
    """Row indices of one epoch, padded with a filler index to a multiple of `multiple`.

    The filler index is `rows`; the data has a row without supervised tokens there. So every process gets the same
    number of rows, and no row is seen twice.
    """

    def __init__(self, rows: int, multiple: int, seed: int | None) -> None:
        """`seed` None keeps the order of the data."""
        self.rows = rows
        self.multiple = multiple
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order is used; Transformers calls this through the data loader."""
        self.epoch = epoch

    def __len__(self) -> int:
        return math.ceil(self.rows / self.multiple) * self.multiple

    def indices(self) -> np.ndarray:
        """Return the indices of the whole epoch, int64 (len(self),)."""
        order = np.arange(self.rows)
        if self.seed is not None:
            np.random.default_rng([self.seed, self.epoch]).shuffle(order)
        return np.concatenate([order, np.full(len(self) - self.rows, self.rows)])

    def __iter__(self) -> Iterator[int]:
        yield from self.indices().tolist()


class BalancedOrder(RowOrder):
    """Arrange the rows of each optimizer step by length and work (see `arrange`)."""

    def __init__(
        self, plan: BatchPlan, lengths: np.ndarray, seed: int | None, *, padded: bool, beside: np.ndarray | None = None
    ) -> None:
        """`lengths` are the tokens of each row and, at the end, of the filler; `seed` None keeps the order of the data.

        `beside` is the work of each row's images, in tokens.
        """
        super().__init__(len(lengths) - 1, plan.per_device * plan.processes, seed)
        self.plan = plan
        self.lengths = lengths
        self.beside = beside
        self.padded = padded

    def __iter__(self) -> Iterator[int]:
        order, step = self.indices(), self.plan.global_batch
        for start in range(0, len(order), step):
            rows = order[start : start + step]
            yield from arrange(rows, self.lengths, self.plan, padded=self.padded, beside=self.beside).tolist()


def arrange(
    rows: np.ndarray, lengths: np.ndarray, plan: BatchPlan, *, padded: bool, beside: np.ndarray | None = None
) -> np.ndarray:
    """Return the rows of one step in the order of distribution: micro-batch m goes to process m % processes.

    Rows of similar length share a micro-batch, which minimizes padding. Micro-batches of similar cost share an
    accumulation position, and the process with the highest cost so far gets the cheapest, so that the costs of the
    processes never differ by more than those of one position.

    Args:
        rows: int (rows of the step,), a multiple of per-device batch x processes.
        lengths: tokens of every row of the data.
        padded: if set, every row of a micro-batch costs as much as its longest row; otherwise its own length.
        beside: the work of every row's images in the towers, in tokens, which comes on top.
    """
    beside = np.zeros_like(lengths) if beside is None else beside
    by_length = rows[np.lexsort((-beside[rows], -lengths[rows]))]
    batches = by_length.reshape(-1, plan.per_device)
    costs = lengths[batches].max(axis=1) * plan.per_device if padded else lengths[batches].sum(axis=1)
    costs = costs + beside[batches].sum(axis=1)
    dearest = np.argsort(-costs, kind="stable")
    positions = batches[dearest].reshape(-1, plan.processes, plan.per_device)
    costs = costs[dearest].reshape(-1, plan.processes)
    dealt = np.empty_like(positions)
    so_far = np.zeros(plan.processes, dtype=np.int64)
    for position, (group, cost) in enumerate(zip(positions, costs, strict=True)):
        ranks = np.argsort(so_far, kind="stable")
        dealt[position, ranks] = group
        so_far[ranks] += cost
    return dealt.reshape(-1)
