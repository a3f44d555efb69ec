"""Runs of a tiny model: resume, methods, data options, launchers, the output folder."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import REPO, demo_rows, write_jsonl
from tests.ranks import run_ranks, train


@pytest.fixture(scope="module")
def job(tmp_path_factory, tiny_model, uneven_rows):
    """Run train_ddp.py on the tiny model with these options; returns the run's folder and what was printed."""
    place = tmp_path_factory.mktemp("runs")

    def run(options: str, name: str, ranks: int = 1, target: Callable[..., None] = train):
        argv = f"--model {tiny_model} --dataset {uneven_rows} --run_name {name} --learning_rate 0.01 --max_length 64"
        argv = argv.split()
        argv += ["--gradient_checkpointing", "none", "--logging_steps", "1", *options.split()]
        result = run_ranks(ranks, target, argv, str(place), folder=place / f"{name}.out").check()
        return place / "outputs" / name, " ".join(result.output.split())

    return run


@pytest.fixture(scope="module")
def padded(job):
    """An epoch of the 13 rows on one process, two of them truncated."""
    return job("--packing auto --global_batch_size 4 --num_train_epochs 1", "padded")


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def history(folder: Path) -> list[dict]:
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


@pytest.mark.slow
def test_a_resumed_run_ends_like_an_uninterrupted_one(job):
    options = "--global_batch_size 4 --max_steps 6 --save_steps 3 --lora_dropout 0.1 --logging_steps 2"
    whole, _ = job(options, "whole", ranks=2)
    resumed, _ = job(f"{options} --resume {whole}/checkpoint-3", "resumed", ranks=2)
    expected, found = (load_file(f / "adapter_model.safetensors") for f in (whole, resumed))
    assert all(torch.equal(expected[k], found[k]) for k in expected)
    for key in ("train_loss", "tokens", "supervised_tokens", "steps"):
        assert summary(resumed)[key] == pytest.approx(summary(whole)[key], rel=1e-12), key
    for folder, steps in ((whole, 6), (resumed, 3)):
        (last,) = (entry for entry in history(folder) if "train_runtime" in entry)
        # Rates are logged with three digits.
        assert last["train_steps_per_second"] * last["train_runtime"] == pytest.approx(steps, rel=0.02)
        assert last["train_samples_per_second"] * last["train_runtime"] == pytest.approx(4 * steps, rel=0.02)
    trained = summary(resumed)["tokens_per_second"] * summary(resumed)["train_seconds"]
    assert 0 < trained < summary(whole)["tokens"]


def train_and_note_collections(argv: list[str], cwd: str) -> None:
    """train_ddp.py that prints whether garbage is collected during imports, while rows are read, and in steps."""
    from unsloth_ddp.data.sources import examples
    from unsloth_ddp.distributed import backend
    from unsloth_ddp.training.trainer import DDPTrainer

    def noting(where: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            print(f"{where}: {gc.isenabled()}")
            return work(*args, **kwargs)

        return noted

    with (
        patch.object(examples, "read_examples", noting("rows", examples.read_examples)),
        patch.object(backend, "import_backend", noting("imports", backend.import_backend)),
        patch.object(DDPTrainer, "train_from", noting("steps", DDPTrainer.train_from)),
    ):
        train(argv, cwd)


ONE_STEP = "--global_batch_size 4 --max_steps 1 --save_strategy no"


@pytest.fixture(scope="module")
def collecting(job):
    """A step on one process, and where garbage was collected."""
    return job(ONE_STEP, "twice", target=train_and_note_collections)


def test_no_garbage_is_collected_during_imports_alone(collecting):
    _, printed = collecting
    assert re.findall(r"(rows|imports|steps): (True|False)", printed) == [
        ("rows", "True"),
        ("imports", "False"),
        ("steps", "True"),
    ]


@pytest.mark.slow
def test_a_packed_run_resumed_within_an_epoch_ends_like_an_uninterrupted_one(job):
    # Six packs make three steps an epoch, so the checkpoint of step 2 lies within the first.
    options = "--packing on --global_batch_size 2 --max_steps 6 --save_steps 2 --save_total_limit 3 --lora_dropout 0.1"
    whole, printed = job(options, "whole-packed", ranks=2)
    assert "packing on: as set; a CPU has no attention kernel for packed rows" in printed
    resumed, _ = job(f"{options} --resume {whole}/checkpoint-2", "resumed-packed", ranks=2)
    expected, found = (load_file(f / "adapter_model.safetensors") for f in (whole, resumed))
    assert all(torch.equal(expected[k], found[k]) for k in expected)
    for key in ("train_loss", "tokens", "supervised_tokens", "steps", "packs"):
        assert summary(resumed)[key] == summary(whole)[key], key


def test_packing_counts_each_row_once_and_says_how_many_a_step_holds(job, padded):
    folder, printed = padded
    assert "packing off: a CPU has no attention kernel for packed rows" in printed
    assert "1 row a device x 4 accumulation x 1 process = 4 rows" in printed
    packed, printed = job("--packing on --global_batch_tokens 130 --num_train_epochs 1", "packed", ranks=2)
    packs = summary(packed)["packs"]
    assert f"{packs} packs of up to 64 tokens" in printed
    assert "1 pack a device x 1 accumulation x 2 processes = 2 packs (about 4 rows)" in printed
    for key in ("tokens", "supervised_tokens"):
        assert summary(packed)[key] == summary(folder)[key]


def test_a_batch_in_tokens_is_refused_on_every_rank_where_rows_are_padded(tmp_path, tiny_model, uneven_rows):
    argv = (
        f"--model {tiny_model} --dataset {uneven_rows} --max_length 64 --packing auto --global_batch_tokens 512".split()
    )
    result = run_ranks(2, train, argv, str(tmp_path), folder=tmp_path / "out")
    assert result.codes[0] == 2
    assert "global_batch_tokens 512 needs packed rows, and rows are padded: a CPU has no attention" in result.output
    assert not (tmp_path / "outputs").exists()


def test_full_parameters_leave_a_whole_model(job, tiny_model):
    folder, printed = job("--method full --global_batch_size 4 --max_steps 2", "full")
    assert "trainable parameters, 100.00%" in printed
    before, after = load_file(tiny_model / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[k], after[k]) for k in before if "layers" in k)


