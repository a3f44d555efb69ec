"""Test which rung a run begins with: what is tried, and what follows from trials, captures, and the resumed run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny_models import model_of_layers
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.training_data import TrainingData
from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.forward.gradient_checkpointing import kinds_here
from unsloth_ddp.sizing.ladder import LadderFacts, Rung, StepDecision
from unsloth_ddp.sizing.trial import MemoryTrials, Trial
from unsloth_ddp.training.step import first_rung
from unsloth_ddp.training.step.capture_trial import CaptureTrial
from unsloth_ddp.training.step.first_rung import SAME_GIVEN, FirstRung, rungs_from
from unsloth_ddp.utils.errors import UserError

OBSTACLE = "its loss would differ by 1.0e-01"


class Choice:
    """The choice of a run on GPUs, whose trials and captures have given outcomes.

    Args:
        fits: rung -> whether its trial succeeds.
        obstacle: of the capture, if any.
        other_rank: the same on the other rank, whose trials all succeed.
        seconds: that the backend takes for a micro-batch.
        random: whether the captured pass draws random numbers.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        settings: Settings,
        data: Any,
        *,
        fits: Any = lambda rung: True,
        obstacle: str | None = None,
        other_rank: str | None = None,
        seconds: float = float("inf"),
        random: bool = False,
        runtime: Runtime | None = None,
    ) -> None:
        self.events: list[Any] = []
        self.tried: list[Rung] = []
        self.begun: list[Any] = []
        self.runtime = runtime or Runtime(Ranks(), "unsloth", "cuda", "bf16", "H200")
        device = torch.device("cpu")
        task: Any = SimpleNamespace(tuned=lambda *_, **__: "task of supervised tokens")
        self.step: Any = SimpleNamespace(
            exchange=None,
            collate=SimpleNamespace(pad_to_shape=lambda shape: None),
            checkpointing=SimpleNamespace(kinds=kinds_here(self.runtime, settings), use=lambda kind: None),
            task=task,
            use_task=lambda task: self.events.append(("task", task)),
            begin_with=lambda *decided: self.begun.append(decided),
        )
        model = model_of_layers([torch.nn.Linear(1, 1)])
        captured = SimpleNamespace(in_trial=True, shape=None, forward=SimpleNamespace(flash_attention_4=False))

        gather = self.runtime.gather

        def gathered(value: Any) -> list[Any]:
            monkeypatch.setattr(self.runtime, "gather", gather)
            return [value, other_rank]

        def capture(trial: CaptureTrial, rung: Rung) -> Any:
            trial.random = random
            if other_rank:
                # What is gathered next is what became of the capture.
                monkeypatch.setattr(self.runtime, "gather", gathered)
            return (None, obstacle) if obstacle else (captured, None)

        def try_rung(trials: MemoryTrials, rung: Rung) -> Trial:
            self.tried.append(rung)
            return Trial(2**30 if fits(rung) else None, 2**31)

        monkeypatch.setattr("unsloth_ddp.model.packing.varlen.is_available", lambda: True)
        monkeypatch.setattr(CaptureTrial, "capture", capture)
        monkeypatch.setattr(MemoryTrials, "try_rung", try_rung)
        monkeypatch.setattr(FirstRung, "_seconds", lambda self, rows: seconds)
        monkeypatch.setattr(first_rung, "use_capture_stream", lambda device: self.events.append("stream"))
        monkeypatch.setattr(first_rung, "use_default_stream", lambda device: self.events.append("default stream"))
        monkeypatch.setattr(first_rung, "bytes_added_by_steps", lambda *_, **__: 0)
        monkeypatch.setattr(first_rung, "kinds_of_layers", lambda model: 1)
        monkeypatch.setattr(first_rung, "leave_layers_uncompiled", lambda: self.events.append("uncompiled"))
        monkeypatch.setattr(torch.compiler, "reset", lambda: self.events.append("reset"))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
        runner: Any = SimpleNamespace(model=model, device=device, batch_of=lambda rows: rows)
        self.first = FirstRung(settings, self.runtime, data, self.step, runner)

    def choose(self, resumed: dict[str, Any] | None = None, last: Rung | None = None) -> StepDecision:
        return self.first.choose(resumed or {}, last)


