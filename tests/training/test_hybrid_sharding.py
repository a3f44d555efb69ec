"""Two copies of a model, each split over two of four ranks: DDP's step, and checkpoints that other layouts resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.common import reload
from tests.conftest import demo_rows, write_jsonl
from tests.jobs import assert_same, copy_until
from tests.ranks import train
from tests.training.test_sharded_saving import STEPS, ends, history
from unsloth_ddp.checkpoints import manifest
from unsloth_ddp.checkpoints.shards import Shards
from unsloth_ddp.model.loading import load

HYBRID = {"UNSLOTH_FSDP2": "1", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "nodes"}
# The largest gradient norm is clipped, in the same way only if the ranks agree on it.
OPTIONS = f"--global_batch_size 8 --max_steps {STEPS} --logging_steps 1 --save_steps 1 --save_total_limit none"
OPTIONS += " --eval_dataset hybrid_rows.jsonl --eval_strategy steps --eval_steps 2 --max_grad_norm 0.5"
OPTIONS += " --drift_check_steps 2 --optim sgd --learning_rate 0.1 --lr_scheduler_type constant --warmup_steps 0"
METHODS = {"lora": "--lora_dropout 0", "full": "--method full"}


def node_of(rank: int) -> dict[str, str]:
    """Two nodes of two processes."""
    return {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": str(rank // 2)}


@pytest.fixture(scope="module")
def run(job, place) -> Any:
    """Train once with each method and layout, and return the folder and what was printed; DDP's ranks do not matter."""
    write_jsonl(place / "hybrid_rows.jsonl", demo_rows()[40:48])
    runs: dict[tuple[str, bool], tuple[Path, str]] = {}

    def train_once(method: str, *, hybrid: bool) -> tuple[Path, str]:
        if (method, hybrid) not in runs:
            name = f"{method}-{'hybrid' if hybrid else 'ddp'}"
            more = {"environ": HYBRID, "environ_of": node_of} if hybrid else {}
            printed = job(f"{OPTIONS} {METHODS[method]}", name, 4 if hybrid else 2, **more).output
            runs[method, hybrid] = place / "outputs" / name, printed
        return runs[method, hybrid]

    return train_once


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    assert len(files) == 1
    return next(iter(files.values()))


# Four processes for each run.
pytestmark = pytest.mark.slow
METHOD = pytest.mark.parametrize("method", ["lora", "full"])


@METHOD
def test_steps_norms_and_losses_are_those_of_ddp(run, method):
    (hybrid, printed), (ddp, _) = run(method, hybrid=True), run(method, hybrid=False)
    assert "fsdp2, 2 copies, each split over 2 processes" in printed
    sharded, expected = weights(hybrid), weights(ddp)
    assert sharded.keys() == expected.keys()
    for name in sharded:
        assert torch.allclose(sharded[name], expected[name], rtol=0, atol=1e-6), name
    for line, other in zip(history(hybrid), history(ddp), strict=True):
        assert line.keys() == other.keys()
        for key in {"loss", "grad_norm", "eval_loss"} & line.keys():
            assert line[key] == pytest.approx(other[key], rel=1e-5), key


@METHOD
def test_a_checkpoint_holds_one_copy(run, method):
    folder, _ = run(method, hybrid=True)
    checkpoint = folder / f"checkpoint-{STEPS}"
    described = manifest.verify(checkpoint)
    assert described.run["copies"] == 2
    parts = [path.name for path in sorted((checkpoint / "weights").iterdir())]
    assert parts == ["shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors"]
    shards = Shards(checkpoint / "weights")
    shards_read = [load_file(checkpoint / "weights" / part) for part in parts]
    for name in shards.names:
        assert sum(part[name].numel() for part in shards_read if name in part) == shards.shape(name).numel(), name


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_run_resumes_bit_identically(run, job, method):
    folder, _ = run(method, hybrid=True)
    expected = ends(folder)
    resumed = copy_until(folder, 2, f"{folder.name}-killed")
    printed = job(f"{OPTIONS} {METHODS[method]}", resumed.name, 4, environ=HYBRID, environ_of=node_of).output
    assert f"Resuming from {resumed}/checkpoint-2, step 2;" in printed
    assert_same(ends(resumed), expected)


@pytest.mark.parametrize("method", METHODS)
def test_fewer_processes_resume_with_plain_fsdp2(run, job, method):
    folder, _ = run(method, hybrid=True)
    resumed = copy_until(folder, 2, f"{folder.name}-plain")
    printed = job(f"{OPTIONS} {METHODS[method]}", resumed.name, 2, environ={"UNSLOTH_FSDP2": "1"}).output
    assert "world_size 4 -> 2" in printed
    assert "copies 2 -> 1" in printed
    continued, expected = weights(resumed), weights(folder)
    for name in continued:
        assert torch.allclose(continued[name], expected[name], rtol=0, atol=1e-6), name


@METHOD
def test_the_result_has_the_loss_of_the_run_in_plain_transformers(run, place, monkeypatch, capsys, method):
    folder, _ = run(method, hybrid=True)
    monkeypatch.chdir(place)
    capsys.readouterr()
    reload.main(folder)
    loaded = json.loads(capsys.readouterr().out.splitlines()[-1])["eval_loss"]
    assert loaded == pytest.approx(json.loads((folder / "summary.json").read_text())["eval_loss"], rel=1e-5)


def train_loaded_whole(argv: list[str], cwd: str) -> None:
    """train_ddp.py with a model that every rank loads whole, as Unsloth does; accelerate splits it."""
    load.loads_in_shards = lambda *_, **__: False
    train(argv, cwd)


@pytest.mark.parametrize("method", METHODS)
def test_a_model_that_was_loaded_whole_is_split_in_the_same_way(run, job, method):
    folder, _ = run(method, hybrid=True)
    whole = folder.parent / f"{folder.name}-whole"
    more = {"environ": HYBRID, "environ_of": node_of, "target": train_loaded_whole}
    job(f"{OPTIONS} {METHODS[method]}", whole.name, 4, **more)
    split, expected = ends(whole), ends(folder)
    assert split["shards"].keys() == expected["shards"].keys()
    for name, tensor in weights(whole).items():
        assert torch.allclose(tensor, weights(folder)[name], rtol=0, atol=1e-6), name
