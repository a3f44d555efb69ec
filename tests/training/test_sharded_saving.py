"""FSDP2 runs on the CPU: what they save, that they resume exactly, and on another number of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.common import reload
from tests.checkpoints.test_write_errors import FINAL, train_with_faults
from tests.conftest import demo_rows, write_jsonl
from tests.jobs import TIMINGS, assert_same, copy_until, manifest_steps
from unsloth_ddp.checkpoints import manifest
from unsloth_ddp.checkpoints.shards import Shards
from unsloth_ddp.export.merged import write_merged
from unsloth_ddp.run.result import find_result
from unsloth_ddp.utils.errors import UserError

FSDP2 = {"UNSLOTH_FSDP2": "1"}
STEPS = 4
OPTIONS = (
    "--global_batch_size 4 --max_steps 4 --logging_steps 1 --save_steps 1 --save_total_limit none "
    "--eval_dataset held_out.jsonl"
)
# After an evaluation FSDP2 holds the head whole until the next backward pass; the save of step 2 falls into that time.
EVALUATED = "--eval_strategy steps --eval_steps 2"
LORA = f"{OPTIONS} {EVALUATED} --lora_dropout 0.1 --lora_modules_to_save lm_head"
FULL = f"{OPTIONS} {EVALUATED} --method full --learning_rate 1e-3"


def history(folder: Path) -> list[dict[str, Any]]:
    """The run's log without what a clock decides."""
    state = json.loads((folder / "trainer_state.json").read_text())
    return [{k: v for k, v in entry.items() if k not in TIMINGS} for entry in state["log_history"]]


def ends(folder: Path) -> dict[str, Any]:
    """Everything that a sharded run came to: weights, optimizer and random states of its ranks, losses."""
    last = folder / f"checkpoint-{STEPS}"
    shards = {path.relative_to(last).as_posix(): load_file(path) for path in last.glob("*/shard-*.safetensors")}
    rest = {path.name: path.read_bytes() for path in (*last.glob("rng_state*"), last / "scheduler.pt")}
    weights = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    return {"shards": shards, "rest": rest, "weights": weights, "history": history(folder)}


@pytest.fixture(scope="module", autouse=True)
def held_out(place) -> None:
    """The evaluation rows, where the jobs look for them."""
    write_jsonl(place / "held_out.jsonl", demo_rows()[40:48])


@pytest.fixture(scope="module")
def lora_run(job, place) -> Path:
    """An uninterrupted run with adapters on two ranks."""
    job(LORA, "sharded-lora", 2, environ=FSDP2)
    return place / "outputs" / "sharded-lora"


@pytest.fixture(scope="module")
def full_run(job, place) -> Path:
    """An uninterrupted run of every parameter on two ranks."""
    job(FULL, "sharded-full", 2, environ=FSDP2)
    return place / "outputs" / "sharded-full"


def test_a_killed_run_resumes_bit_identically_from_the_last_whole_checkpoint(job, lora_run):
    """Of the newest checkpoint one byte of one rank's part was changed."""
    expected = ends(lora_run)
    assert len(expected["shards"]) == 4
    assert expected["weights"]["adapter_model.safetensors"]
    resumed = copy_until(lora_run, 3, "sharded-lora-resumed")
    damaged = resumed / "checkpoint-3" / "weights" / "shard-00001-of-00002.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    printed = job(LORA, resumed.name, 2, environ=FSDP2).output
    assert "checkpoint-3 is skipped: the content of weights/shard-00001-of-00002.safetensors does not match" in printed
    assert f"Resuming from {resumed}/checkpoint-2, step 2;" in printed
    assert_same(ends(resumed), expected)


def test_a_checkpoint_holds_the_trained_weights_and_nothing_to_unpickle(lora_run, full_run):
    for run, adapter in ((lora_run, True), (full_run, False)):
        described = manifest.verify(run / f"checkpoint-{STEPS}")
        assert manifest.pickled_file(described.files) is None
        assert manifest.missing_state(described.files) is None
        assert ("adapter_model.safetensors" in described.files) == adapter
        assert "model.safetensors" not in described.files
        names = Shards(run / f"checkpoint-{STEPS}" / "weights").names
        assert names
        assert all("lora_" in name or "modules_to_save" in name for name in names) == adapter


@pytest.mark.parametrize("ranks", [pytest.param(4, marks=pytest.mark.slow), 1])
def test_another_number_of_processes_continues_with_the_same_weights_and_optimizer(job, full_run, ranks):
    resumed = copy_until(full_run, 2, f"sharded-full-on-{ranks}")
    printed = job(FULL, resumed.name, ranks, environ=FSDP2 if ranks > 1 else {}).output
    assert f"world_size 2 -> {ranks}" in printed
    continued, expected = load_file(resumed / "model.safetensors"), load_file(full_run / "model.safetensors")
    start = load_file(
        Path(json.loads((full_run / "summary.json").read_text())["settings"]["model"]) / "model.safetensors"
    )
    assert continued.keys() == expected.keys() == start.keys()
    for name in continued:
        moved = (expected[name] - start[name]).norm()
        assert moved > 0, name
        assert (continued[name] - expected[name]).norm() < 1e-4 * moved, name
    losses = [[entry["loss"] for entry in history(run) if "loss" in entry] for run in (resumed, full_run)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("run", ["lora_run", "full_run"])
def test_the_result_has_the_loss_of_the_run_in_plain_transformers(request, place, monkeypatch, capsys, run):
    folder = request.getfixturevalue(run)
    monkeypatch.chdir(place)
    capsys.readouterr()
    reload.main(folder)
    loaded = json.loads(capsys.readouterr().out.splitlines()[-1])["eval_loss"]
    assert loaded == pytest.approx(json.loads((folder / "summary.json").read_text())["eval_loss"], rel=1e-5)


def test_a_checkpoint_in_shards_becomes_the_model_that_the_run_wrote(full_run, tmp_path):
    result = find_result(str(full_run / f"checkpoint-{STEPS}"), in_shards=True)
    assert result.in_shards
    write_merged(result, tmp_path)
    exported, expected = load_file(tmp_path / "model.safetensors"), load_file(full_run / "model.safetensors")
    assert_same(exported, expected)
    files = {path.name for path in tmp_path.iterdir()}
    assert files >= {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}
    assert not files & {"trainer_state.json", "optimizer.pt", "rng_state_0.pth", "manifest.json"}
    AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=r"in shards, as every process .*unsloth_ddp\.export .*checkpoint-4 --to merged`"
    ):
        find_result(str(full_run / f"checkpoint-{STEPS}"))


def test_a_write_that_fails_on_one_rank_leaves_no_half_checkpoint_and_no_rank_waiting(job, lora_run):
    faults = {2: (1, "small too large"), FINAL: (0, "small too large")}
    printed = job(LORA, "sharded-faults", 2, code=1, target=train_with_faults, args=(faults,), environ=FSDP2).output
    run = lora_run.parent / "sharded-faults"
    assert "checkpoint-2 could not be written: rank 1: File too large" in printed
    assert "its result could not be written" in printed
    assert manifest_steps(run) == [1, 3, 4]
    assert not list(run.glob("*.partial"))
    assert not (run / "adapter_model.safetensors").exists()
    # The faults cost the run nothing that it learned.
    assert_same(
        {name: load_file(path) for name, path in _shards(run).items()},
        {name: load_file(path) for name, path in _shards(lora_run).items()},
    )


def _shards(run: Path) -> dict[str, Path]:
    last = run / f"checkpoint-{STEPS}"
    return {path.relative_to(last).as_posix(): path for path in last.glob("*/shard-*.safetensors")}
