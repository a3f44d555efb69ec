"""Test the search over kinds of gradient checkpointing and sizes of a micro-batch, by trials of what fits."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from tests.conftest import REPO
from tests.runtimes import cpu_runtime
from unsloth_ddp.config import options
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.dataset import Counts, TokenizedRows
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.order.collate import PadRight
from unsloth_ddp.data.order.packing import best_fit
from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.forward.gradient_checkpointing import GradientCheckpointing, kinds_here
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.model.loading.load import load_model
from unsloth_ddp.sizing.micro_batch import ENOUGH_TOKENS, divisors, search, with_micro_batch
from unsloth_ddp.sizing.trial import MemorySearch, Trial, bytes_added_by_steps, largest
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.memory_limits import HEADROOM

KINDS = ("none", "torch", "unsloth")


def searched(room: dict[str, int], sizes: list[int], tokens_a_row: int = 2048):
    """The choice where each kind has room for so many rows, and what was tried."""
    tried: list[tuple[str, int]] = []

    def fits(kind: str, size: int) -> bool:
        tried.append((kind, size))
        return size <= room[kind]

    return search(KINDS, sizes, lambda size: size * tokens_a_row, fits), tried


def test_one_size_takes_the_first_kind_that_fits():
    assert searched({"none": 4, "torch": 8, "unsloth": 8}, [4]) == (("none", 4), [("none", 4)])
    assert searched({"none": 3, "torch": 8, "unsloth": 8}, [4]) == (("torch", 4), [("none", 4), ("torch", 4)])
    assert searched({"none": 0, "torch": 0, "unsloth": 3}, [4])[0] is None


def test_sizes_are_searched_for_the_most_rows_that_fit():
    found, tried = searched({"none": 9, "torch": 99, "unsloth": 99}, [1, 2, 4, 8, 16, 32, 64])
    assert found == ("none", 8)
    assert len(tried) == 3
    assert searched({"none": 64, "torch": 99, "unsloth": 99}, [1, 2, 4, 8, 16, 32, 64])[0] == ("none", 64)


def test_more_is_recomputed_only_where_too_few_tokens_fit_otherwise():
    # Two long rows keep a GPU busy; two short ones do not, and recomputing lets 32 of them in.
    room = {"none": 2, "torch": 32, "unsloth": 64}
    assert searched(room, [1, 2, 32, 64], ENOUGH_TOKENS // 2)[0] == ("none", 2)
    assert searched(room, [1, 2, 32, 64], 300)[0] == ("torch", 32)
    # Where no kind has enough, the most tokens, and of two alike the cheaper kind.
    assert searched({"none": 2, "torch": 4, "unsloth": 4}, [1, 2, 4, 64], 100)[0] == ("torch", 4)
    # The whole step at once is enough, however few tokens it has.
    assert searched(room, [1, 2], 1)[0] == ("none", 2)


def test_a_try_has_to_leave_room():
    assert Trial(90, 100).fits
    assert not Trial(95, 100).fits
    assert not Trial(None, 100).fits


@pytest.mark.parametrize("packed", [False, True])
def test_rows_still_to_come_are_tried_at_their_longest(packed):
    columns = {name: [[1, 2], [3, 4, 5], [6], [0]] for name in ("input_ids", "labels")}
    packing = best_fit(np.array([2, 3, 1]), 3) if packed else None
    rows = TokenizedRows(datasets.Dataset.from_dict(columns).with_format("numpy"), Counts(rows=3), packing)
    assert sorted(len(unit["input_ids"]) for unit in largest(rows, 2, max_length=7)) == ([3, 3] if packed else [2, 3])
    units = largest(dataclasses.replace(rows, streamed=True), 2, max_length=7)
    assert [len(unit["labels"]) for unit in units] == [7, 7]
    assert [unit["lengths"].tolist() for unit in units if packed] == [[7], [7]] * packed


def test_rows_with_the_most_pixels_are_tried_beside_the_longest():
    columns = {"input_ids": [[1], [2, 2], [3] * 9, [4] * 5, [0]], "pixels": [900, 10, 0, 700, 0]}
    columns["labels"] = columns["input_ids"]
    processing: Any = SimpleNamespace(work=lambda pixels: pixels)
    table = datasets.Dataset.from_dict(columns).with_format("numpy")
    rows = TokenizedRows(table, Counts(rows=4), processing=processing)
    assert [[len(unit["input_ids"]) for unit in largest(rows, size, 99)] for size in (1, 2, 3)] == [
        [1], [9, 1], [9, 1, 5],
    ]  # fmt: skip


def test_packs_with_the_most_tokens_and_pixels_are_tried():
    columns = {"input_ids": [[1], [2, 2], [3] * 9, [4] * 5, [0]], "pixels": [900, 10, 0, 700, 0]}
    columns |= {"images": [["a"], ["b"], [], ["c"], []], "rendered": [""] * 5, "labels": columns["input_ids"]}
    processing: Any = SimpleNamespace(work=lambda pixels: pixels // 100)
    packing = best_fit(np.array([1, 2, 9, 5]), 9)
    rows = TokenizedRows(
        datasets.Dataset.from_dict(columns).with_format("numpy"), Counts(rows=4), packing, processing=processing
    )
    assert rows.work_of_images().tolist() == [0, 7 + 0 + 9, 0]
    assert [unit["images"] for unit in largest(rows, 2, 12)] == [[["a"], ["b"], ["c"]], [[]]]
    streamed = largest(dataclasses.replace(rows, streamed=True), 2, 12)
    assert [unit["images"] for unit in streamed] == [[["a"], ["b"], ["c"]]] * 2
    assert [unit["lengths"].tolist() for unit in streamed] == [[1, 2, 9]] * 2
    assert [len(unit["labels"]) for unit in streamed] == [12, 12]


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
    ("asked", "backend", "sharding", "device", "kinds"),
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
def test_what_is_asked_for_is_not_changed(asked, backend, sharding, device, kinds):
    runtime = Runtime(Ranks(), backend, device, "bf16", "H200", sharding)
    assert kinds_here(runtime, Settings(model="m", gradient_checkpointing=asked)) == kinds


@pytest.mark.parametrize(("sharding", "next_kind"), [("none", "torch"), ("zero2", None), ("fsdp2", None)])
def test_a_step_is_repeated_only_where_no_rank_waits_for_another(sharding, next_kind):
    runtime = Runtime(Ranks(), "transformers", "cuda", "bf16", "H200", sharding)
    assert GradientCheckpointing(None, runtime, Settings(model="m")).next == next_kind


@pytest.mark.parametrize(
    ("sharding", "method", "expected"), [("zero3", "lora", True), ("zero3", "full", False), ("fsdp2", "lora", False)]
)
def test_zero3_recomputes_adapters_in_the_reentrant_way(sharding, method, expected):
    runtime = Runtime(Ranks(), "transformers", "cuda", "bf16", "H200", sharding)
    given: list[Any] = []
    nothing: Any = SimpleNamespace(disable_input_require_grads=lambda: None, gradient_checkpointing_enable=given.append)
    GradientCheckpointing(nothing, runtime, Settings(model="m", method=method)).use("torch")
    assert given == [{"use_reentrant": expected}]


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


class OnGPU(MemorySearch):
    """The search on a GPU with room for so many rows of 1100 tokens of each kind."""

    def __init__(self, room: dict[str, int], rows: int = 16, *, uses_graphs: bool = False, **options: Any) -> None:
        settings = Settings(model="m", dataset=["d"], **options)
        runtime = Runtime(Ranks(), "unsloth", "cuda", "bf16", "H200")
        checkpointing = SimpleNamespace(kinds=kinds_here(runtime, settings), use=self.use)
        train = SimpleNamespace(streamed=False, packing=None, lengths=lambda: np.array([1100] * 64 + [1]))
        data = SimpleNamespace(train=train, evaluation=None, plan=BatchPlan(1, rows, 1))
        super().__init__(settings, runtime, data, checkpointing, None, 0, uses_graphs=uses_graphs)
        self.room, self.kind = room, ""
        self.tried: list[tuple[str, int]] = []

    def use(self, kind: str) -> None:
        self.kind = kind

    def try_training(self, size: int) -> Trial:
        self.tried.append((self.kind, size))
        return Trial(2**30 * size, int(2**30 * (self.room[self.kind] + 0.5) / (1 - HEADROOM)))


def test_what_fits_is_found_by_trying_and_told():
    decision = OnGPU({"none": 9, "torch": 99, "unsloth": 99}).choose({})
    assert (decision.kind, decision.per_device) == ("none", 8)
    assert decision.reason == "8 x 1,100 tokens need 8.0 of 10.3 GiB"
    assert OnGPU({"none": 0, "torch": 0, "unsloth": 4}).choose({}).kind == "unsloth"
    fixed = OnGPU({"none": 9, "torch": 99, "unsloth": 99}, per_device_train_batch_size=1).choose({})
    assert (fixed.kind, fixed.per_device) == ("none", 1)
    search = OnGPU({}, gradient_checkpointing="none", per_device_train_batch_size=1)
    assert search.choose({}).reason == "as set" and not search.tried


@pytest.mark.parametrize(
    ("room", "ordinary", "with_graphs"),
    [
        # More than 8192 tokens bring a CUDA graph nothing, and 2048 are enough not to recompute.
        ({"none": 16, "torch": 16, "unsloth": 16}, ("none", 16), ("none", 8)),
        ({"none": 2, "torch": 16, "unsloth": 16}, ("torch", 16), ("none", 2)),
        ({"none": 1, "torch": 16, "unsloth": 16}, ("torch", 16), ("torch", 8)),
        # Captured with torch, 2200 tokens are as fast as more; unsloth is not captured.
        ({"none": 0, "torch": 2, "unsloth": 16}, ("unsloth", 16), ("torch", 2)),
        ({"none": 0, "torch": 0, "unsloth": 16}, ("unsloth", 16), ("unsloth", 8)),
    ],
)
def test_a_run_with_cuda_graphs_takes_fewer_rows_and_recomputes_less(room, ordinary, with_graphs):
    for graphs, wanted in ((False, ordinary), (True, with_graphs)):
        decision = OnGPU(room, uses_graphs=graphs).choose({})
        assert (decision.kind, decision.per_device) == wanted
    only = OnGPU(room, uses_graphs=True, gradient_checkpointing="torch").choose({})
    assert (only.kind, only.per_device) == ("torch", max(1, min(8, room["torch"])))


def test_a_resumed_run_keeps_the_decision():
    room = {"none": 16, "torch": 16, "unsloth": 16}
    before = {"gradient_checkpointing": "torch", "per_device_train_batch_size": 4, "world_size": 1, "device": "H200"}
    decision = OnGPU(room).choose(before)
    assert (decision.kind, decision.per_device) == ("torch", 4)
    # On other GPUs, or another number of them, it is made again; where it no longer fits, less is taken.
    for other in ({"world_size": 2}, {"device": "A100"}):
        decision = OnGPU(room).choose(before | other)
        assert (decision.kind, decision.per_device) == ("none", 16)
    assert OnGPU({"torch": 2, "unsloth": 2}).choose(before).per_device == 2


def test_every_rank_tries_what_the_main_process_would(monkeypatch):
    # Its own GPU may be of another kind than the one of the checkpoint.
    search = OnGPU({"torch": 16})
    monkeypatch.setattr(search.runtime, "broadcast_from_main", lambda work: (["torch"], [1, 2]))
    decision = search.choose({"world_size": 1, "device": "H200"})
    assert (decision.kind, decision.per_device) == ("torch", 2)


def test_rows_that_fit_nowhere_are_refused(monkeypatch):
    search = OnGPU({"none": 0, "torch": 0, "unsloth": 0})
    decision = search.choose({})
    assert (decision.kind, decision.per_device) == ("unsloth", 1)
    assert decision.reason.endswith(", with little room to spare")
    monkeypatch.setattr(search, "try_training", lambda size: Trial(None, 2**30))
    with pytest.raises(UserError, match=r"longest rows \(1 x 1,100 tokens\) does not fit into the 1 GiB"):
        search.choose({})


def test_evaluation_rows_that_do_not_fit_are_refused_before_the_first_step(monkeypatch):
    search, gib = OnGPU({"none": 16}), 2**30
    trials = {
        "enough": Trial(9 * gib, 9 * gib),
        "more": Trial(10 * gib, 9 * gib),
        "out of memory": Trial(None, 9 * gib),
    }
    # Without evaluation rows none are tried.
    monkeypatch.setattr(search, "try_evaluation", lambda rows: pytest.fail("evaluation rows were tried"))
    assert search.choose({}).per_device == 16
    search.data.evaluation = SimpleNamespace(units=5, lengths=lambda: np.array([10, 8000, 30, 40, 50, 1]))
    for name, trial in trials.items():
        monkeypatch.setattr(search, "try_evaluation", lambda rows, trial=trial: trial)
        if name == "enough":
            assert search.choose({}).per_device == 16
            continue
        with pytest.raises(UserError, match=r"longest rows \(5 x 8,000 tokens\) does not fit into the 9 GiB"):
            search.choose({})


def test_a_trial_of_an_evaluation_is_one_forward_pass_without_gradients(monkeypatch):
    columns = {name: [[1, 2], [3, 4, 5], [6], [0]] for name in ("input_ids", "labels")}
    rows = TokenizedRows(datasets.Dataset.from_dict(columns).with_format("numpy"), Counts(rows=3))
    seen: list[Any] = []

    def loss(model, batch, divisor):
        seen.append((batch["input_ids"].tolist(), model.training, torch.is_grad_enabled(), divisor.item()))
        if len(seen) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model = torch.nn.Linear(1, 1)
    runner = MicroBatchRunner(model, torch.device("cpu"), loss, PadRight(0), contextlib.nullcontext)
    search = OnGPU({}, per_device_eval_batch_size=2)
    # What Adam will keep for two fp32 weights comes on top of the peak.
    search.runner, search.bytes_later = runner, bytes_added_by_steps(model, "adamw_torch", ddp_sends=False)
    search.bytes_kept = 5
    for name, value in {
        "mem_get_info": (60, 100),
        "memory_reserved": 20,
        "memory_allocated": 0,
        "max_memory_allocated": 30,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.7)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    assert search.try_evaluation(rows) == Trial(30 + 2 * 8 + 5, 70)
    assert seen == [([[3, 4, 5], [1, 2, 0]], False, False, 1.0)]
    assert search.try_evaluation(rows).needed is None
    assert model.training


def test_memory_is_tried_with_the_captured_pass_and_the_head_of_all_tokens(monkeypatch):
    model = torch.nn.Linear(1, 1)
    ids, labels = np.arange(3), np.full(3, -100)
    runner = SimpleNamespace(
        model=model, device=torch.device("cpu"), batch_of=list, loss_sum=lambda rows: len(rows) * model.weight.sum()
    )
    search, asked, held = OnGPU({}), list[tuple[str, int]](), list[Any]()
    search.runner, search.bytes_later = runner, 7
    search.checkpointing.kind = "torch"
    search._largest = lambda size: [{"input_ids": ids, "labels": labels}] * size
    for name, value in {"mem_get_info": (60, 100), "memory_reserved": 20, "max_memory_allocated": 30}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)

    def captured_pass(kind: str, size: int) -> Any:
        asked.append((kind, size))
        return (lambda batch: held.append((batch, model.weight.grad))) if size > 1 else None

    search.captured_pass = captured_pass
    assert [MemorySearch.try_training(search, size).needed for size in (2, 1)] == [37, 37]
    assert asked == [("torch", 2), ("torch", 1)]
    # It has buffers of its own for the gradients.
    assert held == [([{"input_ids": ids, "labels": ids}] * 2, None)] and model.weight.grad is None


def test_what_does_not_fit_captured_is_tried_as_the_backend_computes_it():
    tried: list[bool] = []

    class Search(OnGPU):
        def try_training(self, size: int) -> Trial:
            tried.append(self.captured_pass is not None)
            return Trial(None if self.captured_pass else 1, 100)

    search = Search({}, rows=1, gradient_checkpointing="torch", per_device_train_batch_size="auto")
    search.captured_pass = lambda kind, size: None
    search.data.plan = BatchPlan(1, 2, 1)
    decision = search.choose({})
    assert (decision.kind, decision.per_device) == ("torch", 2)
    assert tried == [True, True, False]


def test_the_largest_micro_batch_is_tried_first_where_it_is_small():
    assert searched({"none": 8}, [1, 2, 4, 8])[1] == [("none", 8)]
    tried = searched({"none": 2, "torch": 8, "unsloth": 8}, [1, 2, 4, 8], 1024)[1]
    assert tried == [("none", 8), ("none", 2), ("none", 4), ("torch", 8)]


@pytest.mark.parametrize(("ddp_sends", "copies"), [(False, 0), (True, 1)])
def test_buckets_of_ddp_are_counted(ddp_sends, copies):
    assert bytes_added_by_steps(torch.nn.Linear(1, 1), "sgd", ddp_sends=ddp_sends) == copies * 2 * 4
