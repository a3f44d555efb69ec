"""docs/support.md against the rules of the code: every yes, no and kernel in its tables."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import REPO
from tests.tiny_models import model_of_layers
from unsloth_ddp.checkpoints.writer import check_shared
from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.data.order.packing import PackingDecision
from unsloth_ddp.distributed import runtime as processes
from unsloth_ddp.distributed.drift import REPLICATED
from unsloth_ddp.distributed.sharding import check_offload, check_sharding, sharding_warnings
from unsloth_ddp.model.backend import BackendFacts, choose_backend
from unsloth_ddp.model.files.check import check_quantization
from unsloth_ddp.model.forward.gradient_checkpointing import kinds_here
from unsloth_ddp.model.loading.load import check_model
from unsloth_ddp.model.packing import varlen
from unsloth_ddp.model.packing.attention import AttentionSetup, select_varlen_kernel
from unsloth_ddp.training.step.capture_check import obstacle_to_capture
from unsloth_ddp.utils.errors import UserError

PAGE = (REPO / "docs" / "support.md").read_text()
SHARDINGS = {"DDP": "none", "ZeRO-2": "zero2", "ZeRO-3": "zero3", "FSDP2": "fsdp2"}
BACKENDS = {"U": "unsloth", "T": "transformers"}


def table_after(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, the header row first."""
    lines = PAGE.split(heading, 1)[1].splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [rows[0], *rows[2:]]


SUPPORT = table_after("# Support table")
CELLS = [(row[0], column, cell) for row in SUPPORT[1:] for column, cell in zip(SUPPORT[0][1:], row[1:], strict=True)]


HOST_MEMORY = table_after("## Host memory")
KEPT = {"zero2": "optimizer", "zero3": "parameters", "fsdp2": "parameters"}


@pytest.mark.parametrize(
    ("options", "column", "cell"),
    [
        (row[0], column, cell)
        for row in HOST_MEMORY[1:]
        for column, cell in zip(HOST_MEMORY[0][1:], row[1:], strict=True)
    ],
)
def test_what_goes_with_host_memory(options, column, cell, monkeypatch):
    settings, sharding = parse(options.strip("`")), column.removesuffix("_offload")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    try:
        check_sharding(sharding, settings, "cuda", 2)
        check_offload(KEPT[sharding], sharding, settings)
        choose_backend(BackendFacts(settings, sharding=sharding, offload=KEPT[sharding]))
        found = "yes"
    except UserError:
        found = "no"
    assert found == cell


def place(column: str) -> SimpleNamespace:
    """Return what a run in this column knows of its processes, as its main process."""
    backend, device, sharding = "transformers", "cpu", "none"
    if column != "CPU":
        kind, letter = column.split(", ")
        backend, device, sharding = BACKENDS[letter], "cuda", SHARDINGS[kind]
    return SimpleNamespace(
        device_type=device,
        backend=backend,
        decided_backend=backend,
        sharding=sharding,
        precision="bf16",
        on_main=lambda work: work(),
    )


def parse(options: str) -> Any:
    model = str(REPO / "demo/model")
    return parse_settings(["--model", model, "--dataset", str(REPO / "demo/train.jsonl"), *shlex.split(options)])


@pytest.fixture
def every_package_and_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have DeepSpeed, bitsandbytes and a GPU with bf16, as far as the rules look for them."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


def support(options: str, where: SimpleNamespace) -> str:
    """Return yes, no or ignored by the code's own rules."""
    if "--streaming" in options:
        options += " --max_steps 100"
    try:
        settings = parse(f"{options} --backend {where.backend}")
        processes._choose_precision(settings.precision, where.device_type == "cuda")
        check_sharding(where.sharding, settings, where.device_type, 2)
        choose_backend(BackendFacts(settings, where.device_type == "cuda", where.sharding))
        check_model(settings, where)
    except UserError:
        return "no"
    said = " ".join(sharding_warnings(where.sharding, settings, 1))
    return "ignored" if " is ignored" in said else "yes"


@pytest.mark.usefixtures("every_package_and_gpu")
@pytest.mark.parametrize(("row", "column", "cell"), [c for c in CELLS if c[0].endswith("`")])
def test_options_are_taken_or_refused_as_the_table_says(row: str, column: str, cell: str) -> None:
    assert support(row.strip("`"), place(column)) == cell


@pytest.mark.parametrize(("row", "column", "cell"), [c for c in CELLS if c[0].endswith("takes")])
def test_automatic_gradient_checkpointing_takes_these_kinds(row: str, column: str, cell: str) -> None:
    where = place(column)
    kinds = kinds_here(where, parse("--gradient_checkpointing auto"))
    # On a CPU memory is not tried, so the first kind stays.
    assert cell == (kinds[0] if where.device_type == "cpu" else ", ".join(kinds))


@pytest.mark.parametrize(("row", "column", "cell"), [c for c in CELLS if c[0].startswith("weights compared")])
def test_weights_are_compared_where_the_table_says(row: str, column: str, cell: str) -> None:
    assert cell == ("yes" if place(column).sharding in REPLICATED else "no")


