"""The parity check as users run it: what it launches, how it judges, and that its verdict turns."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import REPO, write_jsonl
from tests.ranks import run_ranks
from tests.tiny_vision import image_rows, save_vision
from unsloth_ddp.config.checks import check_settings
from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.task_options import ImageSettings
from unsloth_ddp.data.sources.checked_rows import checked_rows
from unsloth_ddp.parity import __main__ as command
from unsloth_ddp.parity import comparison, launches, run, weights
from unsloth_ddp.parity.comparison import LaunchComparison, Tolerance
from unsloth_ddp.parity.launches import Launch
from unsloth_ddp.utils.errors import UserError

EXACT = Tolerance(1e-6, "")


def layouts(processes: int, sizes: list[int]) -> list[tuple]:
    return [dataclasses.astuple(launch) for launch in launches.plan_launches(processes, sizes)]


def test_the_reference_is_first_and_every_launcher_takes_the_same_global_batch():
    assert layouts(2, [4, 1]) == [
        ("python", 1, 1, 8),
        ("python", 1, 4, 2),
        ("accelerate", 1, 1, 8),
        ("accelerate", 2, 1, 4),
        ("accelerate", 2, 4, 1),
    ]
    assert layouts(1, [2]) == [("python", 1, 2, 2), ("accelerate", 1, 2, 2)]
    for processes, sizes in ((3, [1, 2]), (8, [1, 6]), (4, [3, 4])):
        assert len({count * rows * steps for _, count, rows, steps in layouts(processes, sizes)}) == 1


def test_gpus_are_named_as_the_user_chose_them():
    assert launches.visible_gpus({"CUDA_VISIBLE_DEVICES": "2, 5"}, 2) == ["2", "5"]
    assert launches.visible_gpus({}, 2) == ["0", "1"]


def test_nothing_random_and_nothing_of_the_runs_output_is_left(tmp_path):
    given = Settings(
        model="m", dataset=["rows.jsonl"], eval_dataset=["e.jsonl"], lora_dropout=0.1, run_name="mine", merge=True,
        push_to_hub=True, optim="adamw_8bit", num_train_epochs=9, global_batch_size=64, max_length=77,
        trainer_args={"neftune_noise_alpha": 5}, streaming=True, shuffle_buffer=7,
    )  # fmt: skip
    found = launches.launch_settings(Launch("python", 1, 2, 4), given, 3, "fp32", tmp_path / "rows.jsonl", tmp_path)
    assert (found.optim, found.max_steps, found.lora_dropout, found.trainer_args) == ("sgd", 3, 0.0, {})
    assert (found.merge, found.push_to_hub, found.eval_dataset, found.report_to) == (False, False, [], [])
    assert (found.per_device_train_batch_size, found.gradient_accumulation_steps, found.global_batch_size) == (
        2,
        4,
        None,
    )
    assert (found.dataset, found.max_length, found.run_name) == ([str(tmp_path / "rows.jsonl")], 77, "python_1x2x4")
    assert found.packing == "off"
    said = [sentence.split()[0] for sentence in launches.describe_omissions(given, "bf16")]
    assert said == ["lora_dropout", "trainer_args", "streaming", "packing"]
    # In fp32 nothing is packed unless it was asked for.
    assert [sentence.split()[0] for sentence in launches.describe_omissions(given, "fp32")] == said[:3]
    # A run on GPUs would train in 16 bit, and pack.
    assert [one.split()[0] for one in launches.describe_omissions(given, "fp32", on_gpus=True)] == said
    saved = dataclasses.replace(given, lora_modules_to_save=["lm_head"])
    assert "lora_modules_to_save (lm_head) are trained but not compared." in launches.describe_omissions(saved, "fp32")
    packed = dataclasses.replace(given, packing="on")
    assert launches.launch_settings(Launch("python", 1, 2, 4), packed, 3, "fp32", tmp_path, tmp_path).packing == "on"
    assert [sentence.split()[0] for sentence in launches.describe_omissions(packed, "bf16")] == said[:3]
    check_settings(found)


def test_fp32_is_used_unless_named_or_not_to_be_had():
    assert launches.choose_precision(Settings(), "unsloth") == "fp32"
    assert launches.choose_precision(Settings(precision="bf16"), "transformers") == "bf16"
    assert launches.choose_precision(Settings(method="full"), "unsloth") == "bf16"


@pytest.mark.parametrize(
    ("backend", "precision", "value"),
    [
        ("transformers", "fp32", 1e-6),
        ("unsloth", "fp32", 5e-6),
        ("unsloth", "bf16", 6e-2),
        ("transformers", "fp16", 6e-2),
    ],
)
def test_the_tolerance_is_that_of_the_precision(backend, precision, value):
    tolerance = comparison.choose_tolerance(backend, precision)
    assert comparison.choose_tolerance(backend, precision, "kto").value == max(value, 5e-6)
    assert tolerance.value == value and "measured" not in tolerance.basis


# ---- judging ----


def test_what_is_missing_or_not_a_number_differs():
    assert comparison.loss_difference([2.0, 1.0], [2.0, 1.25]) == pytest.approx(0.2)
    assert comparison.loss_difference([2.0], [2.0, 1.0]) == math.inf
    assert comparison.loss_difference([math.nan], [1.0]) == math.inf
    assert comparison.judge_difference(math.nan, 0.0, EXACT) == "differs"
    assert comparison.judge_difference(0.0, 2e-6, EXACT) == "differs"
    assert comparison.judge_difference(1e-6, 1e-7, EXACT) == "agrees"


def test_the_verdict_names_the_worst_and_counts_failures():
    launch = Launch("accelerate", 2, 1, 4)
    rows = [LaunchComparison(launch, 1.0, 0.0, 0.0, "reference"), LaunchComparison(launch, 1.0, 0.3, 0.1, "differs")]
    agree, sentence = comparison.overall_verdict(rows, EXACT)
    assert not agree
    assert "1 of 2 launches" in sentence and "accelerate with 2 processes, 1 x 4" in sentence
    assert comparison.overall_verdict([*rows, LaunchComparison(launch, 1.0, None, None, "failed")], EXACT)[
        1
    ].startswith("FAILED: 1 of 3")
    assert comparison.overall_verdict(rows[:1], EXACT)[0]
    rows[1] = LaunchComparison(launch, 1.0, 5.9e-7, 1e-8, "agrees")
    said = "AGREE: all 2 launches take the same steps; the largest difference is 5.9e-07, and up to 1.0e-06 is allowed."
    assert comparison.overall_verdict(rows, EXACT) == (True, said)


def folder_of(path: Path, **tensors: torch.Tensor) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    return path


def test_an_adapters_update_is_its_b(tmp_path):
    a = torch.full((2, 2), 100.0)
    one = folder_of(tmp_path / "one", **{"x.lora_A": a, "x.lora_B": torch.tensor([3.0, 4.0])})
    other = folder_of(tmp_path / "other", **{"x.lora_A": a + 1, "x.lora_B": torch.tensor([3.0, 4.5])})
    assert weights.update_difference(one, other, None, 3) == (pytest.approx(0.1), 0.0)
    third = folder_of(tmp_path / "third", **{"y.lora_B": torch.ones(2)})
    assert weights.update_difference(one, third, None, 3)[0] == math.inf
    still = folder_of(tmp_path / "still", **{"x.lora_B": torch.zeros(2)})
    with pytest.raises(UserError, match="did not change"):
        weights.update_difference(still, still, None, 3)


def test_a_models_update_is_what_changed_and_its_rounding_is_known(tmp_path):
    # A count of batches, which is no weight.
    batches = torch.tensor(1)
    first = folder_of(tmp_path / "first", w=torch.tensor([30.0, 40.0]), batches=batches)
    one = folder_of(tmp_path / "one", w=torch.tensor([30.0, 41.0]), batches=batches)
    other = folder_of(tmp_path / "other", w=torch.tensor([30.0, 41.5]), batches=batches)
    difference, floor = weights.update_difference(one, other, first, 2)
    assert difference == pytest.approx(0.5)
    assert floor == pytest.approx(2 * 2**-24 * math.hypot(30, 41), rel=1e-6)
    finished = [comparison.LaunchOutcome(Launch("python", 1, 1, 1), 1.0, run, [1.0, 1.0]) for run in (one, other)]
    assert comparison.compare_launch(*finished, first, EXACT)[1].value == pytest.approx(1e-6 + floor)
    # As coarse as 16 bit, it cannot be told.
    coarse = [
        folder_of(tmp_path / n, w=torch.tensor([30.0, v], dtype=torch.bfloat16)) for n, v in (("c", 41.0), ("d", 42.0))
    ]
    outcomes = [comparison.LaunchOutcome(Launch("python", 1, 1, 1), 1.0, f, [1.0]) for f in coarse]
    with pytest.raises(UserError, match="rounded so coarsely"):
        comparison.compare_launch(outcomes[0], outcomes[1], first, EXACT)


# ---- the command ----


@pytest.fixture
def options(tiny_model, uneven_rows, tmp_path) -> list[str]:
    argv = f"--model {tiny_model} --dataset {uneven_rows} --max_length 64 --lora_r 8 --gradient_checkpointing none"
    return [*argv.split(), "--json", str(tmp_path / "found.json")]


def judged(path: Path) -> list[tuple[str, int, str]]:
    rows = json.loads(path.read_text())["launches"]
    return [(row["launch"]["launcher"], row["launch"]["processes"], row["verdict"]) for row in rows]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_python_and_accelerate_with_one_and_two_processes_agree(options, tmp_path, capsys):
    code = command.main([*options, "--micro_batches", "2"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "AGREE: all 3 launches take the same steps; the largest difference is " in printed
    found = json.loads((tmp_path / "found.json").read_text())
    assert judged(tmp_path / "found.json") == [
        ("python", 1, "reference"), ("accelerate", 1, "agrees"), ("accelerate", 2, "agrees"),
    ]  # fmt: skip
    # Not zero, or the same run was compared with itself.
    assert 0 < found["launches"][2]["update"] < 1e-6


def test_the_copied_rows_have_the_images_of_the_users_rows(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    rows = write_jsonl(folder / "rows.jsonl", image_rows(folder, (1, 0, 3)))
    shapes = REPO / "demo" / "shapes_eval.parquet"  # bytes
    settings = run.with_image_folders(Settings(dataset=[str(rows), str(shapes)]))
    copied = tmp_path / "copy" / "rows.jsonl"
    copied.parent.mkdir()
    assert run.write_rows(settings, 5, copied) == 5

    def read(source: Path, folders: list[str]) -> list:
        found = checked_rows(str(source), "train", task="sft", images=ImageSettings(image_folder=folders))
        return [(one.messages, one.images) for _, one in itertools.islice(found, 5)]

    expected = [*read(rows, []), *read(shapes, [])[:2]]
    assert [len(images) for _, images in expected] == [1, 0, 3, 1, 1]
    assert read(copied, settings.image_folder) == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rows_with_images_take_the_same_steps_in_every_shape(tmp_path, capsys):
    save_vision("qwen3_vl", tmp_path / "model")
    # A rank of four has micro-batches without an image, and the last step is not full.
    rows = write_jsonl(tmp_path / "rows.jsonl", image_rows(tmp_path, (1, 0, 3, 0, 1, 0, 0, 0, 3, 0, 0, 1) * 4))
    argv = f"--model {tmp_path}/model --dataset {rows} --max_length 512 --lora_r 8 --train_towers true "
    argv += "--gradient_checkpointing none"
    options = ["--processes", "4", "--micro_batches", "1", "4", "--json", str(tmp_path / "found.json")]
    code = command.main([*argv.split(), *options])
    printed = capsys.readouterr().out
    assert code == 0, printed
    found = json.loads((tmp_path / "found.json").read_text())["launches"]
    assert [row["launch"]["per_device"] for row in found] == [1, 4, 1, 1, 4]
    assert all(0 < row["update"] < 1e-6 for row in found if row["launch"]["per_device"] > 1)


def run_script(script: str, config: str) -> None:
    sys.argv = [script, "--config", config]
    runpy.run_path(script, run_name="__main__")


@pytest.mark.slow
def test_the_verdict_turns_where_nothing_is_averaged(options, tmp_path, capsys, monkeypatch):
    def run_launch(launch, script, config, output, gpus, timeout):
        folder = output / f"{launch.name}.out"
        done = run_ranks(launch.processes, run_script, str(script), str(config), folder=folder).check()
        return run.read_outcome(launch, done.seconds, output / launch.name, "", done.output)

    monkeypatch.setattr(run, "run_launch", run_launch)
    script = REPO / "tests" / "training" / "train_without_averaging.py"
    assert command.main([*options, "--micro_batches", "1", "--script", str(script)]) == 1
    assert "DIFFER: 1 of 3 launches" in capsys.readouterr().out
    found = judged(tmp_path / "found.json")
    assert found == [("python", 1, "reference"), ("accelerate", 1, "agrees"), ("accelerate", 2, "differs")]


def test_a_failed_launch_shows_its_last_lines_and_ends_the_check(options, tmp_path, capsys):
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit('no such thing')")
    assert command.main([*options, "--script", str(script)]) == 1
    printed = capsys.readouterr().out
    assert "no such thing" in printed and "exit code 1" in printed
    assert "FAILED: 1 of 1 launches" in printed


def test_a_file_that_cannot_be_written_is_told_after_the_verdict(options, tmp_path, capsys):
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit('no such thing')")
    assert command.main([*options, "--script", str(script), "--json", str(script / "found.json")]) == 2
    said = capsys.readouterr()
    assert "FAILED: 1 of 1 launches" in said.out
    assert said.err.startswith(f"parity: error: --json {script}/found.json cannot be written: ")


def test_a_launch_over_its_time_is_ended(options, tmp_path, capsys):
    script = tmp_path / "hanging.py"
    script.write_text("import threading; threading.Event().wait()")
    assert command.main([*options, "--script", str(script), "--timeout", "2"]) == 1
    printed = capsys.readouterr().out
    assert "killed after --timeout 2 s" in printed and "It printed nothing." in printed


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--steps", "0"], "--steps is 0, but it has to be a number above 0"),
        (["--tolerance", "nan"], "--tolerance is nan, but it has to be a number above 0"),
        (["--timeout", "inf"], "--timeout is inf, but it has to be a number above 0"),
        (["--steps", "few"], "invalid int value"),
        (["--micro_batches", "0"], "--micro_batches holds 0"),
        (["--script", "nowhere.py"], "nowhere.py: there is no such file"),
        (["--optimizer", "sgd"], "there is no option optimizer"),
        (["--dataset", "nowhere.jsonl"], "nowhere.jsonl: there is no such file"),
    ],
)
def test_mistakes_get_a_sentence(words, sentence, options, capsys):
    assert command.main([*options, *words]) == 2
    assert sentence in capsys.readouterr().err


def test_it_is_not_given_to_a_launcher(monkeypatch, options, capsys):
    monkeypatch.setenv("RANK", "0")
    assert command.main(options) == 2
    assert "start it with plain python" in capsys.readouterr().err
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("UNSLOTH_FSDP2", "1")
    assert command.main(options) == 2
    assert "sharding" in capsys.readouterr().err
