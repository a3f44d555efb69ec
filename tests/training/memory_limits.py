"""Take optimizer steps of a real trainer while a fake allocator runs out of memory, in the processes of tests."""

from __future__ import annotations

import copy
import functools
import os
import random
import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.distributed.ranks import ranks_from_environment
from unsloth_ddp.run.context import open_run

RATE = 0.1


def run_cases(argv: list[str], folder: str, seeds: list[int], steps: int) -> None:
    """Compare runs that run out of memory with runs that take the lower rung from the same step on."""
    os.chdir(folder)
    ranks = ranks_from_environment()
    with open_run(parse_settings(argv, ""), ranks) as run:
        from unsloth_ddp.run import stages

        stages.check_model(run)
        stages.read_examples(run)
        stages.import_backend(run)
        config = stages.make_config(run)
        model, tokenizer = stages.load_model(run)
        data = stages.prepare_data(run, model, tokenizer, None)
        trainer = stages.make_trainer(run, config, model, tokenizer, data)
        stages.begin(run, trainer, None)
        steps_of = StepsOfTrainer(trainer, run.runtime, steps)
        outcomes = [steps_of.compare(seed) for seed in seeds]
        steps_of.evaluate_in_parts()
        print(f"{len(seeds)} cases: {sorted(set(outcomes))}", flush=True)


class StepsOfTrainer:
    """Take the steps of a trainer again and again from the same weights, with plain SGD."""

    def __init__(self, trainer: Any, runtime: Any, steps: int) -> None:
        from transformers import Trainer

        from unsloth_ddp.training.trainer import ResumableTrainer

        self.trainer, self.step, self.rank = trainer, trainer.step, runtime.ranks.rank
        self.ranks = runtime.ranks.world_size
        self.model: Any = trainer.model
        if self.ranks > 1:
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        trainer.model_wrapped = self.model
        trainer._created_lr_scheduler = False
        trainer.step.task.begin(trainer._trained_runner(), runtime, trainer.data, None)
        self.trained = [p for p in trainer.model.parameters() if p.requires_grad]
        self.first = [p.detach().clone() for p in self.trained]
        micro_batches = list(trainer.get_train_dataloader())
        count = trainer.plan.accumulation
        self.batches = [micro_batches[start * count : (start + 1) * count] for start in range(steps)]
        self.compute = functools.partial(ResumableTrainer.training_step, trainer)
        assert issubclass(ResumableTrainer, Trainer)
        self.ladder = self.step.ladder

    def take(self, allocator: Allocator | None = None, lower: tuple[int, int] | None = None) -> list[torch.Tensor]:
        """Return the trained weights after all steps.

        Args:
            allocator: runs out of memory.
            lower: (step, level): take that rung of the ladder from a step on, on this rank.
        """
        for weight, first in zip(self.trained, self.first, strict=True):
            weight.data.copy_(first)
        self.step._use(0)
        self.trainer.meter.reset()
        torch.manual_seed(7)
        for number, batches in enumerate(copy.copy(of_step) for of_step in self.batches):
            # A step takes the rows out of its batches.
            batches = [dict(batch) for batch in batches]
            if lower is not None and number == lower[0]:
                self.step._use(lower[1])
            self.model.train()
            self.trainer.model.zero_grad()
            divisor = self.step.begin(batches, 0.0, self.trainer._trained_runner(), self.trainer._sum_over_ranks)
            for index, batch in enumerate(batches):
                last = index + 1 == len(batches)
                limited = allocator.limited(self, number, index) if allocator else functools.partial(_unlimited)
                with limited() if allocator is None else limited:
                    self.step.micro_batch(self.compute, self.model, batch, divisor, last=last)
            for weight in self.trained:
                if weight.grad is not None:
                    weight.data -= RATE * weight.grad
        return [p.detach().clone() for p in self.trained] + [self.trainer.meter.sums.clone()]

    def compare(self, seed: int) -> str:
        """Compare a run that runs out of memory somewhere with one that has the lower rung; return how it went down."""
        drawn = random.Random(seed)
        number, index = drawn.randrange(len(self.batches)), drawn.randrange(len(self.batches[0]))
        level = drawn.randrange(1, min(4, len(self.ladder)))
        where = drawn.choice(["forward", "backward"])
        rank = drawn.randrange(self.ranks)
        if where == "backward" and self.ranks > 1 and index + 1 == len(self.batches[0]):
            # Gradients that were sent before memory ran out are those of the rung before: with more passes their sums
            # are rounded otherwise.
            level = 1
        limited_rank = rank == self.rank
        short = self.take(Allocator(number, index, level, where) if limited_rank else None)
        assert self.step.level == (level if limited_rank else 0), (seed, self.step.level, level)
        expected = self.take(lower=(number, level) if limited_rank else None)
        for weight, other in zip(short, expected, strict=True):
            assert torch.equal(weight, other), (
                f"seed {seed}: step {number}, micro-batch {index}, {where}, {self.ladder[level]}"
            )
        return f"{self.ladder[level]} in {where}"

    def evaluate_in_parts(self) -> None:
        """Compare an evaluation whose batches do not fit with one whose batches do."""
        whole = self.trainer.evaluate()

        def short(module: Any, args: Any, kwargs: Any) -> None:
            if not torch.is_grad_enabled() and len(kwargs["input_ids"]) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

        handle = self.trainer.model.register_forward_pre_hook(short, with_kwargs=True)
        in_parts = self.trainer.evaluate()
        handle.remove()
        assert self.step.evaluation_passes > 1
        for name, value in whole.items():
            if not name.endswith(("runtime", "per_second")):
                assert abs(in_parts[name] - value) < 1e-5 * max(1, abs(value)), (name, in_parts[name], value)


class Allocator:
    """Raise as torch does where a micro-batch of a step needs more memory than a rung of the ladder leaves."""

    def __init__(self, step: int, index: int, level: int, where: str) -> None:
        self.step, self.index, self.level, self.where = step, index, level, where

    @contextmanager
    def limited(self, trained_steps: StepsOfTrainer, step: int, index: int) -> Any:
        if step != self.step or index != self.index:
            yield
            return
        start_of: Callable[[], Any] = lambda: trained_steps.step._start  # noqa: E731

        def short(*_: Any) -> None:
            if torch.is_grad_enabled() or self.where == "backward":
                in_that_one = start_of() is not None and start_of().batches_computed >= self.index
                if in_that_one and trained_steps.step.level < self.level:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

        if self.where == "forward":
            handle = trained_steps.trainer.model.register_forward_pre_hook(short)
        else:
            handle = trained_steps.trained[len(trained_steps.trained) // 2].register_hook(short)
        try:
            yield
        finally:
            handle.remove()


@contextmanager
def _unlimited() -> Any:
    yield


if __name__ == "__main__":
    sys.exit("a helper of test_out_of_memory.py")
