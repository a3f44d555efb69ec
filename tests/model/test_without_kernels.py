"""Kernels of installed packages that take tensors of a GPU only are left out on a CPU, and of empty models."""

from __future__ import annotations

import inspect
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.integrations import hub_kernels
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.utils import import_utils

from tests.runtimes import cpu_runtime
from tests.tiny_models import save_tiny
from unsloth_ddp.config.options import Settings
from unsloth_ddp.model.adapter.merge_check import check_merged
from unsloth_ddp.model.loading.load import load_model
from unsloth_ddp.sizing.count import read_model_shape

NAME, NO_GPU = "chunk_gated_delta_rule", "0 active drivers"
IDS = torch.arange(5, 25)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("qwen3_5")
    save_tiny("qwen3_5", "Qwen3_5ForCausalLM", place)
    return place


@pytest.fixture
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with the kernel, as Transformers looks for it when it defines the function."""

    def kernel(*_: object, **__: object) -> None:
        raise RuntimeError(NO_GPU)

    package = module_from_spec(ModuleSpec("fla", None))
    package.ops = SimpleNamespace(gated_delta_rule=SimpleNamespace(**{NAME: kernel}))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fla", package)
    reference = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
    chosen = hub_kernels.use_kernel_func_from_hub_with_fallback(NAME, "fla")(reference)
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", chosen)
    # Earlier tests of this process may have loaded models for runs that they did not end.
    monkeypatch.setattr(hub_kernels, "is_torchdynamo_exporting", import_utils.is_torchdynamo_exporting)


def test_a_plan_counts_an_empty_model_as_without_the_package(
    folder: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(model=str(folder))
    without = read_model_shape(settings)
    request.getfixturevalue("_kernel")
    shape = read_model_shape(settings)
    assert (shape.layer_kept, shape.outside_kept) == (without.layer_kept, without.outside_kept)
    assert "a trial forward pass failed" not in caplog.text


def test_a_package_for_gpus_is_not_missed_on_a_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advice: list[str] = []
    monkeypatch.setattr(hub_kernels.logger, "warning_once", advice.append)
    read_model_shape(Settings(model=str(folder)))
    assert not advice


@pytest.mark.usefixtures("_kernel")
def test_a_model_on_a_cpu_is_trained_until_its_run_ends(folder: Path) -> None:
    runtime = cpu_runtime()
    with runtime.cleanup:
        model, _ = load_model(Settings(model=str(folder)), runtime)
        model(input_ids=IDS, labels=IDS).loss.backward()
        assert any(weight.grad is not None for weight in model.parameters())
    # A later run in this process may have a GPU.
    with pytest.raises(RuntimeError, match=NO_GPU):
        model(input_ids=IDS)


@pytest.mark.usefixtures("_kernel")
def test_a_merged_model_is_compared_on_the_cpu(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, runtime = Settings(model=str(folder)), cpu_runtime()
    with runtime.cleanup:
        # A new adapter changes nothing, so the base is the merged model.
        load_model(settings, runtime)[0].save_pretrained(tmp_path)
    check_merged(settings, tmp_path, folder, IDS.tolist())
    assert "not compared" not in capsys.readouterr().out
