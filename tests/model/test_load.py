"""Test what is refused before and while a model is loaded, and the names of modules with an adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

from tests.conftest import DEMO_MODEL
from tests.runtimes import cpu_runtime
from unsloth_ddp.config.options import Settings
from unsloth_ddp.model.adapter.lora import check_module_names
from unsloth_ddp.model.files.check import check_complete, check_folder
from unsloth_ddp.model.loading.classes import read_config
from unsloth_ddp.model.loading.load import (
    check_class,
    check_model,
    check_positions,
    describe_load_error,
    is_model_file_error,
    load_model,
    load_tokenizer,
    stop_at,
)
from unsloth_ddp.sizing.count import read_model_shape
from unsloth_ddp.utils.errors import UserError

CPU = cpu_runtime()


@pytest.fixture(scope="module")
def model() -> Any:
    """Return a Llama without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
        )


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"lora_target_modules": ["q_proj", "v_proj"], "lora_modules_to_save": ["embed_tokens", "lm_head"]},
        {"lora_target_modules": ["self_attn.q_proj", "model.layers.0.mlp.up_proj"]},
        {"lora_target_modules": ["all-linear", "model.embed_tokens"]},
        {"lora_modules_to_save": ["model.embed_tokens"]},
    ],
)
def test_names_of_modules_are_taken(given: dict[str, list[str]], model: Any) -> None:
    check_module_names(Settings(model="m", **given), model)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"lora_modules_to_save": ["nosuch"]},
            "lora_modules_to_save nosuch is not a module of m; it has down_proj, embed_tokens, gate_proj, "
            "input_layernorm, ",
        ),
        ({"lora_target_modules": ["q_proj", "v_prj"]}, "lora_target_modules v_prj is not a module of m; did you mean "
            "v_proj?"),
        ({"lora_target_modules": ["proj"]}, "lora_target_modules proj is not a module of m; did you mean "),
        ({"lora_target_modules": ["q_proj,v_proj"]}, "q_proj,v_proj is not a module of m; separate names by spaces "
            "(q_proj v_proj)."),
        ({"lora_target_modules": [".*_proj"]}, "lora_target_modules .*_proj is not a module of m; did you mean "),
        ({"lora_target_modules": ["q_proj", "lm_head"]}, "lora_target_modules lm_head is the output head of m, whose "
            "weight "),
        ({"lora_modules_to_save": ["all-linear"]}, "all-linear is not a module of m; all-linear is for "
            "lora_target_modules."),
    ],
)  # fmt: skip
def test_other_names_are_refused_with_what_is_near(given: dict[str, list[str]], sentence: str, model: Any) -> None:
    with pytest.raises(UserError) as refused:
        check_module_names(Settings(model="m", **given), model)
    assert sentence in str(refused.value)


def test_the_names_are_looked_at_when_a_model_is_loaded() -> None:
    settings = Settings(model=str(DEMO_MODEL), lora_modules_to_save=["nosuch"])
    with pytest.raises(UserError, match="lora_modules_to_save nosuch is not a module of"):
        load_model(settings, CPU)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "pytorch_model.bin"])
def test_a_git_lfs_pointer_is_called_what_it_is(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(DEMO_MODEL, folder)
    if name.endswith("bin"):
        (folder / "model.safetensors").unlink()
    (folder / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1192135096\n")
    with pytest.raises(UserError, match=rf"{name} is a Git LFS pointer, not the file itself; run git lfs pull in"):
        check_folder(folder, safetensors_only=False)


def test_a_missing_flash_attn_is_told_with_what_helps() -> None:
    said = describe_load_error(ImportError("FlashAttention2 has been toggled on, but it cannot be used: no package."))
    assert said.endswith(
        "no package. What helps: use --attn_implementation sdpa, or install the flash-attn wheel for "
        "exactly this PyTorch, CUDA and Python."
    )


@pytest.mark.parametrize("load", [load_tokenizer, read_model_shape])
def test_without_a_network_it_is_said_how_to_bring_the_model(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match=r"What helps: download it once where there is a network \(uv run hf download NAME\)"
    ):
        load(Settings(model="nobody/no-such-model"))


def tiny_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, n_positions=32, vocab_size=40))


def test_rows_longer_than_the_positions_of_a_model_are_refused() -> None:
    settings, gpt2 = Settings(model="m", dataset=["d"]), tiny_gpt2()
    check_positions(settings, gpt2, 32)
    with pytest.raises(
        UserError, match="up to 33 tokens are longer than the 32 positions of model m; use --max_length 32"
    ):
        check_positions(settings, gpt2, 33)


def test_positions_that_begin_later_do_not_make_more_of_them() -> None:
    sizes = {"hidden_size": 8, "ffn_dim": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "word_embed_proj_dim": 8}
    opt = AutoModelForCausalLM.from_config(OPTConfig(**sizes, max_position_embeddings=32, vocab_size=40))
    with pytest.raises(IndexError):
        opt(torch.ones((1, 33), dtype=torch.int64))
    with pytest.raises(UserError, match="longer than the 32 positions of model m"):
        check_positions(Settings(model="m", dataset=["d"]), opt, 33)


