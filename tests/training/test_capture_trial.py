"""Test captured steps from the memory trial to a replay: what is tried, compared and timed, and how a step fails."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.test_fixed_shape import pack_of
from tests.training.test_captured_step import fail, gradients, model_of, ordinary_sum, with_dropout_of
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.order.collate import Collate, Flatten, PadRight
from unsloth_ddp.data.order.split import ROWS, KeepRows
from unsloth_ddp.distributed.exit_codes import quiet
from unsloth_ddp.model.forward.gradient_checkpointing import GradientCheckpointing
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.model.forward.packed_forward import PackedForward
from unsloth_ddp.sizing.ladder import LadderFacts, Rung
from unsloth_ddp.training.shown.meter import Meter, OwnWorkTimer, Totals, peak_memory_bytes
from unsloth_ddp.training.step import capture_trial
from unsloth_ddp.training.step.capture_check import FP8_TOLERANCES, OUT_OF_MEMORY, TOLERANCES, Tolerances
from unsloth_ddp.training.step.capture_trial import CaptureTrial
from unsloth_ddp.training.step.captured_step import CapturedStep, CaptureFailed
from unsloth_ddp.training.step.optimizer_step import OptimizerStep
from unsloth_ddp.training.tasks.text import TextTask

CPU = torch.device("cpu")


class Rows:
    """Return packed rows."""

    def __init__(self, packs: Sequence[list[int]] = ([60, 50, 30], [128, 100], [9])) -> None:
        lengths = [*packs] * 100
        self.examples = [pack_of(of) for of in lengths]
        self.units, self.streamed, self.processing = len(lengths), False, None
        self.packing = SimpleNamespace(starts=np.cumsum([0, *map(len, lengths)]), longest=128)

    def lengths(self) -> np.ndarray:
        return np.array([*(len(example["input_ids"]) for example in self.examples), 1])


def trial_of(model: Any, *, timed: bool = False, **options: Any) -> CaptureTrial:
    collate = Collate(PadRight(0), Flatten("positions"))
    settings = Settings(model="m", dataset=["d"], max_length=256, num_train_epochs=1000, **options)
    plan = BatchPlan(1, 2, 1)
    data: Any = SimpleNamespace(train=Rows(), plan=plan)

    def loss(model: Any, batch: dict[str, Any], divisor: torch.Tensor) -> torch.Tensor:
        return ordinary_sum(model, batch)

    runner = MicroBatchRunner(model, CPU, loss, collate, lambda: torch.autocast("cpu", torch.bfloat16))
    return CaptureTrial(settings, data, plan, collate, runner, None, timed)


def tried(trial: CaptureTrial, rung: Rung) -> torch.Tensor:
    """Return the gradients of a trial of one pack."""
    compute = trial.trial_pass(rung)
    assert compute is not None and trial._last is not None
    batch = trial.runner.batch_of([Rows().examples[0]])
    assert "padded_batch" in batch
    trial.runner.model.zero_grad()
    compute(batch)
    # Their memory is free for what is tried next.
    assert not trial._last[1].gradients._flat
    flat = gradients(trial.runner.model)
    trial.runner.model.zero_grad()
    return flat


def ordinary_gradients(trial: CaptureTrial) -> torch.Tensor:
    trial.runner.loss_sum(trial.runner.batch_of([Rows().examples[0]])).backward()
    flat = gradients(trial.runner.model)
    trial.runner.model.zero_grad()
    return flat


@pytest.mark.parametrize("kind", ["none", "torch"])
def test_memory_is_tried_with_the_pass_that_is_captured_afterwards(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, compiled, dropped = model_of("lora"), list[Any](), list[Any]()
    trial = trial_of(model)

    @contextlib.contextmanager
    def compiled_layers(forward: PackedForward) -> Iterator[None]:
        compiled.append(forward)
        yield

    unsloth = SimpleNamespace(_unsloth_reset_stray_compile_cache=lambda trainer: dropped.append(trainer.model))
    monkeypatch.setitem(sys.modules, "unsloth.models._utils", unsloth)
    # Compiling takes long on a CPU.
    monkeypatch.setattr(PackedForward, "compiled_layers", compiled_layers)
    captured_gradients = tried(trial, Rung(True, kind, 1))
    assert trial._last is not None
    step = trial._last[1]
    assert step.forward.recompute == (kind == "torch") and (compiled, dropped) == ([step.forward], [model])
    expected = ordinary_gradients(trial)
    assert (captured_gradients - expected).norm() < 0.05 * expected.norm()
    # Another kind takes the same step, and another size another one.
    tried(trial, Rung(True, "none", 1))
    assert trial._last[1] is step
    assert trial.capture(Rung(True, kind, 1)) == (step, None) and step.forward.recompute == (kind == "torch")
    trial.trial_pass(Rung(True, kind, 2))
    assert trial._last[1] is not step
    trial.end(step)
    assert trial._last is None and not step.in_trial and trial.collate.shape == step.shape
    trial.end(None)
    assert trial.collate.shape is None


def test_a_pass_that_cannot_be_computed_is_tried_as_the_backend_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = trial_of(model_of("lora"))
    errors: list[Exception] = [ValueError("no such kernel"), torch.OutOfMemoryError("CUDA out of memory.")]

    def fail(*_: object) -> None:
        raise errors[0]

    monkeypatch.setattr(PackedForward, "loss_sum", fail)
    assert torch.equal(tried(trial, Rung(True, "none", 1)), ordinary_gradients(trial))
    del errors[0]
    with pytest.raises(torch.OutOfMemoryError):
        tried(trial, Rung(True, "none", 1))


def test_a_model_that_cannot_be_called_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("lora")
    model.get_base_model().get_decoder().layers[1].register_forward_pre_hook(fail)
    trial, rung = trial_of(model), Rung(True, "torch", 1)
    assert trial.capture(rung) == (None, "trying it failed: no such layer")
    model.get_base_model().lm_head = torch.nn.Sequential(model.get_base_model().lm_head)
    trial.end(None)
    assert trial.trial_pass(rung) is None
    assert "head is not a plain matrix" in str(trial.capture(rung)[1])


@pytest.mark.parametrize("errors", [1, 2])
def test_a_captured_pass_is_compared_for_one_pack_where_the_backends_takes_too_much_memory(errors: int) -> None:
    trial, tokens = trial_of(model_of("lora")), list[int]()

    def ordinary(model: Any, batch: dict[str, Any], divisor: torch.Tensor) -> torch.Tensor:
        tokens.append(batch["input_ids"].shape[1])
        if len(tokens) <= errors:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return ordinary_sum(model, batch)

    trial.runner = dataclasses.replace(trial.runner, loss=ordinary)
    step, obstacle = trial.capture(Rung(True, "none", 2))
    # Packs of 140 tokens are nearest to the mean.
    assert tokens == [2 * 140, 140]
    assert (step is None, obstacle) == ((True, OUT_OF_MEMORY) if errors == 2 else (False, None))


@pytest.mark.parametrize("kind", ["none", "torch"])
def test_dropout_is_captured_without_recomputing_only(kind: str) -> None:
    trial = trial_of(with_dropout_of(0.1))
    step, obstacle = trial.capture(Rung(True, kind, 1))
    assert trial.random
    if kind == "torch":
        assert step is None and str(obstacle).startswith("gradient checkpointing torch would draw another dropout mask")
    else:
        # What was compared without dropout is not what training replays: both sizes are captured anew.
        assert step is not None and {sizes[0] for sizes in step.graphs} == {*step.shape.smaller, step.shape.tokens}


@pytest.mark.parametrize(
    ("fp8", "installed", "differs", "tried", "used"),
    [
        (False, False, False, [False], False),
        (True, False, False, [False], False),
        (False, True, False, [True], True),
        (False, True, True, [True, False], False),
    ],
)
def test_flash_attention_4_is_used_where_its_trial_succeeds(
    fp8: bool, installed: bool, differs: bool, tried: list[bool], used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, kernels, allowed = trial_of(model_of("lora"), fp8=fp8), list[bool](), set[Tolerances]()
    trial.has_faster_kernel = installed

    def check(step: CapturedStep, batch: Any, ordinary: Any, tolerances: Tolerances) -> str | None:
        kernels.append(step.forward.flash_attention_4)
        allowed.add(tolerances)
        return "its loss would differ by 2.0e-01" if kernels[-1] and differs else None

    monkeypatch.setattr(capture_trial, "check_capture", check)
    monkeypatch.setattr(capture_trial, "draws_random_numbers", lambda *_: (False, None))
    monkeypatch.setattr(capture_trial, "capture_sizes", lambda *_: None)
    step, obstacle = trial.capture(Rung(True, "none", 1))
    assert step is not None and obstacle is None
    assert (kernels, step.forward.flash_attention_4) == (tried, used)
    assert allowed == {FP8_TOLERANCES if fp8 else TOLERANCES}


@pytest.mark.parametrize(
    ("seconds", "expected_obstacle"),
    [
        ({"backend": 1.0, "replayed": 0.9}, None), ({"backend": 1.0, "replayed": 1.01}, None),
        ({"backend": 1.0, "replayed": 1.5}, "a replayed pass takes 1.500 s, and the backend's 1.000 s"),
        # Memory is short for the comparison.
        ({"replayed": 1.5}, None),
    ],
)  # fmt: skip
def test_a_replayed_pass_that_is_slower_is_not_used(
    seconds: dict[str, float], expected_obstacle: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, computed = trial_of(model_of("lora"), timed=True), list[str]()
    replayed = CapturedStep.run

    def run(self: CapturedStep, *args: Any) -> Any:
        computed.append("replayed")
        return replayed(self, *args)

    def timed(compute: Any, device: torch.device) -> float:
        computed.append("backend")
        compute()
        if computed[-1] not in seconds:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return seconds[computed[-1]]

    monkeypatch.setattr(CapturedStep, "run", run)
    monkeypatch.setattr(capture_trial, "_seconds", timed)
    step, obstacle = trial.capture(Rung(True, "none", 1))
    assert obstacle == expected_obstacle and (step is None) == (expected_obstacle is not None)
    assert all(p.grad is None for p in trial.runner.model.parameters())


# ---- steps ----


def step_of(kind: str) -> tuple[OptimizerStep, list[dict[str, Any]], LadderFacts]:
    """Return a step that replays micro-batches, and two of them."""
    model = model_of("lora")
    trial, rung = trial_of(model), Rung(True, kind, 1)
    captured, obstacle = trial.capture(rung)
    assert obstacle is None
    trial.end(captured)
    runtime: Any = SimpleNamespace(backend="transformers", sharding="none")
    checkpointing = GradientCheckpointing(model, runtime, Settings(model="m", gradient_checkpointing="auto"))
    meter = Meter(
        lambda sums: sums[None], 1, CPU, OwnWorkTimer(CPU), Totals(), TextTask(None, divides=True, fused_head=False)
    )
    task: Any = SimpleNamespace(units=lambda batch: torch.ones(()), for_step=lambda *_: task)
    step = OptimizerStep(task, checkpointing, trial.collate, None, meter, CPU, 1)
    facts = LadderFacts(("none", "torch"), (1, 2), ("none", "torch"), (1, 2), lambda rows: 3)
    step.begin_with(rung, captured, facts)
    collate = KeepRows(trial.collate, 1)
    return step, [collate([Rows().examples[index]]) for index in (0, 1)], facts


def begin(step: OptimizerStep, batches: list[dict[str, Any]]) -> torch.Tensor:
    runner: Any = None
    return step.begin(batches, 0.0, runner, lambda units: torch.ones(()))


def compute(model: Any, batch: dict[str, Any], divisor: torch.Tensor) -> torch.Tensor:
    loss = ordinary_sum(model, batch) / divisor
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("kind", ["none", "torch"])
def test_a_step_that_goes_down_captures_anew_with_more_recomputing(kind: str) -> None:
    step, (batch, _), _ = step_of(kind)
    captured = step.captured
    assert captured is not None and captured.forward.recompute == (kind == "torch") and not captured.in_trial
    divisor, model = begin(step, [batch]), captured.model
    loss = step.micro_batch(compute, model, batch, divisor, last=True).clone()
    assert captured.graphs
    lower = [str(rung) for rung in step.ladder]
    assert lower[:-2] == ["CUDA graphs and gradient checkpointing none"] * (kind == "none") + [
        "CUDA graphs and gradient checkpointing torch", "gradient checkpointing torch",
    ]  # fmt: skip
    if kind == "none":
        step.follow([1])
        assert step.captured is captured and not captured.graphs and captured.forward.recompute
        assert torch.equal(step.micro_batch(compute, model, batch, divisor, last=True), loss)
    step.follow([len(lower) - 3])
    assert step.captured is None and "padded_batch" not in step.collate([Rows().examples[0]])


def test_a_capture_that_fails_while_training_is_reported_and_the_step_is_computed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, batches, _ = step_of("none")
    captured = step.captured
    assert captured is not None
    divisor, model, computed = begin(step, batches), captured.model, list[Any]()

    def broken(*_: object) -> None:
        raise CaptureFailed("operation failed during capture")

    def count(*arguments: Any) -> torch.Tensor:
        computed.append(arguments[1])
        return compute(*arguments)

    step.micro_batch(count, model, batches[0], divisor, last=False)
    monkeypatch.setattr(captured, "run", broken)
    # Other processes than the main one have no standard output.
    with quiet():
        step.micro_batch(count, model, batches[1], divisor, last=True)
    assert step.captured is None and computed == batches
    assert "Micro-batches are no longer replayed: operation failed during capture" in capsys.readouterr().err
    flat = gradients(model)
    model.zero_grad()
    sum(ordinary_sum(model, batch) for batch in batches).backward()
    torch.testing.assert_close(flat, gradients(model))


def test_a_step_that_runs_out_of_memory_drops_its_graphs_and_goes_on_recomputing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, (first, larger), _ = step_of("none")
    captured = step.captured
    assert captured is not None
    model, graphs_left = captured.model, list[int]()
    monkeypatch.setattr(gc, "collect", lambda: graphs_left.append(len(captured.graphs)))

    def short(model: Any, batch: dict[str, Any], divisor: torch.Tensor) -> torch.Tensor:
        if step.rung.kind == "none":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return compute(model, batch, divisor)

    step_divisor = begin(step, [first, larger])
    step.micro_batch(short, model, first, step_divisor, last=False)
    assert captured.graphs
    # Memory runs out in the second micro-batch, which is larger than what was captured.
    del larger["padded_batch"]
    step.micro_batch(short, model, larger, step_divisor, last=True)
    assert graphs_left[0] == 0 and step.rung == Rung(True, "torch", 1) and captured.forward.recompute
    flat = gradients(model)
    model.zero_grad()
    sum(ordinary_sum(model, batch) for batch in (first, larger)).backward()
    expected = gradients(model)
    assert (flat - expected).norm() < 0.05 * expected.norm()


def test_an_evaluation_without_memory_takes_that_of_the_graphs_first() -> None:
    step, (batch, _), _ = step_of("none")
    captured, rows = step.captured, batch.pop(ROWS)
    assert captured is not None and captured.graphs

    def sums_of(batch: dict[str, Any]) -> torch.Tensor:
        if captured.graphs:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.tensor(3.0)

    assert step.within_memory(batch, rows, sums_of) == 3
    assert not captured.graphs and step.evaluation_passes == 1


def test_the_peak_is_that_of_a_replay_where_it_is_higher() -> None:
    step, _, _ = step_of("none")
    assert step.meter.peak_bytes() == peak_memory_bytes("cpu")
    step.meter.replayed_bytes = 10 * peak_memory_bytes("cpu")
    assert step.meter.collect(level=0)["peak_memory_bytes"] == step.meter.replayed_bytes
