"""Prepare a run as train_ddp.py does, up to its first step, for benchmarks that replay its micro-batches as CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unsloth_ddp.data.training_data import TrainingData
    from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
    from unsloth_ddp.run.context import Run
    from unsloth_ddp.training.step.captured_step import CapturedStep


@dataclass(frozen=True)
class Prepared:
    """Hold a run that is about to take its first step.

    Attributes:
        captured: replays micro-batches; on a CPU it computes what a CUDA graph would. None if the run uses no graphs.
        runner: computes micro-batches as the backend does.
    """

    run: Run
    trainer: Any
    data: TrainingData
    captured: CapturedStep | None
    runner: MicroBatchRunner

    def batch(self, first: int, packs: int) -> dict[str, Any]:
        """Return the micro-batch of so many packs, on the device; with fewer packs in the data, it has those."""
        last = min(first + packs, self.data.train.units)
        return self.runner.batch_of([self.data.train.examples[index] for index in range(first, last)])


@contextmanager
def prepared_run(argv: list[str], *, recompute: bool = False) -> Iterator[Prepared]:
    """Prepare a run and choose its micro-batch, its trial of a CUDA graph included; the model is in training mode.

    Args:
        argv: options of the run.
        recompute: compute layers again in the backward pass on a CPU too, where no run uses CUDA graphs.
    """
    import torch

    from unsloth_ddp.config.parse import parse_settings
    from unsloth_ddp.distributed.ranks import Ranks
    from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
    from unsloth_ddp.model.forward.packed_forward import PackedForward
    from unsloth_ddp.run import stages
    from unsloth_ddp.run.context import open_run
    from unsloth_ddp.sizing.graphs import shape_for
    from unsloth_ddp.training.step.captured_step import CapturedStep

    with open_run(parse_settings(argv), Ranks()) as run:
        stages.check_model(run)
        stages.import_backend(run)
        config = stages.make_config(run)
        stages.read_examples(run)
        model, tokenizer = stages.load_model(run)
        data = stages.prepare_data(run, model, tokenizer, None)
        trainer = stages.make_trainer(run, config, model, tokenizer, data)
        trainer.choose_micro_batch(None)
        model.train()
        device, autocast = trainer.args.device, trainer.accelerator.autocast
        captured = trainer.step.graphs.captured
        if captured is None and device.type == "cpu":
            shape = shape_for(data.train, trainer.args.per_device_train_batch_size, run.settings.max_length)
            forward = PackedForward(model, shape, recompute=recompute)
            captured = CapturedStep(model, forward, autocast, torch.bfloat16, device)
            trainer.collate.pad_to_shape(shape)
        runner = MicroBatchRunner(model, device, trainer.step.task.loss, trainer.data_collator, autocast)
        yield Prepared(run, trainer, data, captured, runner)


def compiled_graphs() -> int:
    """Return how many graphs torch.compile has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
