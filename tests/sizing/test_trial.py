"""Test the trials of which rungs fit, the kinds of gradient checkpointing, and the sizes that they try."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import REPO
from tests.runtimes import cpu_runtime
from unsloth_ddp.config import options
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.forward.gradient_checkpointing import GradientCheckpointing, kinds_here
from unsloth_ddp.model.loading.load import load_model
from unsloth_ddp.sizing import trial as trial_module
from unsloth_ddp.sizing.ladder import Rung
from unsloth_ddp.sizing.micro_batch import divisors, with_micro_batch
from unsloth_ddp.sizing.trial import MemoryTrials, Trial, bytes_added_by_steps
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.memory_limits import HEADROOM

KINDS = ("none", "torch", "unsloth")
GIB = 2**30


@pytest.mark.parametrize(("needed", "fits"), [(90, True), (95, False), (None, False)])
def test_a_try_has_to_leave_room(needed: int | None, fits: bool) -> None:
    assert Trial(needed, 100).fits is fits


def test_another_micro_batch_keeps_the_global_batch():
    plan = BatchPlan(2, 12, 4)
    for number in (1, 2, 24, 36, 97):
        assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]
    # The largest step that may be asked for is walked to its square root, in less than a second.
    largest = math.prod(
        int(options.OPTIONS[name].at_most) for name in ("global_batch_size", "gradient_accumulation_steps")
    )
    began = time.process_time()
    assert len(divisors(largest)) == 14 * 14
    assert time.process_time() - began < 5
    assert [with_micro_batch(plan, n).global_batch for n in divisors(24)] == [96] * 8


@pytest.mark.parametrize(
    ("checkpointing", "backend", "sharding", "device", "kinds"),
    [
        ("auto", "unsloth", "none", "cuda", KINDS),
        ("auto", "transformers", "none", "cuda", KINDS[:2]),
        ("auto", "unsloth", "zero2", "cuda", KINDS[:2]),
        ("auto", "transformers", "fsdp2", "cuda", KINDS[:2]),
        # Nothing is estimated there.
        ("auto", "transformers", "fsdp2", "cpu", ("torch",)),
        ("none", "unsloth", "none", "cuda", ("none",)),
        ("none", "unsloth", "zero3", "cuda", ("none",)),
    ],
)
def test_what_is_asked_for_is_not_changed(checkpointing, backend, sharding, device, kinds):
    runtime = Runtime(Ranks(), backend, device, "bf16", "H200", sharding)
    assert kinds_here(runtime, Settings(model="m", gradient_checkpointing=checkpointing)) == kinds


@pytest.mark.parametrize(
    ("sharding", "method", "expected"), [("zero3", "lora", True), ("zero3", "full", False), ("fsdp2", "lora", False)]
)
def test_zero3_recomputes_adapters_in_the_reentrant_way(sharding, method, expected):
    runtime = Runtime(Ranks(), "transformers", "cuda", "bf16", "H200", sharding)
    checkpointing_kwargs: list[Any] = []
    nothing: Any = SimpleNamespace(
        disable_input_require_grads=lambda: None,
        gradient_checkpointing_enable=lambda *, gradient_checkpointing_kwargs: checkpointing_kwargs.append(
            gradient_checkpointing_kwargs
        ),
    )
    GradientCheckpointing(nothing, runtime, Settings(model="m", method=method)).use("torch")
    assert checkpointing_kwargs == [{"use_reentrant": expected}]


@pytest.mark.parametrize("method", ["lora", "full"])
def test_kinds_can_be_exchanged_any_number_of_times(method):
    settings = Settings(model=str(REPO / "demo" / "model"), dataset=["d"], method=method, backend="transformers")
    runtime = cpu_runtime()
    model, _ = load_model(settings, runtime)
    model.train()
    recompute, embedding = GradientCheckpointing(model, runtime, settings), model.get_input_embeddings()
    hooked, steps = [], []
    for kind in ("torch", "torch", "none", "torch", "none"):
        recompute.use(kind)
        hooked.append(len(embedding._forward_hooks))
        torch.manual_seed(0)
        model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        steps.append([p.grad for p in model.parameters() if p.requires_grad])
        model.zero_grad()
    assert hooked == [1, 1, 0, 1, 0]
    assert steps[0] and all(torch.equal(a, b) for step in steps for a, b in zip(steps[0], step, strict=True))


RUNGS = [Rung(False, kind, rows) for kind in KINDS for rows in (16, 8, 4, 2, 1)]


class OnGPU(MemoryTrials):
    """Trials on a GPU with room for so many rows of 1100 tokens of each kind."""

    def __init__(self, room: dict[str, int] | None = None, **options: Any) -> None:
        settings = Settings(model="m", dataset=["d"], **options)
        runtime = Runtime(Ranks(), "unsloth", "cuda", "bf16", "H200")
        train = SimpleNamespace(streamed=False, packing=None, lengths=lambda: np.array([1100] * 64 + [1]))
        checkpointing, data = (
            SimpleNamespace(use=self.use, forget_failed_pass=list),
            SimpleNamespace(train=train, plan=BatchPlan(1, 16, 1)),
        )
        super().__init__(settings, runtime, data, checkpointing, None, 0, lambda rung: None)  # type: ignore[arg-type]
        self.room, self.kind = room or {}, ""

    def use(self, kind: str) -> None:
        self.kind = kind

    def try_rung(self, rung: Rung) -> Trial:
        assert self.kind == rung.kind
        return Trial(GIB * rung.rows, int(GIB * (self.room[rung.kind] + 0.5) / (1 - HEADROOM)))


@pytest.mark.parametrize(
    ("room", "rung", "rung_reason"),
    [
        ({"none": 9, "torch": 99, "unsloth": 99}, RUNGS[1], "8 x 1,100 tokens need 8.0 of 10.3 GiB"),
        ({"none": 0, "torch": 0, "unsloth": 4}, RUNGS[-3], "4 x 1,100 tokens need 4.0 of 4.9 GiB"),
        # The last one, though it leaves less free than it should.
        (
            {"none": 0, "torch": 0, "unsloth": 0},
            RUNGS[-1],
            "1 x 1,100 tokens need 1.0 of 0.5 GiB, with little room to spare",
        ),
    ],
)
def test_what_fits_is_found_by_trying_and_told(room: dict[str, int], rung: Rung, rung_reason: str) -> None:
    assert OnGPU(room).choose(RUNGS) == (rung, rung_reason)


def test_a_rung_has_to_fit_on_every_rank_and_the_fullest_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = OnGPU(dict.fromkeys(KINDS, 16))
    other = {16: Trial(None, 9 * GIB), 8: Trial(8 * GIB, 9 * GIB)}
    monkeypatch.setattr(trials.runtime, "gather", lambda trial: [trial, other[trial.needed // GIB]])
    assert trials.choose(RUNGS[:2]) == (RUNGS[1], "8 x 1,100 tokens need 8.0 of 9.0 GiB")


@pytest.mark.parametrize(
    ("options", "others", "rows", "message"),
    [
        ({}, 0, 1, r"\(1 x 1,100 tokens\) does not fit .* 1 GiB that are free on a GPU, with .* unsloth; lower "
            r"--max_l"),
        ({}, GIB, 1, r"on a GPU \(other processes hold 1.0 GiB\), with"),
        (
            {"gradient_checkpointing": "unsloth"}, 0, 2,
            "leave --gradient_checkpointing at auto, lower --per_device_train_batch_size or --max_length",
        ),
    ],
)  # fmt: skip
def test_rows_that_fit_nowhere_are_refused(
    options: dict[str, Any], others: int, rows: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = OnGPU(**options)
    monkeypatch.setattr(trials, "try_rung", lambda rung: Trial(None, GIB, others))
    with pytest.raises(UserError, match=message):
        trials.choose([Rung(True, "none", rows), Rung(False, "unsloth", rows)])


class Passes(OnGPU):
    """Trials of a model on the CPU, with the memory of a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.passes: list[Any] = []
        ids, labels = np.arange(3), np.full(3, -100)
        self.row = {"input_ids": ids, "labels": labels}
        # In place of rows: what is the worst is tested in tests/data/test_worst_rows.py.
        monkeypatch.setattr(trial_module, "worst_micro_batch", lambda rows, size, max_length: [self.row] * size)
        model = torch.nn.Linear(1, 1)
        self.runner: Any = SimpleNamespace(
            model=model, device=torch.device("cpu"), batch_of=list, loss_sum=self.loss_sum
        )
        # What Adam will keep for two fp32 weights comes on top of the peak.
        self.bytes_later = bytes_added_by_steps(model, "adamw_torch", ddp_sends=False)
        memory = {"mem_get_info": (60, 100), "memory_reserved": 20, "max_memory_reserved": 30}
        for name, value in memory.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.7)
        for name in ("synchronize", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)

    def loss_sum(self, batch: Any) -> torch.Tensor:
        model = self.runner.model
        # In a step the gradients of earlier micro-batches are there.
        self.passes.append(("backend", batch, model.training, model.weight.grad is not None))
        torch.rand(1)
        return model.weight.sum()

    def try_rung(self, rung: Rung) -> Trial:
        return MemoryTrials.try_rung(self, rung)


