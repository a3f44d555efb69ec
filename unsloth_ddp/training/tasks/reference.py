"""Compute a preference task's reference: log-probabilities of answers under the initial weights or another model."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.dataset import TokenizedRows, longest_row
from unsloth_ddp.data.order.collate import Collate
from unsloth_ddp.data.order.split import split_examples
from unsloth_ddp.data.sources.identity import checksum_of_rows
from unsloth_ddp.data.training_data import TrainingData
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.files.identity import model_identity
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.model.loading.reference_model import load_reference, reference_model
from unsloth_ddp.model.modules import evaluation_mode, replaced
from unsloth_ddp.model.packing.attention import flatten_for
from unsloth_ddp.training.tasks.log_probabilities import AnswerLogProbabilities, answer_tokens
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.known_errors import is_out_of_memory

FILE_NAME = "reference_log_probabilities.safetensors"
COLUMN = "reference"
ROWS_AT_ONCE = 8

# Largest difference of policy and reference before step 1, per token: rounding of sums, and of kernels in 16 bit.
SAME = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}

# (model, batch) -> log-probability of each row's answer, (rows,).
LogProbabilities = Callable[[Any, dict[str, Any]], Tensor]
# (what computes those of rows, model, batch) -> those of the two answers of each example, (examples, 2).
OfExamples = Callable[[LogProbabilities, Any, dict[str, Any]], Tensor]


class Reference:
    """Return the reference's log-probabilities of the rows of a micro-batch."""

    described: str
    # Whether the model equals it before step 1.
    is_start = True

    def prepare(self, runner: MicroBatchRunner, runtime: Runtime, data: TrainingData, checkpoint: Path | None) -> None:
        """Prepare the first step; every rank calls this."""

    def of(self, model: Any, batch: dict[str, Any]) -> Tensor:
        """Return the log-probability of each row's answer, (rows,), without gradient."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Write into a checkpoint what `prepare` needs to resume from it."""


def make_reference(
    settings: Settings,
    runtime: Runtime,
    model: Any,
    of_rows: LogProbabilities,
    of_examples: OfExamples,
    data: TrainingData,
) -> Reference:
    """Return the reference that the settings name; every rank calls this.

    Args:
        of_rows: computes the log-probability of each row of a batch, (rows,).
        of_examples: computes those of the two answers of each example.
    """
    if settings.reference_model and settings.streaming:
        return ModelBeside(settings, runtime, model, data)
    if settings.reference_model:
        return OtherModel(settings, of_rows, of_examples, data)
    if settings.reference == "precomputed" or settings.method == "full":
        return Precomputed(of_rows, of_examples, data)
    return AdapterOff(of_rows)


def check_same(
    compute: LogProbabilities, reference: Reference, runner: MicroBatchRunner, runtime: Runtime, data: TrainingData
) -> None:
    """Refuse a model that differs from its reference before step 1.

    Raises:
        UserError: with the difference.
    """
    examples = data.train.examples
    batch = runner.batch_of([examples[index] for index in range(min(2, data.train.units))])
    with torch.no_grad(), evaluation_mode(runner.model), runner.autocast():
        policy, expected = compute(runner.model, batch), reference.of(runner.model, batch)
    tokens = answer_tokens(batch).clamp(min=1)
    difference = ((policy - expected).abs() / tokens).max().item()
    if not difference <= SAME[runtime.precision]:
        raise UserError(
            f"the model differs from its reference before step 1, by {difference:.2g} in the log-probability of a "
            "token, so the rewards would not begin at 0; begin with a new adapter that changes nothing, or merge the "
            "old one first."
        )