def test_a_copied_table_of_tokens_is_no_table_of_positions() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    llama = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, vocab_size=32, max_position_embeddings=32))
    adapted = get_peft_model(llama, LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"]))
    check_positions(Settings(model="m", dataset=["d"]), adapted, 33)


def test_rows_beyond_what_rotary_positions_were_made_for_are_said(model: Any, capsys: pytest.CaptureFixture) -> None:
    settings, known = Settings(model="m", dataset=["d"]), model.config.max_position_embeddings
    check_positions(settings, model, known)
    assert capsys.readouterr().out == ""
    check_positions(settings, model, known + 1)
    assert (
        f"longer than the {known:,} positions that model m was trained for; use --max_length {known}"
        in capsys.readouterr().out
    )


def test_a_hub_id_needs_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a network the Hub would be asked for most of a minute.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    check_model(Settings(model="owner/name", dataset=["d"]), CPU)
    with pytest.raises(UserError, match=r"model \./name: there is no such folder"):
        check_model(Settings(model="./name", dataset=["d"]), CPU)


@pytest.mark.parametrize(
    ("error", "files"),
    [
        (OSError("no such repository"), True), (KeyError("qwen9"), True), (NotImplementedError("no head"), True),
        (RuntimeError("You set `ignore_mismatched_sizes` to `False`"), True),
        # Of the machine, whose causes are explained elsewhere.
        (RuntimeError("NCCL error"), False), (torch.OutOfMemoryError("CUDA out of memory"), False),
        (MemoryError(), False), (AssertionError("Torch not compiled with CUDA enabled"), False),
    ],
)  # fmt: skip
def test_errors_of_the_files_are_told_from_those_of_the_machine(error: Exception, files: bool) -> None:
    assert is_model_file_error(error) is files


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model_type": "nosuch"}, "model .* cannot be loaded: .*nosuch"),
        (
            {"intermediate_size": 8},
            r"model .* cannot be loaded: the sizes of its weights differ from its config\.json",
        ),
    ],
)
def test_a_model_that_cannot_be_loaded_is_said(changed: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(UserError, match=reason):
        load_model(Settings(model=str(folder)), CPU)


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(DEMO_MODEL, folder)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists():
            given = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps({key: value for key, value in given.items() if key != "eos_token"}))
    with pytest.raises(UserError, match="its tokenizer has no EOS token, so rows would have no end; set eos_token in"):
        load_tokenizer(Settings(model=str(folder)))


@pytest.mark.parametrize(
    ("known", "found", "stops"),
    [
        (1, [7], [1, 7]),
        ([1, 2], [7, 8], [1, 2, 7, 8]),
        (None, [7], [7]),
        ([1, 7], [7], [1, 7]),
        (7, [7], 7),
        (1, [], 1),
    ],
)
def test_generation_stops_at_the_tokens_that_end_the_rows(known: Any, found: list[int], stops: Any) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=known))
    before = known if isinstance(known, list) else [known]
    assert stop_at(model, found) == [token for token in found if token not in before]
    assert model.generation_config.eos_token_id == stops


def test_a_mistyped_folder_is_said_beside_what_the_hub_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    monkeypatch.setattr("unsloth_ddp.model.loading.load.download_model", lambda *_: None)

    def absent(*_: Any) -> Any:
        raise OSError("the Hub has no such repository")

    for name in ("read_config", "_load_transformers"):
        monkeypatch.setattr(f"unsloth_ddp.model.loading.load.{name}", absent)
    with pytest.raises(UserError, match="model outputs/RUM is not a folder here, and as a Hub id it cannot be loaded"):
        load_model(Settings(model="outputs/RUM", dataset=["d"]), CPU)
    with pytest.raises(UserError, match="model RUM is not a folder here, and as a Hub id it cannot be loaded"):
        load_model(Settings(model="RUM", dataset=["d"]), CPU)


def test_one_weight_that_no_file_holds_is_told_in_the_singular() -> None:
    with pytest.raises(
        UserError, match=r"its files lack 1 weight \(the first: lm_head.weight\), which would be random"
    ):
        check_complete("m", ["lm_head.weight"], [])


@pytest.mark.parametrize(
    "entry",
    [
        {"attn_implementation": "evil/kernel"},
        {"_attn_implementation": {"text_config": "evil/kernel@main:f"}},
        {"text_config": {"_attn_implementation": "paged|evil/kernel"}},
        {"experts_implementation": "evil/kernel"},
    ],
)
def test_a_config_that_names_a_kernel_on_the_hub_is_refused_unless_code_is_trusted(entry: dict, tmp_path: Path) -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"_attn_implementation": "sdpa"}))
    assert read_config(Settings(model=str(tmp_path)))._attn_implementation == "sdpa"
    (tmp_path / "config.json").write_text(json.dumps(config | entry))
    with pytest.raises(UserError, match=r"names code on the Hub .*evil/kernel.*--trust_remote_code"):
        check_class(Settings(model=str(tmp_path)))
    assert read_config(Settings(model=str(tmp_path), trust_remote_code=True)).model_type == "llama"


def test_the_advice_for_code_of_a_folder_names_no_address(tmp_path: Path) -> None:
    config = {"model_type": "unknown", "auto_map": {"AutoConfig": "configuration_x.X"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"hf\.co/") as refused:
        read_config(Settings(model=str(tmp_path)))
    said = describe_load_error(refused.value)
    assert "contains custom code" in said and "then give --trust_remote_code" in said and "hf.co" not in said
