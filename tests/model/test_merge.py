"""Merging weight by weight gives PEFT's merged model in a bounded part of its memory; PEFT merges the rest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from tests.conftest import DEMO_MODEL
from tests.peak_memory import PeakMemory
from unsloth_ddp.config.options import Settings
from unsloth_ddp.model.adapter import merge as module
from unsloth_ddp.model.adapter.merge import plan_merge, save_merged
from unsloth_ddp.model.files.find import safetensors_files
from unsloth_ddp.utils.errors import UserError

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 259,
}


def make_base(folder: Path, shard: str = "20KB", **options: Any) -> Path:
    """A small random model in several files."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **options}))
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder, max_shard_size=shard)
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(folder)
    return folder


def make_adapter(base: Path, folder: Path, **options: Any) -> Path:
    """An adapter of which every weight is random."""
    model = AutoModelForCausalLM.from_pretrained(base)
    config: dict[str, Any] = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**{**config, **options}))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def settings(base: Path) -> Settings:
    """Settings of a run on this base model."""
    return Settings(model=str(base), dataset=["d"])


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a model's folder."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"target_modules": ["q_proj", "down_proj"]}])
@pytest.mark.parametrize("tied", [False, True])
def test_it_gives_the_model_that_peft_merges(tmp_path, monkeypatch, options, tied):
    base = make_base(tmp_path / "base", tie_word_embeddings=tied)
    adapter = make_adapter(base, tmp_path / "adapter", **options)
    plan = plan_merge(settings(base), adapter)
    assert plan is not None
    assert len(plan.files) > 2
    save_merged(settings(base), adapter, tmp_path / "ours", [2, 7])
    monkeypatch.setattr(module, "plan_merge", lambda *_: None)
    save_merged(settings(base), adapter, tmp_path / "peft", [2, 7])
    ours, theirs = weights_of(tmp_path / "ours"), weights_of(tmp_path / "peft")
    assert ours.keys() == theirs.keys()
    start = weights_of(base)
    assert any(not torch.allclose(ours[name].float(), start[name], rtol=0.1) for name in ours)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype == torch.bfloat16
        # PEFT adds to weights that are rounded already, and rounds once more.
        torch.testing.assert_close(tensor, theirs[name], rtol=2**-7, atol=2e-3)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / "ours" / name).read_text()) == json.loads((tmp_path / "peft" / name).read_text())
    ids = torch.arange(12)[None]
    with torch.no_grad():
        loaded, expected = (
            AutoModelForCausalLM.from_pretrained(tmp_path / name)(input_ids=ids, labels=ids).loss.item()
            for name in ("ours", "peft")
        )
    assert loaded == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize(("double", "storage"), [(True, torch.uint8), (False, torch.uint8), (True, torch.bfloat16)])
def test_4_bit_weights_are_unpacked_one_by_one(tmp_path, monkeypatch, double, storage):
    kind = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_quant_storage=storage,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    whole, base = make_base(tmp_path / "whole"), tmp_path / "base"
    adapter = make_adapter(whole, tmp_path / "adapter")
    AutoModelForCausalLM.from_pretrained(whole, quantization_config=kind, dtype=torch.bfloat16).save_pretrained(
        base, max_shard_size="1KB"
    )
    index = json.loads((base / "model.safetensors.index.json").read_text())["weight_map"]
    constants = [name for name in index if ".weight." in name]
    assert len(set(index.values())) > 2
    assert any(index[name] != index[name.partition(".weight.")[0] + ".weight"] for name in constants)
    plan = plan_merge(settings(base), adapter)
    assert plan is not None and len(plan.changes) == 14
    save_merged(settings(base), adapter, tmp_path / "ours", [2, 7])
    monkeypatch.setattr(module, "plan_merge", lambda *_: None)
    save_merged(settings(base), adapter, tmp_path / "peft", [2, 7])
    ours, theirs = weights_of(tmp_path / "ours"), weights_of(tmp_path / "peft")
    assert {name: tensor.shape for name, tensor in ours.items()} == {n: t.shape for n, t in theirs.items()}
    for name, tensor in ours.items():
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor, theirs[name], rtol=2**-7, atol=4e-3)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "ours" / name).read_text()) == json.loads((tmp_path / "peft" / name).read_text())
    _, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]


def test_several_files_have_an_index_that_lists_every_weight(tmp_path, monkeypatch):
    base = make_base(tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "adapter")
    monkeypatch.setattr(module.ModelFiles.__init__, "__defaults__", ("model", 30_000))
    save_merged(settings(base), adapter, tmp_path / "merged", [])
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "merged").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "merged" / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118
    _, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"rank_pattern": {"q_proj": 2}},
        {"init_lora_weights": "pissa"},
        {"bias": "all"},
    ],
)
def test_what_is_not_plain_lora_is_left_to_peft(tmp_path, options):
    base = make_base(tmp_path / "base")
    assert plan_merge(settings(base), make_adapter(base, tmp_path / "adapter", **options)) is None


