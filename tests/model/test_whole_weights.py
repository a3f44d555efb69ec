"""A sharded model is written as save_pretrained would write it, without a process that holds the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.peak_memory import PeakMemory
from tests.ranks import run_ranks
from unsloth_ddp.checkpoints.sharded_state import named_tensors, save_optimizer, save_weights
from unsloth_ddp.distributed.ranks import ranks_from_environment
from unsloth_ddp.model.files.whole_weights import by_layer, gathered, saved_tensors, write_model

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 61,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
MODELS: dict[str, Callable[[], Any]] = {
    "untied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "experts": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS)),
}
LARGE = {**SIZES, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 1000}


def shard(model: Any) -> None:
    """Split a model over the ranks, as accelerate does."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard([model.model.norm, model.model.embed_tokens, model.lm_head], reshard_after_forward=False)
    fully_shard(model)


def write(folder: Path, model: Any, rank: int, **options: Any) -> None:
    """Write a model from all ranks."""
    tensors = named_tensors(model)
    folder.mkdir(exist_ok=True)
    write_model(
        model,
        list(saved_tensors(model, tensors)),
        lambda name: gathered(tensors[name]),
        folder if rank == 0 else None,
        lambda write: write(),
        **options,
    )


def write_as_save_pretrained(folder: str) -> None:
    """Write every model of MODELS in both ways."""
    ranks = ranks_from_environment()
    torch.distributed.init_process_group("gloo")
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make()
        if ranks.is_main:
            model.save_pretrained(Path(folder, f"{name}-whole"))
        torch.distributed.barrier()
        shard(model)
        write(Path(folder, name), model, ranks.rank, file_bytes=20_000)
    torch.distributed.destroy_process_group()


def write_with_a_failure(folder: str) -> None:
    """Write a model whose folder is not there in the only rank that writes; no rank waits for it."""
    ranks = ranks_from_environment()
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = MODELS["untied"]()
    shard(model)
    failures: list[Exception] = []

    def attempt(work: Callable[[], Any]) -> bool:
        try:
            work()
        except OSError as error:
            failures.append(error)
        return not failures

    tensors = named_tensors(model)
    missing = Path(folder) / "missing"
    write_model(model, list(tensors), lambda name: gathered(tensors[name]), missing if ranks.is_main else None, attempt)
    assert [type(error) for error in failures] == [FileNotFoundError] * ranks.is_main
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def save_a_large_model(folder: str) -> None:
    """Save 200 MB of weights and twice as much of optimizer, in shards and whole; bound what each way needs."""
    ranks = ranks_from_environment()
    torch.distributed.init_process_group("gloo")
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(LlamaConfig(**LARGE))
    # Random numbers take longer than all the rest.
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert total > 200e6
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    path = Path(folder)
    with PeakMemory() as peak:
        save_weights(path, model, ranks.rank, ranks.world_size)
        save_optimizer(path, model, optimizer, ranks.rank, ranks.world_size, lambda work: work())
    assert peak.grown < total / 10, f"{peak.grown / 1e6:.0f} MB for shards"
    torch.distributed.barrier()
    with PeakMemory() as peak:
        write(path / "whole", model, ranks.rank)
    # One layer of eight, one weight on its way, and gloo's own copies of it.
    assert peak.grown < total / 3, f"{peak.grown / 1e6:.0f} MB for the whole model"
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model of MODELS, written from two ranks."""
    folder = tmp_path_factory.mktemp("written")
    run_ranks(2, write_as_save_pretrained, str(folder), folder=folder / "out").check()
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_names_and_numbers_are_those_of_save_pretrained(written, name):
    expected = load_file(written / f"{name}-whole" / "model.safetensors")
    files = sorted((written / name).glob("*.safetensors"))
    assert len(files) > 2
    found = {key: tensor for path in files for key, tensor in load_file(path).items()}
    assert sum(len(load_file(path)) for path in files) == len(found)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)
    for path in (written / f"{name}-whole").glob("*.json"):
        (written / name / path.name).write_bytes(path.read_bytes())
    model, loading = AutoModelForCausalLM.from_pretrained(written / name, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    whole = AutoModelForCausalLM.from_pretrained(written / f"{name}-whole")
    ids = torch.arange(20)[None]
    assert torch.equal(model(input_ids=ids).logits, whole(input_ids=ids).logits)


def test_a_failed_write_leaves_no_rank_waiting_and_no_file(tmp_path):
    run_ranks(2, write_with_a_failure, str(tmp_path), folder=tmp_path / "out").check()
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.slow
def test_no_process_holds_the_whole_model(tmp_path):
    run_ranks(2, save_a_large_model, str(tmp_path), folder=tmp_path / "out").check()


def test_weights_are_grouped_by_layer():
    names = ["embed.weight", "model.layers.0.a", "model.layers.1.a", "model.layers.0.b.2.c", "norm.weight"]
    assert list(by_layer(names)) == [
        ["embed.weight"], ["model.layers.0.a", "model.layers.0.b.2.c"], ["model.layers.1.a"], ["norm.weight"]
    ]  # fmt: skip