def packs(tokens: int = 1024, count: int = 64, **changed: Any) -> Any:
    """Return packs of one row each, 16 of them a step."""
    train = SimpleNamespace(
        streamed=False, units=count, processing=None, examples=[{}] * count,
        packing=SimpleNamespace(starts=np.arange(count + 1), longest=tokens),
        lengths=lambda: np.array([tokens] * count + [1]),
    )  # fmt: skip
    return TrainingData(SimpleNamespace(**{**vars(train), **changed}), None, BatchPlan(1, 16, 1), None)  # type: ignore[arg-type]


def settings_of(**options: Any) -> Settings:
    values = {"max_length": 1024, "num_train_epochs": 100, **options}
    return Settings(model="m", dataset=["d"], **values)


CAPTURED, BACKEND = Rung(True, "none", 8), Rung(False, "none", 16)


def test_the_step_begins_with_the_rung_that_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = Choice(monkeypatch, settings_of(), packs())
    assert choice.choose() == StepDecision(CAPTURED, "8 x 1,024 tokens need 1.0 of 2.0 GiB", SAME_GIVEN)
    ((rung, captured, facts),) = choice.begun
    # Training is no trial.
    assert (rung, captured.in_trial, facts.captured_kinds) == (CAPTURED, False, ("none", "torch"))
    assert choice.events == ["stream", ("task", "task of supervised tokens")]
    assert choice.first.trials.captured_pass == choice.first.capture.trial_pass


def test_a_model_that_draws_random_numbers_itself_is_never_captured_with_recomputing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choice = Choice(monkeypatch, settings_of(), packs(), random=True)
    assert choice.choose().rung == CAPTURED
    assert choice.begun[0][2].captured_kinds == ("none",)


