"""Test that mixtures of experts train alike on one process and two, in every method of a CPU, and resume exactly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.jobs import assert_same, copy_until, ends
from tests.mixtures import MIXTURES, make_mixture, save_mixture
from tests.ranks import run_ranks, train
from unsloth_ddp.config.options import Settings
from unsloth_ddp.model.adapter.lora import lora_config

EXPERTS = "--lora_target_parameters all-experts"


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of the models; the config of Qwen's asks for the balancing loss."""
    folder = tmp_path_factory.mktemp("mixtures")
    options = {"qwen3_moe": {"output_router_logits": True, "router_aux_loss_coef": 10.0}, "gpt_oss": {}}
    return {kind: save_mixture(kind, folder / kind, **options[kind]) for kind in MIXTURES}


@pytest.fixture(scope="module")
def train_mixture(tmp_path_factory, mixtures, uneven_rows) -> Callable[..., tuple[Path, str]]:
    """Run train_ddp.py on a mixture; returns the run's folder and what was printed."""
    cwd = tmp_path_factory.mktemp("jobs")

    def run(kind: str, options: str, name: str, ranks: int = 1, **more: Any) -> tuple[Path, str]:
        argv = (
            f"--model {mixtures[kind]} --dataset {uneven_rows} --run_name {name} --max_length 64 --report_to none"
        ).split()
        argv += ["--gradient_checkpointing", "none", "--global_batch_size", "4", *options.split()]
        result = run_ranks(ranks, train, argv, str(cwd), folder=cwd / f"{name}.out", **more).check()
        return cwd / "outputs" / name, " ".join(result.output.split())

    return run


def update_difference(run: Path, other: Path, start: Path | None = None) -> float:
    """The largest difference of two runs' weights, relative to how far the largest moved."""
    first, second = (load_file(next(folder.glob("*model.safetensors"))) for folder in (run, other))
    assert first.keys() == second.keys()
    initial = load_file(start / "model.safetensors") if start else {}
    moved = max((value - initial.get(name, 0)).abs().max().item() for name, value in first.items())
    assert moved > 1e-3
    return max((first[name] - second[name]).abs().max().item() for name in first) / moved


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        # Without adapted experts, and gpt_oss in full: tests/architectures.
        ("gpt_oss", EXPERTS),
        pytest.param("qwen3_moe", "--method full", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", EXPERTS, marks=pytest.mark.slow),
    ],
)
def test_two_processes_take_the_step_of_one(train_mixture, mixtures, kind: str, options: str) -> None:
    sgd = (
        f"{options} --optim sgd --learning_rate 0.5 --max_steps 2 --save_strategy no --logging_steps 1 "
        "--max_grad_norm 0"
    )
    name = f"{kind}-{'full' if 'full' in options else 'experts'}"
    whole, printed = train_mixture(kind, f"{sgd} --per_device_train_batch_size 4", f"{name}-1")
    # One row at once: of the eight experts several get no token, and gpt_oss has one that never does.
    parts, _ = train_mixture(
        kind, f"{sgd} --per_device_train_batch_size 1 --gradient_checkpointing torch", f"{name}-2", ranks=2
    )
    assert update_difference(whole, parts, mixtures[kind] if "full" in options else None) < 1e-5
    losses = [json.loads((folder / "summary.json").read_text())["train_loss"] for folder in (whole, parts)]
    # The balancing loss, at ten times its value, would be far above the loss of the tokens.
    assert losses[1] == pytest.approx(losses[0], rel=1e-6) and losses[0] < 9
    phrases = {EXPERTS: "experts adapted (mlp.experts.down_proj,"}
    assert phrases.get(options, "experts trained; the balancing loss is left out") in printed


@pytest.mark.slow
@pytest.mark.parametrize("options", ["--method full", EXPERTS])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_experts_that_fsdp2_shards_take_the_step_of_ddp(train_mixture, mixtures, kind: str, options: str) -> None:
    """Of the model each rank reads its own experts, and the result has the files of an unsharded run."""
    sgd = f"{options} --optim sgd --learning_rate 0.5 --max_steps 2 --save_strategy no --max_grad_norm 0"
    name = f"sharded-{kind}-{'full' if 'full' in options else 'experts'}"
    whole, _ = train_mixture(kind, sgd, f"{name}-ddp", ranks=2)
    parts, printed = train_mixture(kind, sgd, f"{name}-fsdp2", ranks=2, environ={"UNSLOTH_FSDP2": "1"})
    assert "sharding fsdp2" in printed
    assert update_difference(whole, parts, mixtures[kind] if "full" in options else None) < 1e-5
    if "full" in options:
        _, loading = AutoModelForCausalLM.from_pretrained(parts, output_loading_info=True)
        assert not loading["missing_keys"] and not loading["unexpected_keys"]