def test_a_trial_is_a_pass_of_a_step_and_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    trials, state = Passes(monkeypatch), torch.get_rng_state()
    trials.runner.model.eval()
    assert trials.try_rung(Rung(False, "none", 2)) == Trial(30 + 2 * 8, 70, 20)
    assert trials.passes == [("backend", [trials.row] * 2, True, True)]
    # A micro-batch that is computed in passes needs what one of them needs.
    trials.try_rung(Rung(False, "none", 4, passes=2))
    assert trials.passes[1][1] == [trials.row] * 2
    assert not trials.runner.model.training and trials.runner.model.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("no kernel")])
def test_only_a_lack_of_memory_is_an_answer(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Passes(monkeypatch)

    def fail(batch: Any) -> Any:
        raise error

    trials.runner.loss_sum = fail
    if isinstance(error, torch.OutOfMemoryError):
        assert trials.try_rung(Rung(False, "none", 1)).needed is None
    else:
        with pytest.raises(RuntimeError, match="no kernel"):
            trials.try_rung(Rung(False, "none", 1))
    assert trials.runner.model.weight.grad is None


def test_a_captured_rung_is_tried_with_its_pass_and_the_head_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    trials, tried = Passes(monkeypatch), list[Rung]()

    def captured_pass(rung: Rung) -> Any:
        tried.append(rung)
        # It has buffers of its own for the gradients. A model that cannot be called so is tried as the backend computes
        # it.
        return (
            None if rung.rows == 1 else lambda b: trials.passes.append(("captured", b, trials.runner.model.weight.grad))
        )

    trials.captured_pass = captured_pass
    rungs = [Rung(True, "torch", 2), Rung(True, "torch", 1), Rung(False, "torch", 2)]
    assert [trials.try_rung(rung).needed for rung in rungs] == [46] * 3
    assert tried == rungs[:2]
    assert trials.passes[0] == (
        "captured",
        [{"input_ids": trials.row["input_ids"], "labels": trials.row["input_ids"]}] * 2,
        None,
    )
    assert trials.passes[1:] == [("backend", [trials.row] * rows, True, True) for rows in (1, 2)]


@pytest.mark.parametrize(("ddp_sends", "copies"), [(False, 0), (True, 1)])
def test_buckets_of_ddp_are_counted(ddp_sends, copies):
    assert bytes_added_by_steps(torch.nn.Linear(1, 1), "sgd", ddp_sends=ddp_sends) == copies * 2 * 4