def obstacle(settings: Any, where: Any, data: Any) -> str | None:
    """Return why a run with a model of plain layers cannot be captured."""
    return obstacle_to_capture(settings, where, data, model_of_layers([]))


@pytest.mark.parametrize(("row", "column", "cell"), [c for c in CELLS if c[0].startswith("CUDA graphs")])
def test_cuda_graphs_are_used_where_the_table_says(
    row: str, column: str, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "is_available", lambda: True)
    where = place(column)
    where.precision, where.ranks = "bf16", SimpleNamespace(world_size=2)
    packed: Any = SimpleNamespace(train=SimpleNamespace(packing=object(), processing=None))

    def obstacle(options: str, data: Any = packed, *layers: torch.nn.Module) -> str | None:
        return obstacle_to_capture(parse(options), where, data, model_of_layers(list(layers)))

    assert cell == ("yes" if obstacle("") is None else "no")
    assert (obstacle("--method full") is None) == (cell == "yes")
    # The kernels of layers with a state read the boundaries of rows on the host.
    assert obstacle("", packed, torch.nn.Conv1d(1, 1, 4)) is not None
    for kind in ("auto", "none", "torch", "unsloth"):
        found = obstacle(f"--gradient_checkpointing {kind}")
        assert (found is None) == (cell == "yes" and kind != "unsloth")
        found = obstacle(f"--gradient_checkpointing {kind} --lora_dropout 0.1")
        assert (found is None) == (cell == "yes" and kind in ("auto", "none"))
    assert obstacle("--ddp_find_unused_parameters") is not None
    where.ranks.world_size = 1
    assert (obstacle("--ddp_find_unused_parameters") is None) == (cell == "yes")
    padded: Any = SimpleNamespace(train=SimpleNamespace(packing=None), packing=PackingDecision(False, "no kernel"))
    assert obstacle("", padded) is not None
    monkeypatch.setenv("UNSLOTH_BLOCK_CUDAGRAPHS", "1")
    assert (obstacle("") is None) == (cell == "yes" and where.backend == "transformers")
    monkeypatch.delenv("UNSLOTH_BLOCK_CUDAGRAPHS")
    where.precision = "fp16"
    assert obstacle("") is not None


@pytest.mark.parametrize(("row", "column", "cell"), [c for c in CELLS if c[0].startswith("nodes without")])
def test_a_shared_disk_is_needed_where_the_table_says(row: str, column: str, cell: str) -> None:
    where = place(column)
    where.ranks = SimpleNamespace(nodes=2)
    try:
        check_shared(where, REPO / "outputs/run", False)
        found = "yes"
    except UserError:
        found = "no"
    assert found == cell


def test_every_row_is_checked_by_one_of_these() -> None:
    kinds = ("`", "takes")
    rest = [row[0] for row in SUPPORT[1:] if not row[0].endswith(kinds)]
    assert rest == ["CUDA graphs, packed rows in bf16", "weights compared between ranks", "nodes without a shared disk"]
    assert len(SUPPORT[0]) == 1 + 1 + 2 * len(SHARDINGS)


@pytest.mark.parametrize(("attention", "where", "kernel"), table_after("## Packing")[1:])
def test_kernels_are_found_where_the_table_says(attention: str, where: str, kernel: str) -> None:
    found = select_varlen_kernel(
        AttentionSetup(
            device_type="cpu" if where == "CPU" else "cuda",
            sixteen_bit="16 bit" in where,
            head_dim=128,
            implementation=attention.split("' ")[1] if attention.startswith("Transformers'") else "sdpa",
            unsloth_attention=not attention.startswith("Transformers'"),
            replaceable="chosen" not in attention,
            capability=7 if "below 8" in where else 9,
            flash_attn="flash-attn" in attention,
            xformers="xformers" in attention,
            torch_varlen="torch 2.12" in where or attention == "any",
        )
    )
    assert (found or "none") == kernel


@pytest.mark.parametrize("head_dim", [12, 264])
def test_other_head_dimensions_have_no_kernel(head_dim: int) -> None:
    setup = AttentionSetup("cuda", True, head_dim, unsloth_attention=True, capability=9, flash_attn=True)
    assert select_varlen_kernel(setup) is None


@pytest.mark.parametrize(("options", "cell"), table_after("## Streaming")[1:])
def test_streaming_goes_with_what_the_table_says(options: str, cell: str) -> None:
    words = "" if options.startswith("no ") else options.strip("`").replace('{"', "'{\"").replace("2}", "2}'")
    given = f"--streaming {words}"
    if "--max_steps" not in options:
        given += " --max_steps 100"
    try:
        parse(given)
        found = "yes"
    except UserError:
        found = "no"
    assert found == cell


QUANTIZED = table_after("## Models that are quantized already")


@pytest.mark.parametrize("row", QUANTIZED[1:], ids=lambda row: row[0])
def test_quantized_models_are_taken_where_the_table_says(row: list[str]) -> None:
    for header, cell in zip(QUANTIZED[0][1:], row[1:], strict=True):
        options, backend = header.split(", ")
        config = {"quantization_config": {"quant_method": row[0]}}
        try:
            check_quantization(parse(options.strip("`")), backend.lower(), config)
            found = "yes"
        except UserError:
            found = "no"
        assert found == cell, header