class AdapterOff(Reference):
    """Compute the reference with the trained model without its adapter and without dropout, in each step."""

    described = "the model without its adapter"

    def __init__(self, compute: LogProbabilities) -> None:
        self.compute = compute

    def of(self, model: Any, batch: dict[str, Any]) -> Tensor:
        """Return the log-probability of each row's answer, (rows,), without gradient."""
        with torch.no_grad(), evaluation_mode(model), without_adapter(model):
            return self.compute(model, batch)


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Switch PEFT's layers, and modules trained in full beside them, to the base model's weights inside the block.

    PEFT's disable_adapter also stops the gradients of the adapter, and sharding libraries and the gradient exchange do
    not expect weights that are trained at times only.
    """
    layers = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    assert layers, "the model has no adapter"
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(replaced(layer, "_disable_adapters", True))
        yield


class ModelBeside(Reference):
    """Compute the reference in each step with another model beside the trained one: rows of a stream come step by step.

    It is loaded at once, as trials of the memory compute with it. A resume checks that its files did not change.
    """

    is_start = False

    def __init__(self, settings: Settings, runtime: Runtime, model: Any, data: TrainingData) -> None:
        self.described = f"{settings.reference_model}, computed in each step"
        packed = data.train.first_tokens() if data.train.packing is not None else None
        once, longest = data.packing.prompts_once, longest_row(settings, data.train, data.evaluation)
        self.model, theirs = load_reference(settings, runtime, longest, packed, prompts_once=once)
        if packed is not None and theirs != dataclasses.replace(flatten_for(runtime, model), prompts_once=once):
            raise UserError(
                f"reference_model {settings.reference_model} computes packs with another kernel than model "
                f"{settings.model}; give --packing off."
            )
        self.compute = AnswerLogProbabilities(self.model)

    def of(self, model: Any, batch: dict[str, Any]) -> Tensor:
        """Return the log-probability of each row's answer, (rows,), without gradient."""
        with torch.no_grad():
            return self.compute(self.model, batch)