def test_an_epoch_sees_each_row_once_on_ranks_that_do_not_divide(job, padded):
    folder, _ = job("--per_device_train_batch_size 2 --global_batch_size 4 --num_train_epochs 1", "thirteen", ranks=2)
    rows = json.loads((folder / "trainer_state.json").read_text())
    assert rows["global_step"] == 4
    assert summary(folder)["tokens"] == summary(padded[0])["tokens"]
    assert summary(folder)["supervised_tokens"] == summary(padded[0])["supervised_tokens"]


def test_overlong_rows_are_truncated_or_dropped_and_files_are_one_set(job, padded, tmp_path):
    _, cut = padded
    assert "13 (" in cut and "2 over max_length 64 truncated" in cut
    assert "Nothing is learned from 2 rows without a supervised token; max_length 64 cuts off 2 answers, so" in cut
    write_jsonl(tmp_path / "a.jsonl", demo_rows()[:3])
    alpaca = [{"instruction": "Say it.", "input": "", "output": "It."}] * 2
    (tmp_path / "b.json").write_text(json.dumps(alpaca))
    files = f"--dataset {tmp_path}/a.jsonl {tmp_path}/b.json"
    _, dropped = job(f"--global_batch_size 4 --max_steps 1 --overlong drop {files}", "dropped")
    assert "16 (" in dropped and "2 over max_length 64 dropped" in dropped
    assert "Nothing is learned" not in dropped


def test_bf16_on_a_cpu_checkpointing_and_a_fraction_for_evaluation_run(job):
    options = "--precision bf16 --gradient_checkpointing torch --eval_fraction 0.25"
    folder, printed = job(f"{options} --global_batch_size 4 --max_steps 2", "half")
    assert "precision bf16" in printed and "10 (" in printed and "evaluation rows 3" in printed
    assert 5 < summary(folder)["train_loss"] < 9 and summary(folder)["eval_loss"] > 0


def test_a_run_of_the_same_name_is_replaced_when_asked(job, collecting):
    folder, _ = collecting
    (folder / "stale.txt").write_text("old")
    job(f"{ONE_STEP} --overwrite", "twice")
    assert not (folder / "stale.txt").exists()


def test_the_default_name_says_model_method_and_time(tmp_path, tiny_model, uneven_rows):
    argv = f"--model {tiny_model} --dataset {uneven_rows} --max_steps 1 --max_length 64 --save_strategy no".split()
    run_ranks(2, train, argv, str(tmp_path), folder=tmp_path / "out").check()
    (folder,) = (tmp_path / "outputs").iterdir()
    assert folder.name.startswith("tiny-lora-20")
    assert (folder / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_torchrun_runs_its_processes(tmp_path, tiny_model, uneven_rows):
    options = f"--model {tiny_model} --dataset {uneven_rows} --max_steps 1 --max_length 64"
    options += f" --run_name r --output_dir {tmp_path}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train_ddp.py"]
    done = subprocess.run([*command, *options.split()], cwd=REPO, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "r")["world_size"] == 2


def test_help_is_grouped_by_topic():
    done = subprocess.run(
        [sys.executable, "train_ddp.py", "--help"], cwd=REPO, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0
    topics = ["Model:", "LoRA and QLoRA:", "Data:", "Batch:", "Training:", "Output:", "Unsloth:"]
    assert [t for t in topics if f"\n{t}\n" in done.stdout] == topics