def test_the_head_keeps_its_weight_where_only_the_embedding_that_it_shares_is_adapted(tmp_path):
    base = make_base(tmp_path / "base", tie_word_embeddings=True)
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["embed_tokens"])
    save_merged(settings(base), adapter, tmp_path / "merged", [2])
    ids = torch.arange(12)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        start = AutoModelForCausalLM.from_pretrained(base)
        before = start(input_ids=ids).logits
        expected = peft.PeftModel.from_pretrained(start, adapter)(input_ids=ids).logits
        found = merged(input_ids=ids).logits
    assert (expected - before).abs().max() > 10 * (expected - found).abs().max()
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_a_base_whose_files_do_not_hold_the_adapted_weights_is_left_to_peft(tmp_path):
    base = make_base(tmp_path / "base", shard="1GB")
    adapter = make_adapter(base, tmp_path / "adapter")
    assert plan_merge(settings(base), adapter) is not None
    weights = load_file(base / "model.safetensors")
    save_file({f"other.{name}": tensor for name, tensor in weights.items()}, base / "model.safetensors")
    assert plan_merge(settings(base), adapter) is None
    (base / "model.safetensors").unlink()
    assert plan_merge(settings(base), adapter) is None
    config = json.loads((base / "config.json").read_text())
    save_file(weights, base / "model.safetensors")
    quantized = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (base / "config.json").write_text(json.dumps({**config, **quantized}))
    assert plan_merge(settings(base), adapter) is None


def test_a_base_of_8_bit_blocks_is_unpacked_for_good(tmp_path):
    """Transformers would write the merged weights in 8 bits again, with scales that nothing reads."""
    base = make_base(tmp_path / "base", shard="1GB")
    adapter = make_adapter(base, tmp_path / "adapter")
    save_merged(settings(base), adapter, tmp_path / "wanted", [2])
    weights, packed = load_file(base / "model.safetensors"), {}
    for name, tensor in weights.items():
        if not name.endswith("proj.weight"):
            packed[name] = tensor
            continue
        rows, columns = tensor.shape
        blocks = tensor.reshape(rows // 32, 32, columns // 32, 32)
        scale = blocks.abs().amax((1, 3)) / 448
        packed[name] = (blocks / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
        packed[f"{name}_scale_inv"] = scale
    save_file(packed, base / "model.safetensors", {"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    kind = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}}
    (base / "config.json").write_text(json.dumps({**config, **kind}))
    save_merged(settings(base), adapter, tmp_path / "merged", [2])
    found, wanted = weights_of(tmp_path / "merged"), weights_of(tmp_path / "wanted")
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.dtype == torch.bfloat16
        assert (tensor.float() - wanted[name].float()).norm() < 0.05 * wanted[name].float().norm(), name


@pytest.mark.parametrize("parts", [("lora_A",), ("lora_A", "lora_B")])
def test_an_adapter_that_lacks_a_module_which_its_config_names_is_refused(tmp_path, parts):
    base = make_base(tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "adapter")
    weights = load_file(adapter / "adapter_model.safetensors")
    lacking = {
        name: tensor
        for name, tensor in weights.items()
        if not ("layers.1.mlp.up_proj" in name and any(part in name for part in parts))
    }
    assert len(lacking) == len(weights) - len(parts)
    save_file(lacking, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"lacks \d of its \d+ weights \(the first: .*layers.1.mlp.up_proj.lora_A"):
        save_merged(settings(base), adapter, tmp_path / "merged", [2])


def test_packed_weights_of_other_names_than_the_models_are_left_to_peft(tmp_path):
    base = make_base(tmp_path / "base", shard="1GB")
    adapter = make_adapter(base, tmp_path / "adapter")
    config = json.loads((base / "config.json").read_text())
    kind = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (base / "config.json").write_text(json.dumps({**config, **kind}))
    weights = load_file(base / "model.safetensors")
    expert = "model.layers.0.mlp.experts.0.up_proj.weight"
    packed = {expert: torch.zeros(8, 1, dtype=torch.uint8), f"{expert}.quant_state.bitsandbytes__nf4": torch.zeros(1)}
    assert plan_merge(settings(base), adapter) is not None
    save_file({**weights, **packed}, base / "model.safetensors")
    assert plan_merge(settings(base), adapter) is None


def test_a_single_file_counts_beside_an_index_as_it_does_to_transformers(tmp_path):
    base = make_base(tmp_path / "base")
    assert len(safetensors_files(base)) > 1
    weights = {name: tensor + 1 for name, tensor in weights_of(base).items()}
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    assert safetensors_files(base) == [base / "model.safetensors"]
    loaded = AutoModelForCausalLM.from_pretrained(base).state_dict()
    torch.testing.assert_close(loaded["model.norm.weight"], weights["model.norm.weight"])


@pytest.mark.slow
def test_it_holds_a_small_part_of_a_large_model(tmp_path):
    """300 MB in files of 20 MB, of which one weight is 4 MB."""
    base = make_base(tmp_path / "base")
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 10, "vocab_size": 500}
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes}))
    # Random numbers take longer than all the rest.
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    for path in base.glob("model*"):
        path.unlink()
    model.save_pretrained(base, max_shard_size="20MB")
    del model
    adapter = make_adapter(base, tmp_path / "adapter")
    total = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    assert total > 290e6
    with PeakMemory() as peak:
        save_merged(settings(base), adapter, tmp_path / "merged", [])
    shutil.rmtree(base)
    assert peak.grown < total / 3