@pytest.mark.parametrize("rank", ["obstacle", "other_rank"])
def test_what_is_not_captured_after_its_trial_is_tried_without_graphs(
    rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = Choice(monkeypatch, settings_of(), packs(), **{rank: OBSTACLE})  # type: ignore[arg-type]
    decision = choice.choose()
    assert (decision.rung, decision.graphs) == (BACKEND, OBSTACLE)
    assert choice.begun[0][:2] == (BACKEND, None) and choice.tried == [CAPTURED, BACKEND]
    # Memory is tried with the task of all tokens, and code that was compiled for the captured pass is dropped.
    dropped = [("task", choice.step.task), ("task", "task of supervised tokens"), "reset"]
    # Optimizers of bitsandbytes work on the default stream.
    assert choice.events[2:] == [*dropped, "default stream"]
    with pytest.raises(UserError, match=f"cuda_graphs on is not possible, because {OBSTACLE}"):
        Choice(monkeypatch, settings_of(cuda_graphs="on"), packs(), obstacle=OBSTACLE).choose()


def test_what_fits_only_as_the_backend_computes_it_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(rung: Rung) -> bool:
        return not rung.captured

    decision = Choice(monkeypatch, settings_of(), packs(), fits=fits).choose()
    assert decision.rung == BACKEND
    assert decision.graphs == "no captured micro-batch fits into the memory of a GPU"
    with pytest.raises(UserError, match="because no captured micro-batch fits"):
        Choice(monkeypatch, settings_of(cuda_graphs="on"), packs(), fits=fits).choose()
    with pytest.raises(UserError, match="does not fit into the 2 GiB"):
        Choice(monkeypatch, settings_of(), packs(), fits=lambda rung: False).choose()


@pytest.mark.parametrize(
    ("options", "tokens", "seconds", "obstacle"),
    [
        ({"cuda_graphs": "off"}, 1024, 9, "as set"),
        ({"gradient_checkpointing": "unsloth"}, 1024, 9, "gradient checkpointing unsloth moves the inputs"),
        (
            {"gradient_checkpointing": "torch", "lora_dropout": 0.1}, 1024, 9,
            "gradient checkpointing torch would draw another dropout mask",
        ),
        ({"gradient_checkpointing": "torch", "lora_dropout": 0.1, "method": "full"}, 64, 9, None),
        ({"lora_dropout": 0.1}, 1024, 9, None),
        ({"method": "full"}, 1024, 9, "micro-batches of 16,384 tokens keep the GPU busy"),
        ({"method": "full", "cuda_graphs": "on"}, 1024, 9, None),
        ({"max_steps": 20}, 1024, 9, "a run of 40 micro-batches is too short"),
        ({"max_steps": 20, "cuda_graphs": "on"}, 1024, 0, None),
        # 800 micro-batches of 8 packs.
        ({}, 1024, 0.14, "the run takes about 112 s without them, too short for compiling to pay"),
        ({}, 1024, 0.16, None),
    ],
)  # fmt: skip
def test_what_is_not_captured_is_known_before_memory_is_tried(
    options: dict[str, Any], tokens: int, seconds: float, obstacle: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = Choice(monkeypatch, settings_of(**options), packs(tokens), seconds=seconds)
    decision = choice.choose()
    assert decision.graphs.startswith(obstacle or SAME_GIVEN)
    assert any(rung.captured for rung in [decision.rung, *choice.tried]) == (obstacle is None)
    # Gradients of passes on the default stream could not be captured later; nothing else needs another stream.
    possible = choice.first.obstacle is None and options.get("cuda_graphs") != "off"
    assert ("stream" in choice.events) is possible
    assert ("uncompiled" in choice.events) is ("max_steps" in options)


BEFORE = {"world_size": 1, "device": "H200", "per_device_train_batch_size": 4}


@pytest.mark.parametrize(
    ("resumed", "options", "rung", "graphs"),
    [
        ({"gradient_checkpointing": "torch", "cuda_graphs": "on"}, {}, Rung(True, "torch", 4), SAME_GIVEN),
        # A run that stopped replaying goes on so, and one too short to compile for goes on replaying.
        (
            {"gradient_checkpointing": "torch", "cuda_graphs": "off"}, {}, Rung(False, "torch", 4),
            "the run that this one resumes did not use them",
        ),
        ({"gradient_checkpointing": "none", "cuda_graphs": "on"}, {"max_steps": 1}, Rung(True, "none", 4), SAME_GIVEN),
        (
            {"gradient_checkpointing": "none", "cuda_graphs": "on"}, {"cuda_graphs": "off"}, Rung(False, "none", 4),
            "as set",
        ),
        ({"gradient_checkpointing": "none", "cuda_graphs": "off"}, {"cuda_graphs": "on"}, Rung(False, "none", 4), None),
        # A run that began with graphs, and computes each micro-batch in passes since memory ran out.
        (
            {"gradient_checkpointing": "unsloth", "cuda_graphs": "on", "passes": 2}, {}, Rung(False, "unsloth", 4, 2),
            "no captured micro-batch fits",
        ),
        # On other GPUs, or another number of them, it is chosen anew.
        ({"gradient_checkpointing": "torch", "cuda_graphs": "off", "world_size": 2}, {}, CAPTURED, SAME_GIVEN),
        ({"gradient_checkpointing": "torch", "cuda_graphs": "off", "device": "A100"}, {}, CAPTURED, SAME_GIVEN),
    ],
)  # fmt: skip
def test_a_resumed_run_keeps_its_rung_on_the_same_gpus(
    resumed: dict[str, Any], options: dict[str, Any], rung: Rung, graphs: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = Choice(monkeypatch, settings_of(**options), packs())
    if graphs is None:
        with pytest.raises(UserError, match="no captured micro-batch fits"):
            choice.choose(BEFORE | resumed)
        return
    decision = choice.choose(BEFORE | resumed)
    assert decision.rung == rung and decision.graphs.startswith(graphs)


def test_every_rank_tries_what_the_main_process_would(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its own GPU may be of another kind than the one of the checkpoint.
    choice = Choice(monkeypatch, settings_of(), packs())
    resumed = BEFORE | {"gradient_checkpointing": "torch", "cuda_graphs": "off"}
    monkeypatch.setattr(choice.runtime, "broadcast_from_main", lambda work: resumed)
    assert choice.choose({}).rung == Rung(False, "torch", 4)


@pytest.mark.parametrize(
    ("device", "sharding", "options", "resumed", "rung", "rung_reason"),
    [
        ("cpu", "none", {}, {}, Rung(False, "none", 1), "the default on a CPU"),
        ("cpu", "fsdp2", {}, {}, Rung(False, "torch", 1), "the default on a CPU"),
        (
            "cuda", "none", {"gradient_checkpointing": "none", "per_device_train_batch_size": 1}, {},
            Rung(False, "none", 1), "as set",
        ),
        (
            "cuda", "fsdp2", {}, BEFORE | {"gradient_checkpointing": "torch"},
            Rung(False, "torch", 4), "as before the run was resumed",
        ),
    ],
)  # fmt: skip
def test_nothing_is_tried_where_there_is_nothing_to_choose(
    device: str,
    sharding: Any,
    options: Any,
    resumed: Any,
    rung: Rung,
    rung_reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = Runtime(Ranks(), "transformers", device, "bf16", "H200", sharding)  # type: ignore[arg-type]
    choice = Choice(monkeypatch, settings_of(cuda_graphs="off", **options), packs(), runtime=runtime)
    decision = choice.choose(resumed)
    assert (decision.rung, decision.rung_reason, choice.tried) == (rung, rung_reason, [])


def test_a_run_begins_below_the_rung_that_ran_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(Ranks(), "transformers", "cuda", "bf16", "H200", "fsdp2")
    choice = Choice(monkeypatch, settings_of(), packs(), runtime=runtime)
    last = Rung(False, "none", 8)
    resumed = BEFORE | {"gradient_checkpointing": "none", "per_device_train_batch_size": 8}
    decision = choice.choose(resumed, last)
    assert decision.rung_reason == f"memory ran out with {last}"
    assert (decision.rung, choice.tried) == (Rung(False, "torch", 8), [])


@pytest.mark.parametrize(
    ("differs", "outcome"), [(None, "the layers are compiled instead"), ("x", "nor are the layers compiled: x")]
)
def test_layers_are_compiled_where_images_keep_them_from_graphs(
    differs: str | None, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = packs(processing=object())
    choice = Choice(monkeypatch, settings_of(), data)
    monkeypatch.setattr(first_rung, "compile_layers", lambda runner, batch: differs)
    monkeypatch.setattr(first_rung, "leave_uncompiled", lambda model: choice.events.append("left"))
    assert choice.choose().graphs.endswith(f"so micro-batches in shape; {outcome}".removeprefix("so "))
    assert ("left" in choice.events) is bool(differs)


FACTS = LadderFacts(("none", "torch"), (2, 4), ("none",), (2, 4), lambda rows: 1024 * rows)
RUNGS = [Rung(captured, kind, rows) for captured in (True, False) for kind in ("none", "torch") for rows in (4, 2)]


@pytest.mark.parametrize(
    ("resumed", "last", "rungs"),
    [
        ({}, None, RUNGS),
        # What is not among them was chosen for other options.
        ({"gradient_checkpointing": "unsloth", "per_device_train_batch_size": 4}, None, RUNGS),
        ({"gradient_checkpointing": "none", "per_device_train_batch_size": 16}, None, RUNGS),
        ({"gradient_checkpointing": "torch", "per_device_train_batch_size": 4, "cuda_graphs": "off"}, None, RUNGS[6:]),
        (
            {"gradient_checkpointing": "torch", "per_device_train_batch_size": 4, "cuda_graphs": "on"}, None,
            [*RUNGS[2:4], *RUNGS[6:]],
        ),
        ({}, Rung(False, "none", 4), RUNGS[5:]),
        ({}, Rung(False, "torch", 4), RUNGS[7:]),
        # Nothing is below it.
        ({}, RUNGS[-1], RUNGS[-1:]),
    ],
)  # fmt: skip
def test_a_run_may_begin_with_these_rungs(resumed: dict[str, Any], last: Rung | None, rungs: list[Rung]) -> None:
    assert rungs_from(RUNGS, FACTS, resumed, last) == rungs