class Precomputed(Reference):
    """Compute the reference of every row once, before step 1, and keep it in the checkpoints.

    The values are added to the rows (TokenizedRows.added), so that a micro-batch holds those of its own rows.
    """

    described = "computed once before step 1"
    # Name and files of another model; it is the key of the metadata too.
    reference = ""

    def __init__(self, of_rows: LogProbabilities, of_examples: OfExamples, data: TrainingData) -> None:
        self.of_rows, self.of_examples = of_rows, of_examples
        self.sets = {"train": data.train} | ({"eval": data.evaluation} if data.evaluation else {})
        for rows in self.sets.values():
            # Trials of the memory need the column before it is known.
            rows.added[COLUMN] = np.zeros((rows.counts.rows + 1, 2), dtype=np.float32)

    def prepare(self, runner: MicroBatchRunner, runtime: Runtime, data: TrainingData, checkpoint: Path | None) -> None:
        """Compute the values of all rows, spread over the ranks, or read those of a checkpoint."""
        if checkpoint is not None:
            self._read(checkpoint)
            return
        self._compute_all(runner, runtime, data.plan.per_device)

    def _compute_all(self, runner: MicroBatchRunner, runtime: Runtime, most_units: int) -> None:
        self._compute_with(self.of_rows, runner, runtime, most_units)

    def _compute_with(
        self, of_rows: LogProbabilities, runner: MicroBatchRunner, runtime: Runtime, most_units: int
    ) -> None:
        print("Computing the reference's log-probabilities ...", flush=True)
        for rows in self.sets.values():
            self._compute(rows, of_rows, runner, runtime, most_units)

    def _compute(
        self,
        rows: TokenizedRows,
        of_rows: LogProbabilities,
        runner: MicroBatchRunner,
        runtime: Runtime,
        most_units: int,
    ) -> None:
        ranks, filler, examples = runtime.ranks, rows.counts.rows, rows.examples
        # The longest first, so that memory runs out at once or never. Each rank takes as many batches.
        order = np.argsort(-rows.lengths()[:-1], kind="stable")
        per_rank = ROWS_AT_ONCE if rows.packing is None else math.ceil(ROWS_AT_ONCE / rows.packing.rows_a_pack)
        # A micro-batch of a step fits.
        per_rank = min(per_rank, most_units)
        at_once = per_rank * ranks.world_size
        order = np.append(order, np.full(-len(order) % at_once, rows.units))
        values = torch.zeros((filler + 1, 2), dtype=torch.float32, device=runner.device)
        with torch.no_grad(), evaluation_mode(runner.model), runner.autocast():
            for start in range(ranks.rank * per_rank, len(order), at_once):
                indices = order[start : start + per_rank].tolist()
                computed = self._values(of_rows, runner, [examples[index] for index in indices], runtime)
                members = torch.tensor(
                    [row for index in indices for row in examples.members(index)], device=runner.device
                )
                values[members] = computed.float()
        values[filler] = 0
        if ranks.world_size > 1:
            # Every row is one rank's, and 0 elsewhere.
            torch.distributed.all_reduce(values)
        rows.added[COLUMN][:] = values.cpu().numpy()

    def _values(
        self, of_rows: LogProbabilities, runner: MicroBatchRunner, examples: list[Any], runtime: Runtime
    ) -> Tensor:
        """Return the log-probabilities of these examples' answers, (examples, 2), half at a time if memory runs out."""
        try:
            return self.of_examples(of_rows, runner.model, runner.batch_of(examples))
        except RuntimeError as error:
            halves = split_examples(examples, 2, rows_an_example=2)
            # With sharded weights every rank computes as many batches.
            if len(halves) == 1 or runtime.sharding != "none" or not is_out_of_memory(error):
                raise
        return torch.cat([self._values(of_rows, runner, half, runtime) for half in halves])

    def of(self, model: Any, batch: dict[str, Any]) -> Tensor:
        """Return the log-probability of each row's answer, (rows,), without gradient."""
        return batch[COLUMN].flatten()

    def save(self, folder: Path) -> None:
        """Write the values of all rows, and checksums of the rows that they belong to."""
        metadata = {name: checksum_of_rows(rows) for name, rows in self.sets.items()} | {"reference": self.reference}
        save_file({name: rows.added[COLUMN] for name, rows in self.sets.items()}, folder / FILE_NAME, metadata)

    def _read(self, folder: Path) -> None:
        if not (folder / FILE_NAME).is_file():
            raise UserError(
                f"{folder} has no {FILE_NAME}, and the reference cannot be computed with trained weights; resume from "
                "a checkpoint that has it, or start anew with --resume no."
            )
        with safe_open(folder / FILE_NAME, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("reference", "") != self.reference:
                raise UserError(
                    f"{folder / FILE_NAME} holds the values of another reference model, and those of this one cannot "
                    "be computed with trained weights; give --reference_model as before, or start anew with --resume "
                    "no."
                )
            for name, rows in self.sets.items():
                if metadata.get(name) != checksum_of_rows(rows):
                    what = "training" if name == "train" else "evaluation"
                    raise UserError(
                        f"the {what} rows are not those whose reference {folder / FILE_NAME} holds; give the rows that "
                        "the run began with, or start anew with --resume no."
                    )
                rows.added[COLUMN][:] = file.get_tensor(name)


class OtherModel(Precomputed):
    """Compute the reference of every row with another model, which is freed before step 1."""

    is_start = False

    def __init__(
        self, settings: Settings, of_rows: LogProbabilities, of_examples: OfExamples, data: TrainingData
    ) -> None:
        super().__init__(of_rows, of_examples, data)
        self.settings = settings
        self.described = f"{settings.reference_model}, computed once before step 1"

    def prepare(self, runner: MicroBatchRunner, runtime: Runtime, data: TrainingData, checkpoint: Path | None) -> None:
        """Compute the values of all rows, or read those of a checkpoint that had the same reference model."""
        of_reference = self.settings.of_reference
        assert of_reference is not None
        named = {"model": str(of_reference.model), "revision": str(of_reference.model_revision)}
        # A folder is known by its files, wherever it lies.
        self.reference = runtime.broadcast_from_main(lambda: json.dumps(model_identity(of_reference) or named))
        if checkpoint is not None and runtime.broadcast_from_main(
            partial(self._are_of_another, checkpoint / FILE_NAME)
        ):
            print("The values that the checkpoint keeps are of another reference model.", flush=True)
            checkpoint = None
        super().prepare(runner, runtime, data, checkpoint)

    def _are_of_another(self, path: Path) -> bool:
        if not path.is_file():
            return True
        with safe_open(path, framework="numpy") as file:
            return bool((file.metadata() or {}).get("reference") != self.reference)

    def _compute_all(self, runner: MicroBatchRunner, runtime: Runtime, most_units: int) -> None:
        train, evaluation = self.sets["train"], self.sets.get("eval")
        longest = longest_row(self.settings, train, evaluation)
        packed = None if train.packing is None else train.first_tokens()
        with reference_model(self.settings, runtime, longest, packed) as (model, flatten):
            # Its output head and its kernel for packs may differ from those of the trained model.
            assert isinstance(runner.collate, Collate)
            collate = dataclasses.replace(runner.collate, flatten=flatten)
            other = dataclasses.replace(runner, model=model, collate=collate)
            self._compute_with(AnswerLogProbabilities(model), other, runtime, most_units)
