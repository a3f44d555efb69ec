"""Test the sentences that refuse adapters and quantized models as --model."""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL
from tests.runtimes import cpu_runtime
from unsloth_ddp.config.options import Settings
from unsloth_ddp.model.files import check
from unsloth_ddp.model.files.architecture import check_architecture
from unsloth_ddp.model.files.check import check_local_model, check_no_adapter, check_quantization, check_source
from unsloth_ddp.model.loading.load import check_model
from unsloth_ddp.utils.errors import UserError

CPU = cpu_runtime()


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as refused:
        check_local_model(str(folder), safetensors_only=True)
    return str(refused.value)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A folder with an adapter."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/base"}))
    return folder


def test_an_adapter_names_its_base_model_and_how_to_train_on(adapter: Path) -> None:
    said = refusal(adapter)
    assert (
        f"model {adapter} is an adapter for the base model owner/base; give --model owner/base to train a new" in said
    )
    assert (
        "with --resume to go on with its run" in said
        and "or the merged model (`python -m unsloth_ddp.export RUN --to merged`" in said
    )


def test_an_adapter_without_a_base_is_refused_too(adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text("{}")
    assert "a base model that its adapter_config.json does not name; give that base as --model" in refusal(adapter)
    (adapter / "adapter_config.json").write_text("[")
    assert "a base model that its adapter_config.json does not name" in refusal(adapter), "a broken file too"
    check_no_adapter("m", None)


def config(method: str | None) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method} if method else {"load_in_4bit": True}}


@pytest.mark.parametrize(
    ("backend", "method", "found", "sentence"),
    [
        ("transformers", "lora", config("gptq"), r"is quantized already \(gptq\), which this kit does not train with "
            r"backend t"),
        ("unsloth", "qlora", config("awq"), r"\(awq\), .* with --method qlora to load that in 4 bits\."),
        ("transformers", "lora", config("mxfp4"), r"\(mxfp4\), which this kit does not train with backend "
            r"transformers;"),
        ("transformers", "lora", config(None), r"\(bitsandbytes\), and method lora is for 16-bit weights; give "
            r"--method q"),
        ("transformers", "full", config("bitsandbytes"), r"and method full is for 16-bit weights"),
        ("transformers", "qlora", config("bitsandbytes"), None),
        ("unsloth", "lora", config("bitsandbytes"), None),
        ("unsloth", "lora", config("mxfp4"), None),
        ("transformers", "lora", {"quantization_config": None}, None),
        ("transformers", "lora", None, None),
    ],
)  # fmt: skip
def test_quantized_models_are_trained_or_refused(backend: str, method: str, found: Any, sentence: str | None) -> None:
    settings = Settings(model="owner/name", method=method)  # type: ignore[arg-type]
    if sentence is None:
        check_quantization(settings, backend, found)
        return
    with pytest.raises(UserError, match=f"model owner/name {sentence}" if sentence.startswith("is") else sentence):
        check_quantization(settings, backend, found)


@pytest.mark.parametrize("backend", ["transformers", "unsloth"])
def test_fsdp2_refuses_weights_of_8_bits(backend: str) -> None:
    settings = Settings(model="owner/name", method="qlora")
    eight = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}}
    check_quantization(settings, backend, eight, "zero2")
    check_quantization(settings, backend, config("bitsandbytes"), "fsdp2")
    with pytest.raises(
        UserError, match=r"owner/name is quantized to 8 bits .* FSDP2 cannot shard; give the 16-bit model"
    ):
        check_quantization(settings, backend, eight, "fsdp2")


def test_a_quantized_folder_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(DEMO_MODEL, folder)
    whole = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**whole, **config("gptq")}))
    with pytest.raises(UserError, match=r"is quantized already \(gptq\)"):
        check_model(Settings(model=str(folder)), CPU)


def test_a_hub_adapter_is_refused_by_its_config(monkeypatch: pytest.MonkeyPatch, adapter: Path) -> None:
    asked = []

    def download(model: str, name: str, revision: str | None) -> str:
        asked.append((model, name, revision))
        return str(adapter / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(UserError, match="model me/tuned is an adapter for the base model owner/base; give --model"):
        check_source(Settings(model="me/tuned", model_revision="v1"), "transformers")
    assert asked == [("me/tuned", "adapter_config.json", "v1")]


@pytest.mark.parametrize(
    ("changed", "asked", "package"),
    [
        ({"transformers_version": "99.1.0"}, " (its config.json asks for 99.1.0)", "transformers>=99.1.0'"),
        (
            {"transformers_version": "4.50.0.dev0"},
            " (its config.json asks for 4.50.0.dev0)",
            "transformers>{installed}'",
        ),
        ({"transformers_version": None}, "", "transformers>{installed}'"),
    ],
)
def test_a_model_newer_than_transformers_is_refused_with_a_way_to_train_it(
    changed: dict[str, Any], asked: str, package: str, tmp_path: Path
) -> None:
    folder, installed = tmp_path / "model", metadata.version("transformers")
    shutil.copytree(DEMO_MODEL, folder)
    content = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen99"} | changed
    (folder / "config.json").write_text(json.dumps(content))
    assert f"is of type qwen99, which Transformers {installed} does not have{asked}; Unsloth" in refusal(folder)
    assert f"uv run --with '{package.format(installed=installed)} python -m accelerate" in refusal(folder)
    # Code of the model may define it.
    (folder / "config.json").write_text(json.dumps(content | {"auto_map": {"AutoConfig": "code.Config"}}))
    check_local_model(str(folder), safetensors_only=True)


def test_a_newer_model_on_the_hub_is_refused_before_rows_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"config.json": {"model_type": "qwen99"}}
    monkeypatch.setattr(check, "read_model_file", lambda model, name, revision: files.get(name))
    with pytest.raises(UserError, match="model owner/new is of type qwen99"):
        check_source(Settings(model="owner/new"), "unsloth")


def test_every_type_of_the_installed_transformers_is_taken() -> None:
    from transformers import CONFIG_MAPPING

    for kind in CONFIG_MAPPING:
        check_architecture("m", {"model_type": kind})
