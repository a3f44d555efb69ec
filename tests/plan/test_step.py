"""The step that is planned: the one that runs took on GPUs, and that a run chooses for the same rows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import AutoTokenizer

from benchmarks.common.rows import chat_rows
from tests.conftest import REPO
from tests.plan.conftest import SHAPE
from tests.training.test_first_rung import Choice
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.dataset import Counts, TokenizedRows
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.order.packing import BatchRequest, PackingDecision, plan_step
from unsloth_ddp.data.training_data import TrainingData
from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.plan.compute import Hardware, make_plan
from unsloth_ddp.plan.report import plan_as_json, render_plan
from unsloth_ddp.sizing import graphs
from unsloth_ddp.sizing.choose import choose_step
from unsloth_ddp.sizing.micro_batch import RowLengths, largest_micro_batch, largest_tokens, with_micro_batch

SPEED = REPO / "benchmarks" / "results" / "speed"
PACKED = PackingDecision(True, "a kernel keeps rows apart")


def planned_rows(settings: Settings, lengths: np.ndarray, processes: int = 1) -> tuple[RowLengths, BatchPlan]:
    batch, packing, _ = plan_step(BatchRequest.of(settings, processes), lengths, PACKED)
    return RowLengths(lengths, supervised=lengths).packed(packing), batch


# ---- runs on H200s ----


@pytest.fixture(scope="module")
def chat_lengths(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """The tokens of the 4,096 chats that benchmarks/speed trains on."""
    path: Path = tmp_path_factory.mktemp("speed") / "chat.jsonl"
    chat_rows(path, 4096, seed=3)
    tokenizer, counted = AutoTokenizer.from_pretrained(REPO / "demo" / "model"), {}

    def count(text: str) -> int:
        if text not in counted:
            # The role and the end of the turn are a token each.
            counted[text] = 2 + len(tokenizer(text, add_special_tokens=False)["input_ids"])
        return counted[text]

    rows = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    return np.array([min(2048, 1 + sum(count(message["content"]) for message in row)) for row in rows])


def measured_runs() -> list[Any]:
    """Every run of the kit that chose its micro-batch for CUDA graphs or without them, as results have it."""
    found = []
    for name in ("cuda_graphs_small_batch", "cuda_graphs_speed_table"):
        result = json.loads((SPEED / f"{name}.json").read_text())
        for cell in result["cells"]:
            work = result["works"][cell["work"]]
            if cell["contestant"] in ("kit", "kit_ordinary") and cell["method"] != "full" and cell["exit_code"] == 0:
                found.append(pytest.param(work, cell, id=f"{name}-{cell['name']}"))
    return found


RUNS = measured_runs()


@pytest.mark.parametrize(("work", "cell"), RUNS)
def test_the_step_of_a_measured_run_is_planned(
    work: dict[str, Any],
    cell: dict[str, Any],
    measured_job: Any,
    chat_lengths: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The runs were short, and measured before short runs were left uncompiled.
    monkeypatch.setattr(graphs, "FEWEST_MICRO_BATCHES", 0)
    words = cell["command"].split()
    settings = Settings(
        model="m",
        dataset=["d"],
        method=cell["method"],
        max_length=work["max_length"],
        global_batch_size=work["global_batch"],
        max_steps=int(words[words.index("--max_steps") + 1]),
        cuda_graphs=words[words.index("--cuda_graphs") + 1] if "--cuda_graphs" in words else "auto",
    )
    chats = cell["work"] in ("chat", "small")
    rows, asked = planned_rows(settings, chat_lengths if chats else np.full(work["rows"], work["mean_tokens"]))
    taken = cell["settings"]
    # The rows of that run, or the comparison means nothing.
    assert (rows.units, asked.global_batch) == (taken["packs"], taken["global_batch_size"])
    shape = measured_job[0][cell["shape"]]
    hardware = Hardware(1, 1, gpu_memory=139 * 2**30)
    made = make_plan(settings, shape, rows, asked, hardware)
    assert made.batch.per_device == taken["per_device_train_batch_size"]
    assert made.rung.captured == (made.batch.per_device * work["max_length"] == 8192)
    chosen = next(row for row in made.memory if (row.method, row.sharding) == (settings.method, "none"))
    assert chosen.checkpointing == taken["gradient_checkpointing"]
    assert chosen.memory.total == pytest.approx(cell["peak_memory_bytes"], rel=0.08)


@pytest.mark.parametrize(
    ("gib", "options", "size", "kind", "tried"),
    [
        # A run tries the longest packs of all steps together, unless there is nothing to choose.
        (139, {}, 8, "none", False),
        (10, {}, 1, "unsloth", True),
        (10, {"per_device_train_batch_size": 8}, 8, "unsloth", True),
        (10, {"per_device_train_batch_size": 8, "gradient_checkpointing": "torch"}, 8, "torch", False),
        (64, {"per_device_train_batch_size": 8}, 8, "torch", False),
        # Eight packs of a step would fit, but not the longest eight of all.
        (60, {"gradient_checkpointing": "none"}, 4, "none", False),
    ],
)
def test_what_does_not_fit_has_the_memory_of_the_trial(
    gib: float, options: dict[str, Any], size: int, kind: str, tried: bool, measured_job: Any, chat_lengths: np.ndarray
) -> None:
    settings = Settings(model="m", dataset=["d"], max_length=2048, global_batch_size=16, cuda_graphs="off", **options)
    rows, asked = planned_rows(settings, chat_lengths)
    asked = with_micro_batch(asked, options.get("per_device_train_batch_size", 1))
    shape, hardware = measured_job[0]["qwen3_8b"], Hardware(1, 1, gpu_memory=gib * 2**30)
    planned = choose_step(settings, shape, rows, asked, gib * 2**30)
    assert (planned.batch.per_device, planned.checkpointing) == (size, kind)
    made = make_plan(settings, shape, rows, asked, hardware)
    row = next(row for row in made.memory if (row.method, row.sharding) == ("lora", "none"))
    assert (row.checkpointing, made.micro_batch) == (kind, planned.tokens)
    assert row.verdict == ("fits" if gib > 10 else "does not fit")
    of_trial, of_steps = largest_tokens(rows, size, 2048), largest_micro_batch(rows, planned.batch, settings)
    assert of_steps < of_trial or size == 1
    assert planned.tokens == (of_trial if tried else of_steps)


# ---- the choice of a run for the same rows ----

SMALL, LARGE = {"global_batch_size": 16}, {"global_batch_size": 64}
TRIED = "if a trial before step 1 gives the same loss and gradients, and is faster"


@pytest.mark.parametrize(
    ("options", "processes", "size", "told"),
    [
        (SMALL, 1, 4, None),
        (SMALL, 2, 4, None),
        (SMALL | {"cuda_graphs": "on"}, 1, 4, None),
        (SMALL | {"cuda_graphs": "off"}, 1, 8, "as set"),
        (SMALL | {"streaming": True, "max_steps": 2000}, 1, 4, None),
        (LARGE | {"method": "full"}, 1, 8, "micro-batches of 16,384 tokens keep the GPU busy"),
        (LARGE | {"max_steps": 10}, 1, 8, "a run of 20 micro-batches is too short for compiling to pay"),
        (LARGE | {"gradient_checkpointing": "unsloth"}, 1, 8, "gradient checkpointing unsloth moves"),
        (LARGE | {"gradient_checkpointing": "torch"}, 1, 4, None),
        (LARGE | {"gradient_checkpointing": "torch", "lora_dropout": 0.1}, 1, 8, "gradient checkpointing torch"),
        (LARGE | {"ddp_find_unused_parameters": True}, 2, 4, "DistributedDataParallel looks for"),
        (LARGE | {"per_device_train_batch_size": 1}, 1, 1, None),
    ],
)
def test_a_step_is_planned_as_a_run_chooses_it(
    options: dict[str, Any],
    processes: int,
    size: int,
    told: str | None,
    chat_lengths: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings(model="m", dataset=["d"], max_length=2048, num_train_epochs=1000, **options)
    rows, asked = planned_rows(settings, chat_lengths, processes)
    rows = dataclasses.replace(rows, streamed=settings.streaming)
    planned = choose_step(settings, SHAPE, rows, asked, None)
    assert (planned.batch.per_device, planned.rung.captured) == (size, told is None)
    assert planned.graphs.startswith(told or TRIED)
    # On GPUs where everything fits and every trial succeeds.
    dataset = datasets.Dataset.from_dict({"input_ids": [[0] * int(n) for n in [*chat_lengths, 1]]})
    plan, packing, decision = plan_step(BatchRequest.of(settings, processes), chat_lengths, PACKED)
    train = TokenizedRows(dataset, Counts(rows=len(chat_lengths)), packing, settings.streaming)
    runtime = Runtime(Ranks(world_size=processes), "unsloth", "cuda", "bf16", "H200")
    monkeypatch.setattr(Runtime, "gather", lambda self, value: [value])
    chosen = Choice(monkeypatch, settings, TrainingData(train, None, plan, decision), runtime=runtime).choose()
    assert chosen.rung == planned.rung and (told is None or chosen.graphs == planned.graphs)


@pytest.mark.parametrize(
    ("options", "packed", "said"),
    [
        (SMALL, True, f"on: {TRIED}"),
        (SMALL | {"cuda_graphs": "off"}, True, "off: as set"),
        (SMALL | {"streaming": True, "max_steps": 2000}, True, f"on: {TRIED}"),
        (
            SMALL | {"cuda_graphs": "on"},
            False,
            "off: rows are padded, so micro-batches differ in shape; a run refuses --cuda_graphs on",
        ),
    ],
)
def test_the_plan_says_whether_it_assumes_cuda_graphs_and_why_not(
    options: dict[str, Any], packed: bool, said: str, chat_lengths: np.ndarray
) -> None:
    settings = Settings(
        model="m", dataset=["d"], max_length=2048, num_train_epochs=1000, per_device_train_batch_size="auto", **options
    )
    rows, asked = planned_rows(settings, chat_lengths)
    if not packed:
        rows, asked = RowLengths(chat_lengths, supervised=chat_lengths), BatchPlan(1, 16, 1)
    rows = dataclasses.replace(rows, streamed=settings.streaming)
    hardware = Hardware(1, 1)
    report = make_plan(settings, SHAPE, rows, asked, hardware)
    # From the line of its name to the next one.
    shown = " ".join(render_plan(report).split())
    assert shown.split("CUDA graphs ")[1].split(" steps ")[0] == said
    assert ("As in a run, CUDA graphs are assumed however much is padded." in shown) == settings.streaming
    assert plan_as_json(report)["plan"]["rung"]["captured"] == said.startswith("on")