@pytest.mark.slow
def test_packs_take_the_step_of_single_rows_or_are_refused(train_mixture, mixtures, uneven_rows, tmp_path) -> None:
    sgd = "--optim sgd --learning_rate 0.5 --num_train_epochs 1 --save_strategy no --max_grad_norm 0"
    packed, printed = train_mixture("qwen3_moe", f"{sgd} --packing on --global_batch_size 4", "packed", ranks=2)
    packs = json.loads((packed / "summary.json").read_text())["packs"]
    assert "packing on" in printed and 4 < packs <= 8
    # All packs in one step hold all rows.
    one_step = f"{sgd} --max_steps 1"
    packed, _ = train_mixture("qwen3_moe", f"{one_step} --packing on --global_batch_size {packs}", "packed-whole")
    padded, _ = train_mixture("qwen3_moe", f"{one_step} --packing off --global_batch_size 13", "padded-whole")
    assert update_difference(packed, padded) < 1e-5
    argv = f"--model {mixtures['gpt_oss']} --dataset {uneven_rows} --packing on --run_name no --max_length 64".split()
    refused = run_ranks(1, train, argv, str(tmp_path), folder=tmp_path / "out")
    assert refused.codes == [2]
    assert "the loss of a row depends on the row before it" in " ".join(refused.output.split())


@pytest.mark.slow
def test_a_resumed_run_with_adapted_experts_ends_like_an_uninterrupted_one(train_mixture, mixtures) -> None:
    options = (
        f"{EXPERTS} --merge --max_steps 4 --save_steps 2 --save_total_limit none --learning_rate 0.01 "
        "--gradient_checkpointing torch"
    )
    whole, _ = train_mixture("qwen3_moe", options, "whole", ranks=2)
    killed = copy_until(whole, 2, "killed")
    shutil.rmtree(killed / "merged")
    train_mixture("qwen3_moe", options, "killed", ranks=2)
    assert_same(ends(killed, 4), ends(whole, 4))
    assert all(torch.isfinite(value).all() for value in ends(whole, 4)["weights"].values())
    # Plain Transformers reads the merged model, in bf16, as PEFT reads the adapter.
    ids = torch.arange(16)[None]
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(mixtures["qwen3_moe"])
        plain = base(ids).logits
        adapted = PeftModel.from_pretrained(base, whole)(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(whole / "merged", dtype=torch.float32)(ids).logits
    assert (merged - adapted).norm() < 0.02 * adapted.norm() < (plain - adapted).norm()


def compare_sharded_gradients() -> None:
    """Compare the gradients of two sharded ranks, a row each, with those of both rows on one."""
    import torch.distributed as dist
    from peft import get_peft_model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    rows = torch.arange(100, 140).reshape(2, 20)

    def adapted(kind: str) -> Any:
        model = make_mixture(kind)
        settings = Settings(model="m", lora_r=2, lora_target_parameters=["all-experts"])
        model = get_peft_model(model, lora_config(settings, model)).train()
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        return model

    for kind in MIXTURES:
        whole, parts = adapted(kind), adapted(kind)
        for row in rows:
            whole(input_ids=row[None], labels=row[None], use_cache=False).loss.backward()
        parts.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        parts.enable_input_require_grads()
        for layer in parts.get_base_model().model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(parts, mesh=mesh)
        rank_rows = rows[dist.get_rank()][None]
        parts(input_ids=rank_rows, labels=rank_rows, use_cache=False).loss.backward()
        expected = {name: p.grad for name, p in whole.named_parameters() if p.requires_grad}
        for name, parameter in parts.named_parameters():
            if parameter.requires_grad:
                # FSDP2 averages.
                gradient = parameter.grad.full_tensor() * 2
                torch.testing.assert_close(
                    gradient, expected[name], rtol=1e-4, atol=1e-6 * expected[name].abs().max().item()
                )
                assert gradient.abs().max() > 0
    dist.destroy_process_group()


def test_fsdp2_shards_adapted_experts_without_changing_gradients(tmp_path) -> None:
    run_ranks(2, compare_sharded_gradients, folder=tmp_path).check()
