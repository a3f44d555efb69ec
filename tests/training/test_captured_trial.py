"""Test captured steps from the memory trial to a replay: what is tried and captured, and what follows where memory runs out."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.test_fixed_shape import pack_of
from tests.training.test_captured_step import (
    fail,
    gradients,
    model_of,
    ordinary_sum,
    with_dropout_of,
)
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.order.collate import Collate, Flatten, PadRight
from unsloth_ddp.distributed.exit_codes import quiet
from unsloth_ddp.distributed.watch.progress import Progress
from unsloth_ddp.model.forward.gradient_checkpointing import GradientCheckpointing
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.model.forward.packed_forward import PackedForward
from unsloth_ddp.model.packing import varlen
from unsloth_ddp.sizing import graphs as sizing_graphs
from unsloth_ddp.sizing.graphs import Launching, micro_batches_of_run, saved_tokens, shape_of_run
from unsloth_ddp.sizing.micro_batch import MicroBatchDecision
from unsloth_ddp.training.shown.meter import Meter, OwnWorkTimer, Totals
from unsloth_ddp.training.step import cuda_graphs
from unsloth_ddp.training.step.capture_check import OUT_OF_MEMORY
from unsloth_ddp.training.step.captured_step import CaptureFailed
from unsloth_ddp.training.step.cuda_graphs import CudaGraphs
from unsloth_ddp.training.step.optimizer_step import OptimizerStep
from unsloth_ddp.training.tasks.text import TextTask
from unsloth_ddp.training.trainer import DDPTrainer
from unsloth_ddp.utils.errors import UserError

# Epochs of a run that compiling pays for.
LONG = 1000


class Rows:
    """Return packed rows."""

    def __init__(self, packs: Sequence[list[int]] = ([60, 50, 30], [128, 100], [9])) -> None:
        lengths = [*packs] * 100
        self.examples = [pack_of(of) for of in lengths]
        self.units, self.streamed, self.processing = len(lengths), False, None
        self.packing = SimpleNamespace(starts=np.cumsum([0, *map(len, lengths)]), longest=128)

    def lengths(self) -> np.ndarray:
        return np.array([*(len(one["input_ids"]) for one in self.examples), 1])


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "is_available", lambda: True)
    monkeypatch.setattr(cuda_graphs, "use_capture_stream", lambda device: None)


def unprepared(model: Any, rows: Rows | None = None, **options: Any) -> tuple[CudaGraphs, MicroBatchRunner]:
    runtime = SimpleNamespace(
        device_type="cuda", precision="bf16", sharding="none", gather=lambda one: [one], locations=["rank 0"], device_name="H100",
        ranks=SimpleNamespace(world_size=1, rank=0),
    )  # fmt: skip
    collate, rows = Collate(PadRight(0), Flatten("positions")), rows or Rows()
    settings = Settings(model="m", dataset=["d"], max_length=256, **{"num_train_epochs": LONG, **options})
    data = SimpleNamespace(train=rows, plan=BatchPlan(1, 2, 1))
    graphs = CudaGraphs(settings, runtime, data, collate, torch.device("cpu"), model)
    runner = MicroBatchRunner(
        model,
        torch.device("cpu"),
        lambda model, batch, divisor: ordinary_sum(model, batch),
        collate,
        lambda: torch.autocast("cpu", torch.bfloat16),
    )
    return graphs, runner


def prepared(model: Any, kind: str, **options: Any) -> CudaGraphs:
    graphs, runner = unprepared(model, **options)
    if kind == "torch":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    graphs.prepare(runner, MicroBatchDecision(kind, 1, ""), BatchPlan(1, 2, 1))
    return graphs


def tried(graphs: CudaGraphs, runner: MicroBatchRunner, kind: str) -> torch.Tensor | None:
    """Return the gradients of a trial of one pack, None where the backend computes it."""
    compute = graphs.trial_pass(runner, None, kind, 1)
    batch = runner.batch_of([Rows().examples[0]])
    assert ("padded_batch" in batch) == (compute is not None)
    if compute is None:
        return None
    runner.model.zero_grad()
    compute(batch)
    # Their memory is free for what is tried next.
    assert graphs._tried is not None and not graphs._tried[1].gradients._flat
    found = gradients(runner.model)
    runner.model.zero_grad()
    return found


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("kind", ["none", "torch"])
def test_memory_is_tried_with_the_pass_that_is_captured_afterwards(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, compiled = model_of("lora"), []
    graphs, runner = unprepared(model)

    @contextlib.contextmanager
    def compiled_layers(forward: PackedForward) -> Iterator[None]:
        compiled.append(forward)
        yield

    dropped: list[Any] = []
    unsloth = SimpleNamespace(_unsloth_reset_stray_compile_cache=lambda trainer: dropped.append(trainer.model))
    monkeypatch.setitem(sys.modules, "unsloth.models._utils", unsloth)
    # Compiling takes long on a CPU.
    monkeypatch.setattr(PackedForward, "compiled_layers", compiled_layers)
    found = tried(graphs, runner, kind)
    assert found is not None and graphs._tried is not None
    step = graphs._tried[1]
    assert step.forward.recompute == (kind == "torch") and (compiled, dropped) == ([step.forward], [model])
    runner.loss_sum(runner.batch_of([Rows().examples[0]])).backward()
    wanted = gradients(model)
    assert (found - wanted).norm() < 0.05 * wanted.norm()
    model.zero_grad()
    # Another kind takes the same step, another size another one, and what cannot be captured none.
    assert tried(graphs, runner, "none") is not None and graphs._tried[1] is step
    graphs.prepare(runner, MicroBatchDecision(kind, 1, ""), BatchPlan(1, 2, 1))
    assert graphs.captured is step and graphs._tried is None
    assert tried(graphs, runner, "unsloth") is None


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("options", [{}, {"cuda_graphs": "off"}])
def test_the_search_tries_captured_passes_with_the_buffers_of_the_exchange(options: dict[str, Any]) -> None:
    graphs, runner = unprepared(model_of("lora"), **options)
    exchange: Any = SimpleNamespace(buffers="buffers")
    checkpointing: Any = SimpleNamespace(level=0)
    step = OptimizerStep(None, checkpointing, graphs, exchange, None, torch.device("cpu"), 2)
    search = step.search(graphs.settings, SimpleNamespace(sharding="none"), graphs.data, runner)
    if options:
        assert search.captured_pass is None
    else:
        assert (search.captured_pass.func, search.captured_pass.args) == (graphs.trial_pass, (runner, "buffers"))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_pass_that_cannot_be_computed_is_tried_as_the_backend_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("lora")
    graphs, runner = unprepared(model)
    errors: list[Exception] = [ValueError("no such kernel"), torch.OutOfMemoryError("CUDA out of memory.")]

    def fail(*_: object) -> None:
        raise errors[0]

    monkeypatch.setattr(PackedForward, "loss_sum", fail)
    found = tried(graphs, runner, "none")
    runner.loss_sum(runner.batch_of([Rows().examples[0]])).backward()
    assert torch.equal(found, gradients(model))
    del errors[0]
    with pytest.raises(torch.OutOfMemoryError):
        tried(graphs, runner, "none")


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("errors", [1, 2])
def test_a_captured_pass_is_compared_for_one_pack_where_the_backends_takes_too_much_memory(
    errors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, runner = unprepared(model_of("lora"))
    tokens: list[int] = []

    def ordinary(model: Any, batch: dict[str, Any], divisor: torch.Tensor) -> torch.Tensor:
        tokens.append(batch["input_ids"].shape[1])
        if len(tokens) <= errors:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return ordinary_sum(model, batch)

    graphs.prepare(dataclasses.replace(runner, loss=ordinary), MicroBatchDecision("none", 2, ""), BatchPlan(2, 1, 1))
    assert tokens == [140 + 228, 140]
    assert (graphs.rejected, graphs.captured is None) == ((errors == 2),) * 2
    assert errors == 1 or graphs.choice.reason == OUT_OF_MEMORY


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("options", "tries"),
    [
        ({}, True),
        # Compiling is in vain for a short run, and --method full may not be captured after all.
        ({"max_steps": 20}, False), ({"max_steps": 20, "cuda_graphs": "on"}, True),
        ({"method": "full"}, False), ({"method": "full", "cuda_graphs": "on"}, True),
        ({"cuda_graphs": "off"}, False), ({"gradient_checkpointing": "unsloth"}, False),
    ],
)  # fmt: skip
def test_memory_is_tried_with_captured_passes_where_the_run_will_capture_them(
    options: dict[str, Any], tries: bool
) -> None:
    assert unprepared(model_of("lora"), **options)[0].tries_passes() is tries


def short_run(monkeypatch: pytest.MonkeyPatch, **options: Any) -> CudaGraphs:
    """Return the graphs of a run that is too short to compile for, unless it would have to recompute layers."""
    monkeypatch.setattr(cuda_graphs, "launching", lambda *_: Launching(100, 1.0))
    graphs, _ = unprepared(model_of("lora"), Rows([[128, 127]]), num_train_epochs=1, **options)
    given = (graphs.settings, graphs.data.train, graphs.data.plan)
    shape = shape_of_run(*given)
    saved = [saved_tokens(*given, shape, graphs._launched, recomputes=recomputes) for recomputes in (False, True)]
    assert 0 < saved[0] < saved[1]
    passes = micro_batches_of_run(*given)
    monkeypatch.setattr(sizing_graphs, "COMPILE_SECONDS", passes * sum(saved) / 2 / graphs._launched.tokens)
    graphs._choose()
    return graphs


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("kind", "options", "chosen"),
    [
        ("none", {}, False), ("torch", {}, True), ("unsloth", {}, True), (None, {}, True),
        (None, {"gradient_checkpointing": "none"}, True),
        # The backend and a captured step would recompute alike.
        ("torch", {"gradient_checkpointing": "torch"}, False),
    ],
)  # fmt: skip
def test_a_short_run_is_captured_after_all_where_it_would_recompute_layers(
    kind: str | None, options: dict[str, Any], chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[Any] = []
    monkeypatch.setattr(cuda_graphs, "use_capture_stream", streams.append)
    graphs = short_run(monkeypatch, **options)
    # Gradients of passes on the default stream could not be captured later.
    assert len(streams) == 1
    assert not graphs.tries_passes() and "compiling takes about" in graphs.choice.reason
    assert graphs.chosen_after_all(kind) is chosen
    assert graphs.choice.uses_graphs is graphs.tries_passes() is chosen
    assert not graphs.chosen_after_all(kind)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("before", "options", "chosen"),
    [
        ({"cuda_graphs": "on", "device": "H100"}, {}, True), ({}, {}, False),
        ({"cuda_graphs": "on", "device": "A100"}, {}, False),
        ({"cuda_graphs": "on", "device": "H100"}, {"cuda_graphs": "off"}, False),
        ({"cuda_graphs": "on", "device": "H100"}, {"gradient_checkpointing": "unsloth"}, False),
        ({"cuda_graphs": "off", "device": "H100"}, {"num_train_epochs": LONG}, False),
        ({"cuda_graphs": "off", "device": "A100"}, {"num_train_epochs": LONG}, True),
        ({"cuda_graphs": "off", "device": "H100"}, {"cuda_graphs": "on"}, True),
    ],
)  # fmt: skip
def test_a_resumed_run_is_captured_if_it_was_before_on_such_a_gpu(
    before: dict[str, Any], options: dict[str, Any], chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if options:
        graphs, _ = unprepared(model_of("lora"), **{"num_train_epochs": 1, **options})
    else:
        graphs = short_run(monkeypatch)
    graphs.resume(before)
    assert graphs.choice.uses_graphs is chosen
    if before.get("cuda_graphs") == "off" and not chosen:
        # A run that recomputed since it ran out of memory goes on so.
        assert not graphs.chosen_after_all("torch")
        assert graphs.choice.reason == "the run that this one resumes did not use them"


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("kind", ["none", "unsloth"])
def test_what_is_not_captured_after_its_trial_is_tried_without_graphs(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, runner = unprepared(model_of("lora"))
    monkeypatch.setattr(cuda_graphs, "check_capture", lambda *_: "its loss would differ")
    graphs.prepare(runner, MicroBatchDecision(kind, 1, ""), BatchPlan(1, 2, 1))
    assert graphs.rejected and not graphs.choice.uses_graphs
    assert not graphs.chosen_after_all("torch") and not graphs.chosen_after_all(None)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_graphs_that_were_chosen_after_all_are_captured_however_much_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    # Packs of 9 to 228 tokens, padded to 256.
    monkeypatch.setattr(cuda_graphs, "launching", lambda *_: Launching(10, 1.0))
    graphs, runner = unprepared(model_of("lora"))
    assert "padded to" in graphs.choice.reason and graphs.chosen_after_all(None)
    graphs.prepare(runner, MicroBatchDecision("none", 1, ""), BatchPlan(1, 2, 1))
    assert graphs.choice.uses_graphs and not graphs.rejected


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("first", [MicroBatchDecision("torch", 2, ""), UserError("It does not fit.")])
def test_memory_is_tried_again_for_graphs_that_are_chosen_after_all(
    first: MicroBatchDecision | UserError, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, found = short_run(monkeypatch), iter([first, MicroBatchDecision("none", 1, "")])
    tried: list[Any] = []

    def choose(before: dict[str, Any]) -> MicroBatchDecision:
        assert before == {"cuda_graphs": "off"}
        tried.append(graphs.choice.uses_graphs)
        decision = next(found)
        if isinstance(decision, UserError):
            raise decision
        return decision

    class Trainer:
        settings, data = graphs.settings, graphs.data
        runtime, args = SimpleNamespace(backend="unsloth", progress=Progress()), SimpleNamespace(train_batch_size=None)
        step = SimpleNamespace(
            graphs=graphs,
            search=lambda *_: SimpleNamespace(choose=choose),
            prepare=lambda decision, plan, runner: tried.append(plan.per_device),
        )
        _search = DDPTrainer._search

        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    trainer: Any = Trainer()
    resume: Any = SimpleNamespace(manifest=SimpleNamespace(run={"cuda_graphs": "off"}))
    assert DDPTrainer._try_micro_batches(trainer, resume) == MicroBatchDecision("none", 1, "")
    assert tried == [False, True, 1]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("options", [{"cuda_graphs": "off"}, {"gradient_checkpointing": "unsloth"}])
def test_what_does_not_fit_is_refused_where_nothing_can_be_captured(options: dict[str, Any]) -> None:
    graphs, _ = unprepared(model_of("lora"), **options)
    assert not graphs.chosen_after_all(None) and not graphs.choice.uses_graphs


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("kind", ["none", "torch"])
def test_both_kinds_are_captured_and_a_change_of_kind_captures_anew(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    graphs = prepared(model_of("lora"), kind)
    captured = graphs.captured
    assert graphs.choice.uses_graphs and captured is not None and captured.forward.recompute == (kind == "torch")
    assert not captured.in_trial
    batch = graphs.collate([Rows().examples[0]])
    first = graphs.run(batch, torch.ones(()))
    assert first is not None and captured.graphs
    loss = first[0].clone()
    graphs.use("torch")
    assert graphs.captured is captured and not captured.graphs and captured.forward.recompute
    again = graphs.run(batch, torch.ones(()))
    assert again is not None and torch.equal(again[0], loss)
    assert capsys.readouterr().out == ""
    graphs.use("unsloth")
    assert graphs.run(batch, torch.ones(())) is None and "padded_batch" not in graphs.collate([Rows().examples[0]])
    assert "no longer replayed on rank 0: gradient checkpointing unsloth moves the inputs" in capsys.readouterr().err


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_capture_that_fails_while_training_is_reported_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    graphs = prepared(model_of("lora"), "none")
    assert graphs.captured is not None
    batch = graphs.collate([Rows().examples[0]])

    def fail(*_: object) -> None:
        raise CaptureFailed("operation failed during capture")

    monkeypatch.setattr(graphs.captured, "run", fail)
    monkeypatch.setattr(logging.getLogger("unsloth_ddp"), "propagate", True)
    # Other processes than the main one have no standard output.
    with quiet():
        assert graphs.run(batch, torch.ones(())) is None
    assert graphs.captured is None
    assert "no longer replayed on rank 0: operation failed during capture" in capsys.readouterr().err
    assert "the step is not captured: operation failed during capture" in caplog.text


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_step_that_runs_out_of_memory_drops_its_graphs_and_goes_on_recomputing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, one = model_of("lora"), torch.ones(())
    graphs = prepared(model, "none")
    runtime: Any = SimpleNamespace(backend="transformers", sharding="none")
    settings = Settings(model="m", dataset=["d"], gradient_checkpointing="auto")
    cpu = torch.device("cpu")
    meter = Meter(
        lambda sums: sums[None], 1, cpu, OwnWorkTimer(cpu), Totals(), TextTask(None, divides=True, fused_head=False)
    )
    checkpointing = GradientCheckpointing(model, runtime, settings)
    task: Any = SimpleNamespace(units=lambda batch, runner: one)
    step = OptimizerStep(task, checkpointing, graphs, None, meter, cpu, 1)
    held = []
    monkeypatch.setattr(gc, "collect", lambda: held.append(len(graphs.captured.graphs)))

    def compute(model: Any, batch: dict[str, Any], divisor: torch.Tensor) -> torch.Tensor:
        if checkpointing.kind == "none":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        loss = ordinary_sum(model, batch) / divisor
        loss.backward()
        return loss.detach()

    first, larger = (graphs.collate([Rows().examples[index]]) for index in (0, 1))
    assert step.begin([first, larger], 0.0, None, lambda units: torch.ones(())) == 1
    step.micro_batch(compute, model, first, one, last=False)
    assert graphs.captured.graphs
    # Memory runs out in the second micro-batch, which is larger than what was captured.
    del larger["padded_batch"]
    step.micro_batch(compute, model, larger, one, last=True)
    assert held[0] == 0 and checkpointing.kind == "torch" and graphs.captured.forward.recompute
    found = gradients(model)
    model.zero_grad()
    sum(ordinary_sum(model, batch) for batch in (first, larger)).backward()
    torch.testing.assert_close(found, gradients(model))
    model.zero_grad()
    assert graphs.run(first, one) is not None and graphs.captured.graphs
    found = gradients(model)
    model.zero_grad()
    ordinary_sum(model, first).backward()
    assert (found - gradients(model)).norm() < 0.05 * found.norm()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_dropout_is_captured_without_recomputing_only(capsys: pytest.CaptureFixture[str]) -> None:
    graphs = prepared(with_dropout_of(0.1), "none")
    assert graphs.choice.uses_graphs
    graphs.use("torch")
    assert graphs.captured is None
    assert "gradient checkpointing torch would draw another dropout mask" in capsys.readouterr().err
    refused = prepared(with_dropout_of(0.1), "torch")
    assert not refused.choice.uses_graphs and refused.choice.reason.startswith(
        "gradient checkpointing torch would draw another dropout mask"
    )
    with pytest.raises(
        UserError,
        match="cuda_graphs on is not possible, because gradient checkpointing torch would draw another dropout mask",
    ):
        prepared(with_dropout_of(0.1), "torch", cuda_graphs="on")


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"gradient_checkpointing": "unsloth"}, "gradient checkpointing unsloth moves the inputs of layers"),
        (
            {"gradient_checkpointing": "torch", "lora_dropout": 0.1},
            "gradient checkpointing torch would draw another dropout mask",
        ),
        ({"gradient_checkpointing": "torch", "lora_dropout": 0.1, "method": "full"}, ""),
        ({"gradient_checkpointing": "auto", "lora_dropout": 0.1}, ""),
        ({"gradient_checkpointing": "torch"}, ""),
    ],
)
def test_what_the_settings_rule_out_is_known_before_memory_is_tried(options: dict[str, Any], reason: str) -> None:
    runtime = SimpleNamespace(
        device_type="cuda", precision="bf16", sharding="none", ranks=SimpleNamespace(world_size=1)
    )
    settings = Settings(model="m", dataset=["d"], **{"num_train_epochs": LONG, **options})
    data = SimpleNamespace(train=Rows(), plan=BatchPlan(1, 2, 1))
    collate = Collate(PadRight(0), Flatten("positions"))
    graphs = CudaGraphs(settings, runtime, data, collate, torch.device("cpu"), model_of("lora"))
    assert graphs.choice.uses_graphs == (not reason) and graphs.choice.reason.startswith(reason)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_model_that_cannot_be_called_is_not_captured() -> None:
    model = model_of("lora")
    model.get_base_model().get_decoder().layers[1].register_forward_pre_hook(fail)
    graphs = prepared(model, "torch")
    assert graphs.choice.reason == "trying it failed: no such layer" and graphs.captured is None
