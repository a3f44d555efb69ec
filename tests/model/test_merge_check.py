"""A merged model is compared with its adapter, and refused where the adapter's change is missing."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.model.test_merge import make_adapter, make_base, settings
from unsloth_ddp.model.adapter import merge_check
from unsloth_ddp.model.adapter.merge import save_merged
from unsloth_ddp.utils.errors import UserError

ROWS = [list(range(3, 40)), list(range(100, 130))]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A base model, an adapter of it, and the merged model."""
    place = tmp_path_factory.mktemp("merged")
    base = make_base(place / "base")
    adapter = make_adapter(base, place / "adapter")
    save_merged(settings(base), adapter, place / "merged", [2])
    return base, adapter, place / "merged"


def test_a_merged_model_is_accepted_and_the_base_in_its_place_is_not(made: tuple[Path, Path, Path]) -> None:
    base, adapter, merged = made
    merge_check.check_merged(settings(base), adapter, merged, ROWS)
    with pytest.raises(UserError, match=r"The merged model differs from .*; the adapter is whole"):
        merge_check.check_merged(settings(base), adapter, base, ROWS)


@pytest.mark.slow
def test_beside_unsloth_it_is_compared_in_a_process_without_it(
    made: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter, _ = made

    def fails(*given: object, **named: object) -> torch.Tensor:
        raise ValueError("cannot be accessed from Triton (cpu tensor?)")

    monkeypatch.setitem(sys.modules, "unsloth", ModuleType("unsloth"))
    monkeypatch.setattr(LlamaForCausalLM, "forward", fails)
    # A process takes seconds, so only the model that differs is given: what is accepted could also not be compared.
    with pytest.raises(UserError, match="The merged model differs from"):
        merge_check.check_merged(settings(base), adapter, base, ROWS)


def test_a_model_that_a_cpu_cannot_compute_is_kept(
    made: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    base, adapter, merged = made

    def fails(*given: object, **named: object) -> torch.Tensor:
        raise RuntimeError("no kernel for the CPU")

    monkeypatch.setattr(LlamaForCausalLM, "forward", fails)
    merge_check.check_merged(settings(base), adapter, merged, ROWS)
    assert "was not compared with the adapter on rows: no kernel for the CPU." in capsys.readouterr().out


def test_a_model_larger_than_the_free_memory_is_not_compared(
    made: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    base, adapter, merged = made
    shutil.copytree(merged, tmp_path / "merged")
    monkeypatch.setattr(merge_check, "ROOM", 1e12)
    merge_check.check_merged(settings(base), adapter, tmp_path / "merged", ROWS)
    assert "was not compared with the adapter on rows" in capsys.readouterr().out
