"""Feed each rank the rows of its micro-batches, prepared or streamed, from the first step or a checkpoint's step."""

import math
import os
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.dataset import TokenizedRows
from unsloth_ddp.data.order.batch_plan import BalancedOrder, BatchPlan
from unsloth_ddp.data.order.reading_processes import StayWithParent
from unsloth_ddp.data.order.stream_steps import StreamedSteps, streamed_steps
from unsloth_ddp.data.order.stream_windows import Unit, streamed_windows
from unsloth_ddp.distributed.runtime import Runtime

# Processes of each rank that process images ahead on a GPU; more would seldom be busy.
IMAGE_WORKERS = 4


def image_workers(num_workers: int, runtime: Runtime, rows: TokenizedRows) -> int:
    """Return the processes of this rank that read micro-batches with images ahead.

    Args:
        num_workers: dataloader_num_workers of trainer_args.
    """
    if num_workers or rows.streamed or runtime.device_type != "cuda":
        return num_workers
    return min(IMAGE_WORKERS, max(1, len(os.sched_getaffinity(0)) // runtime.ranks.local_world_size - 1))


class RowFeed:
    """Order the rows of a run.

    Upstream shuffles with the global random state, and repeats some rows to give every rank the same number.

    Args:
        seed: for the order of the training rows.
    """

    def __init__(self, settings: Settings, runtime: Runtime, train: TokenizedRows, tokenizer: Any, seed: int) -> None:
        self.settings = settings
        self.runtime = runtime
        self.train = train
        self.seed = seed
        # Made now, because the tokenizer's chat template may change later.
        self._windows = (
            streamed_windows(
                settings, train.packing, tokenizer, seed, train.template_date, train.processing, train.vocabulary
            )
            if train.streamed
            else None
        )
        self._order: BalancedOrder | None = None
        self._streamed: StreamedSteps | None = None
        self._stay = StayWithParent()

    @property
    def streamed(self) -> bool:
        """Return whether the training rows are read while training goes on."""
        return self._windows is not None

    def train_order(self, plan: BatchPlan) -> BalancedOrder:
        """Return the order of prepared training rows."""
        train = self.train
        self._order = BalancedOrder(
            plan, train.lengths(), self.seed, padded=train.packing is None, beside=train.work_of_images()
        )
        return self._order

    def eval_order(self, evaluation: TokenizedRows, at_once: int) -> BalancedOrder:
        """Return the order of evaluation rows, planned as one step, so that rows of similar length share a batch."""
        processes = self.runtime.ranks.world_size
        plan = BatchPlan(at_once, math.ceil(evaluation.units / (at_once * processes)), processes)
        return BalancedOrder(plan, evaluation.lengths(), None, padded=True, beside=evaluation.work_of_images())

    def streamed_loader(
        self, plan: BatchPlan, collate: Callable[[list[Unit]], dict[str, Any]], *, pinned: bool
    ) -> DataLoader:
        """Return this rank's streamed micro-batches; accelerate must not shard them again."""
        assert self._windows is not None
        train = self.train
        self._streamed = streamed_steps(
            self.settings, self.runtime, plan, train.packing, self._windows, train.processing
        )

        def collate_unless_skipped(units: list[Unit] | None) -> dict[str, Any] | None:
            return None if units is None else collate(units)

        return DataLoader(self._streamed, batch_size=None, collate_fn=collate_unless_skipped, pin_memory=pinned)

    def shield_workers(self, loader: Any) -> Any:
        """Return a loader whose worker processes do not end by a signal to all processes of the job."""
        # The loader of accelerate begins the workers of the one within.
        within = getattr(loader, "base_dataloader", loader)
        if within.num_workers:
            within.worker_init_fn, within.multiprocessing_context = self._stay, "fork"
        return loader

    def begin_epoch(self, epoch: int) -> None:
        """Set the epoch of the order.

        With several ranks accelerate does not find the sampler inside the loader that skips the rows of a resumed
        epoch, and would continue in the order of the first epoch.
        """
        if self._order is not None:
            self._order.set_epoch(epoch)

    def position(self) -> dict[str, Any] | None:
        """Return the position in the stream for a checkpoint; None for prepared rows."""
        return self._streamed.saved() if self._streamed else None

    def resume(self, step: int, position: dict[str, Any] | None) -> None:
        """Continue the stream after `step` steps; prepared rows are skipped by Transformers."""
        if self._streamed is not None:
            self._streamed.go_on(step, position)

    def ends_epoch(self, step: int, plan: BatchPlan) -> bool:
        """Return whether an epoch ends with `step`; a stream counts as one long epoch."""
        return not self.streamed and step % plan.steps_per_epoch(self.train.units) == 0

    def seconds_waited(self, reading: float) -> float:
        """Return the seconds of `reading` without the time in which ranks wait for each other for streamed rows."""
        return self._streamed.waited() if self._streamed else reading
