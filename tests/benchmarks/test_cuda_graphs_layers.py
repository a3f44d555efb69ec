"""The benchmark of layers in CUDA graphs: its variants, who is measured when, and what a result must show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.models import OTHERS, make_config
from benchmarks.common.runs import REPO
from benchmarks.speed import cuda_graphs_layers
from benchmarks.speed.cuda_graphs_layers import (
    MODELS,
    VARIANTS,
    Variant,
    kernel_summary,
    left_out,
    mismatch,
    options,
    tiny,
)
from tests.training.test_captured_step import model_of
from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.sizing import graphs
from unsloth_ddp.training.step.adapter_copies import AdapterCopies

CHAT = VARIANTS["8b_chat"]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_a_run_that_the_kit_takes(name: str) -> None:
    variant = VARIANTS[name]
    given = parse_settings(options(variant, Path("m"), Path("r.jsonl"), Path("o"), cpu=False))
    assert (given.backend, given.method, given.fp8) == (variant.backend, variant.method, variant.fp8)
    assert given.per_device_train_batch_size == variant.packs and given.cuda_graphs == "on"
    assert given.max_length == (8192 if variant.work == "long" else 2048)
    on_cpu = tiny(variant)
    assert (on_cpu is None) == (variant.fp8 or variant.method == "qlora")
    if on_cpu is not None:
        words = options(on_cpu, Path("m"), Path("r.jsonl"), Path("o"), cpu=True)
        assert parse_settings(words).backend == "transformers" and "--cuda_graphs" not in words


def test_every_variant_is_another_run() -> None:
    assert len(set(VARIANTS.values())) == len(VARIANTS)
    assert {variant.model for variant in VARIANTS.values()} == set(MODELS)


def test_models_are_cut_to_a_few_layers() -> None:
    assert (make_config("qwen3_8b", 4).num_hidden_layers, make_config("qwen3_8b").num_hidden_layers) == (4, 36)
    cut = make_config("qwen3_30b_a3b", 2)
    assert (cut.num_hidden_layers, cut.num_experts) == (2, 128)
    assert OTHERS["qwen3_30b_a3b"][1]["num_hidden_layers"] == 48


def test_what_a_variant_names_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cuda_graphs_layers.NORM_SWITCH, "1")
    monkeypatch.setattr(graphs, "are_single_rows", lambda train: True)
    train: Any = None

    def found(variant: Variant) -> tuple[bool, bool, str | None]:
        with left_out(variant):
            copied = bool(AdapterCopies(model_of("lora"), torch.bfloat16).layers)
            return copied, graphs.are_single_rows(train), os.environ.get(cuda_graphs_layers.NORM_SWITCH)

    assert found(VARIANTS["8b_chat_neither"]) == (False, True, "0")
    assert found(VARIANTS["8b_full_varlen"]) == (True, False, None)
    assert AdapterCopies(model_of("lora"), torch.bfloat16).layers
    assert os.environ[cuda_graphs_layers.NORM_SWITCH] == "1"


def test_a_pass_that_is_not_what_the_variant_names_is_told() -> None:
    right = {"ms": 1.0, "copies": 56, "sequences": 0, "fused_norm": True}
    assert mismatch(CHAT, right, cpu=False) is None
    assert mismatch(CHAT, {"choice": "too short"}, cpu=False) == "the run uses no CUDA graphs: too short"
    assert "0 matrices" in str(mismatch(CHAT, {**right, "copies": 0}, cpu=False))
    assert "4 packs are" in str(mismatch(CHAT, {**right, "sequences": 4}, cpu=False))
    assert "0 packs are" in str(mismatch(VARIANTS["8b_full"], right, cpu=False))
    assert "was not used" in str(mismatch(CHAT, {**right, "fused_norm": False}, cpu=False))
    assert "was used" in str(mismatch(VARIANTS["8b_transformers"], right, cpu=False))
    assert mismatch(CHAT, {**right, "fused_norm": False}, cpu=True) is None


def test_the_longest_kernels_are_kept_and_all_are_summed() -> None:
    events = [(f"kernel_{number}", 2.0, 0.5) for number in range(40)]
    found = kernel_summary([*events, ("void pytorch_flash::flash_fwd", 4.0, 3.0), ("_qk_norm_rope_forward", 1.0, 0.1)])
    assert found["launches"] == 85 and found["kernel_ms"] == pytest.approx(23.1) and found["attention_ms"] == 3
    assert found["fused_norm"] and not kernel_summary(events)["fused_norm"]
    assert len(found["kernels"]) == 25 and found["kernels"][0] == ["void pytorch_flash::flash_fwd", 4.0, 3.0]


@pytest.mark.slow
def test_the_script_measures_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.speed.cuda_graphs_layers", "--work", str(tmp_path / "work"), "--tiny"]
    command += ["--variants", "8b_full_varlen", "8b_qlora", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not on a CPU: 8b_qlora" in done.stdout
    written = json.loads((tmp_path / "found.json").read_text())
    assert list(written["variants"]) == ["8b_full_varlen"] and written["failed"] == []
    one = written["variants"]["8b_full_varlen"]
    # Four rows of 256 tokens, one after the other; both matrices of seven layers in each of the demo's four blocks.
    assert (one["packs"], one["tokens"], one["sequences"], one["copies"]) == (4, 1024, 0, 56)
    assert one["loss"] > 0 and 0 < one["ms_of_rounds"][0] <= one["ms"] and 0 < one["attention_ms"] < one["kernel_ms"]
