"""The speed benchmark: the commands it runs, and what is counted."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.common.runs import REPO
from benchmarks.speed import fp8_full
from benchmarks.speed.cells import CONTESTANTS, WORKS, Cell, command, default_order, parse_cells
from benchmarks.speed.figures import figures, first_step_at, kit_intervals, used_share
from benchmarks.speed.peers.measure import Marks, Pace, add_unsloth_options, make_parser, real_tokens
from benchmarks.speed.profile_summary import busy_seconds, gpu_summary
from unsloth_ddp.config.parse import parse_settings


def test_every_command_is_one_that_its_script_takes() -> None:
    for one in parse_cells(default_order(), 1):
        words = command(one, WORKS[one.work], Path("/w"), 15, tiny=False)
        at = next(index for index, word in enumerate(words) if word.endswith(CONTESTANTS[one.contestant].script))
        if CONTESTANTS[one.contestant].batch is None:
            settings = parse_settings(words[at + 1 :])
            assert (settings.method, settings.max_length) == (one.method, WORKS[one.work].max_length)
            assert at > 2 or one.processes == 1
        else:
            parser = make_parser(None)
            if words[at].endswith("unsloth_sft.py"):
                add_unsloth_options(parser)
            given = parser.parse_args(words[at + 1 :])
            assert (given.method, given.max_length) == (one.method, WORKS[one.work].max_length)


def option(words: list[str], name: str) -> int:
    return int(words[words.index(name) + 1])


def test_the_global_batch_is_the_same_for_all_that_count_rows() -> None:
    def words(contestant: str, processes: int = 1, scaling: str = "") -> list[str]:
        cell = Cell("chat", "qwen3_8b", "lora", contestant, processes, scaling)
        return command(cell, WORKS["chat"], Path("/w"), 15, tiny=False)

    for name in ("trl", "unsloth_same_batch"):
        assert option(words(name), "--batch") * option(words(name), "--accumulation") == 64
    assert option(words("kit"), "--global_batch_size") == option(words("kit", 2, "strong"), "--global_batch_size") == 64
    assert option(words("kit", 2, "weak"), "--global_batch_size") == 128
    # The rows of a step, packed, are about ten packs of 2048 tokens.
    assert option(words("trl_packed"), "--batch") * option(words("trl_packed"), "--accumulation") in (8, 10)
    # Tuned by hand, Unsloth takes the kit's eight packs at once, in one micro-batch.
    assert (option(words("unsloth_tuned"), "--batch"), option(words("unsloth_tuned"), "--accumulation")) == (8, 1)
    assert option(words("unsloth_guide"), "--batch") * option(words("unsloth_guide"), "--accumulation") == 8
    assert words("kit_one")[-2:] == ["--per_device_train_batch_size", "1"]


@pytest.mark.parametrize(
    ("contestant", "option"), [("kit_all_auto", "--max_steps"), ("unsloth_tuned_stored", "--steps")]
)
def test_a_whole_job_takes_the_given_steps(contestant: str, option: str) -> None:
    cell = Cell("chat", "qwen3_1.7b", "lora", contestant)
    words = command(cell, WORKS["chat"], Path("work"), 15, tiny=False, steps=7)
    assert words[words.index(option) + 1] == "7"


def test_intervals_of_the_kit_come_from_its_log_lines() -> None:
    logged = [(1, 100, 10.0), (5, 500, 100.0), (10, 1000, 250.0), (15, 1600, 300.0)]
    history = [{"step": s, "num_tokens": t, "tokens_per_second": v, "loss": 1.0} for s, t, v in logged]
    intervals = kit_intervals([*history, {"step": 15, "train_loss": 1.0}], warm=2)
    assert intervals == [(500, 2.0, 5), (600, 2.0, 5)]
    found = figures(intervals, processes=2)
    assert found["tokens_per_second_a_gpu"] == 137.5 and (found["lowest"], found["highest"]) == (125, 150)
    assert found["tokens_a_step"] == 110 and figures([], 1) == {}
    assert used_share(1000, 3e10, 6e13) == 0.5


def test_the_first_step_is_found_in_the_log() -> None:
    log = (
        "2026-11-20 10:00:00,000 INFO unsloth_ddp: began\n2026-11-20 10:00:07,250 INFO unsloth_ddp: step 1 {'loss': "
        "1}\n"
    )
    assert first_step_at(log) == datetime(2026, 11, 20, 10, 0, 7, 250_000).timestamp()
    assert first_step_at("no step") is None


def test_tokens_of_a_peer_leave_padding_out() -> None:
    ids = torch.zeros(2, 5, dtype=torch.long)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    assert real_tokens({"input_ids": ids, "attention_mask": mask}) == 7
    assert real_tokens({"input_ids": ids, "attention_mask": None, "packed_seq_lengths": torch.tensor([3, 4])}) == 7
    assert real_tokens({"input_ids": ids, "position_ids": ids}) == 10


class Trainer:
    """As much of a trainer as Marks touches: a step is two micro-batches of three tokens."""

    def __init__(self) -> None:
        self.args = SimpleNamespace(use_cpu=True)
        self.callback: Any = None

    def add_callback(self, callback: Any) -> None:
        self.callback = callback

    def training_step(self, model: Any, inputs: Any, count: Any = None) -> str:
        return "loss"

    def train(self, steps: int) -> int:
        control = SimpleNamespace(should_training_stop=False)
        for step in range(1, steps + 1):
            for _ in range(2):
                inputs = {"input_ids": torch.zeros(1, 4), "attention_mask": torch.tensor([[1, 1, 1, 0]])}
                assert self.training_step(None, inputs) == "loss"
            self.callback.on_step_end(self.args, SimpleNamespace(global_step=step), control)
            if control.should_training_stop:
                return step
        return steps


def test_marks_count_every_micro_batch_and_stop_the_trainer() -> None:
    trainer = Trainer()
    marks = Marks(trainer, Pace(seconds=0, warm_steps=3, warm_seconds=0, interval=0, fewest=4))
    # Three steps of warm-up end at the first mark; four intervals follow.
    assert trainer.train(100) == 7
    result = marks.result()
    assert [(tokens, steps) for tokens, _, steps in result["intervals"]] == [(6, 1)] * 4
    assert result["largest_micro_batch"] == (1, 4) and result["first_step_at"] > 0


def event(cat: str, name: str, began: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": began, "dur": dur, "tid": tid}


def test_a_profile_says_how_busy_the_gpu_was() -> None:
    events = [event("kernel", "a", 0, 10), event("kernel", "b", 5, 10), event("gpu_memcpy", "c", 30, 5), {"ph": "M"}]
    assert busy_seconds(events[:3]) == pytest.approx(20e-6)
    found = gpu_summary(events, seconds=40e-6, steps=2)
    assert found["busy"] == pytest.approx(0.5) and found["kernels_a_step"] == 1.5
    assert found["top"][0]["share"] == pytest.approx(10 / 25)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kit_and_peer_are_measured_side_by_side(tmp_path: Path) -> None:
    results = tmp_path / "speed.json"
    cells = ["chat:qwen3_1.7b:lora:kit", "chat:qwen3_1.7b:lora:trl"]
    script = [sys.executable, "-m", "benchmarks.speed.compare"]
    run = [*script, "run", "--work", str(tmp_path / "work"), "--json", str(results), "--cells", *cells]
    run += ["--tiny", "--lanes", "2", "--seconds", "1"]
    done = subprocess.run(run, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {one["contestant"]: one for one in json.loads(results.read_text())["cells"]}
    for one in found.values():
        assert one["tokens_per_second_a_gpu"] > 0 and one["seconds_to_first_step"] > 0
        # Eight rows of at most 48 tokens.
        assert 8 < one["tokens_a_step"] <= 8 * 48
    assert found["kit"]["tokens_a_step"] == pytest.approx(found["trl"]["tokens_a_step"], rel=0.2)
    assert "| kit |" in (tmp_path / "speed.md").read_text()
    if find_spec("matplotlib"):
        assert (tmp_path / "speed.png").stat().st_size > 5000
    else:
        assert "the picture needs matplotlib" in done.stdout
    (tmp_path / "speed.md").unlink()
    again = subprocess.run(run, cwd=REPO, capture_output=True, text=True)
    assert again.stdout.startswith("every run is in the results already\n")
    assert "| trl |" in (tmp_path / "speed.md").read_text()
    report = subprocess.run([*script, "report", "--json", str(results)], cwd=REPO, capture_output=True, text=True)
    assert report.returncode == (0 if find_spec("matplotlib") else 1), report.stderr


@pytest.mark.parametrize("all_three", [True, False])
def test_gradients_of_weights_trained_in_fp8_are_near_those_in_fp32(all_three: bool) -> None:
    torch.manual_seed(0)
    x, weight, towards = (torch.randn(shape, requires_grad=True) for shape in ((32, 64), (48, 64), (32, 48)))
    result = fp8_full.Product.apply(x.bfloat16(), weight.bfloat16(), all_three)
    found = torch.autograd.grad((result * towards).sum(), (x, weight))
    wanted = torch.autograd.grad(((x @ weight.t()) * towards).sum(), (x, weight))
    off = [float((one - other).norm() / other.norm()) for one, other in zip(found, wanted, strict=True)]
    # Rounding to e4m3 changes a product by some percent, and rounding to bf16 by some thousandths.
    assert 0.01 < off[0] < 0.06 and (0.01 < off[1] < 0.06 if all_three else off[1] < 0.01)
