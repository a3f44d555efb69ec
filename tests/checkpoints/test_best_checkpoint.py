"""load_best_model_at_end: the best checkpoint is kept, found again after a stop, and is what the run writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from safetensors.torch import load_file

from tests.jobs import LAST, manifest_steps
from tests.ranks import train
from unsloth_ddp.checkpoints import manifest
from unsloth_ddp.checkpoints.manifest import Manifest
from unsloth_ddp.checkpoints.resume_point import ResumePoint
from unsloth_ddp.checkpoints.writer import Checkpoints
from unsloth_ddp.training.callbacks import StopTogether
from unsloth_ddp.training.saving import ResumableTrainer
from unsloth_ddp.training.trainer import DDPTrainer

RUN = {"seed": 1, "learning_rate": 1e-4, "model_weights": "aa"}

BEST = (
    "--global_batch_size 4 --num_train_epochs 3 --eval_fraction 0.2 --eval_steps 1 --save_steps 1 --save_total_limit 2 "
    '--trainer_args {"load_best_model_at_end":true,"metric_for_best_model":"eval_loss","greater_is_better":false}'
)


def train_judged(argv: list[str], cwd: str, losses: dict[int, float], stop_at: int = 0, fail_at: int = 0) -> None:
    """train_ddp.py that takes the evaluation losses of its steps to be `losses` (9 where none is given).

    It is asked to stop in step `stop_at`, and cannot save step `fail_at`.
    """
    determine, save, ask = ResumableTrainer._determine_best_metric, Checkpoints.save, StopTogether.on_pre_optimizer_step

    def judge(self: ResumableTrainer, metrics: dict[str, float], trial: Any) -> bool:
        return determine(self, metrics | {"eval_loss": losses.get(self.state.global_step, 9.0)}, trial)

    def refuse(self: Checkpoints, step: int, write: Any, *args: Any) -> None:
        def fail() -> None:
            raise OSError("refused")

        def write_and_fail_later(folder: Path) -> None:
            write(folder)
            self.later(fail)

        save(self, step, write_and_fail_later if step == fail_at and os.environ["RANK"] == "0" else write, *args)

    steps = iter(range(1, 100))

    def request(self: StopTogether, *args: Any, **kwargs: Any) -> None:
        if next(steps) == stop_at:
            self.stop.request_stop("SIGTERM")
        ask(self, *args, **kwargs)

    with (
        patch.object(ResumableTrainer, "_determine_best_metric", judge),
        patch.object(Checkpoints, "save", refuse),
        patch.object(StopTogether, "on_pre_optimizer_step", request),
    ):
        train(argv, cwd)


def adapter(folder: Path) -> dict[str, bytes]:
    """The bytes of each tensor of a trained adapter."""
    weights = load_file(folder / "adapter_model.safetensors")
    return {name: weight.numpy().tobytes() for name, weight in weights.items()}


def state(folder: Path) -> dict[str, Any]:
    """What Transformers wrote of a run or checkpoint."""
    return json.loads((folder / "trainer_state.json").read_text())


@pytest.fixture(scope="module")
def best_run(place, job) -> Path:
    """A run on two ranks whose best step is 3 and second best is 5."""
    job(BEST, "best", 2, target=train_judged, args=({2: 5.0, 3: 1.0, 5: 2.0},))
    return place / "outputs" / "best"


@pytest.mark.slow
def test_the_best_checkpoint_stays_and_is_the_result(best_run):
    assert manifest_steps(best_run) == [3, LAST]
    assert adapter(best_run) == adapter(best_run / "checkpoint-3") != adapter(best_run / f"checkpoint-{LAST}")
    assert state(best_run)["best_model_checkpoint"] == str(best_run / "checkpoint-3")
    summary = json.loads((best_run / "summary.json").read_text())
    (then,) = [entry for entry in state(best_run)["log_history"] if entry["step"] == 3 and "eval_loss" in entry]
    assert summary["eval_loss"] == pytest.approx(then["eval_loss"], rel=1e-6)
    last = [entry["eval_loss"] for entry in state(best_run)["log_history"] if "eval_loss" in entry][-2]
    assert summary["eval_loss"] != pytest.approx(last, rel=1e-4)


@pytest.mark.slow
def test_a_run_stopped_at_its_best_step_finds_it_again_in_a_folder_that_moved_or_was_another_run(job, place, best_run):
    """The stop comes before the evaluation of that step, which is made up for when the run goes on."""
    losses = {2: 5.0, 3: 1.0, 5: 2.0}
    job(BEST, "stopped-best", 2, code=75, target=train_judged, args=(losses, 3))
    run = place / "outputs" / "moved-best"
    (place / "outputs" / "stopped-best").rename(run)
    assert state(run / "checkpoint-3")["best_global_step"] == 2
    job(f"{BEST} --resume {run}/checkpoint-3", "from-best", 2, target=train_judged, args=(losses,))
    assert adapter(place / "outputs" / "from-best") == adapter(best_run)
    job(BEST, "moved-best", 2, target=train_judged, args=(losses,))
    assert manifest_steps(run) == [3, LAST]
    assert adapter(run) == adapter(best_run)
    assert state(run)["best_model_checkpoint"] == str(run / "checkpoint-3")


def test_where_the_best_step_could_not_be_saved_the_best_of_the_others_counts(job, place):
    printed = job(BEST, "second-best", target=train_judged, args=({2: 5.0, 3: 1.0, 5: 2.0}, 0, 3)).output
    run = place / "outputs" / "second-best"
    assert "checkpoint-3 could not be written: refused; checkpoint-2 stays the last complete one." in printed
    assert manifest_steps(run) == [5, LAST]
    assert adapter(run) == adapter(run / "checkpoint-5")
    assert "The result has the weights of checkpoint-5, the checkpoint with the lowest evaluation loss." in printed


EARLY = "--global_batch_size 4 --num_train_epochs 3 --eval_fraction 0.2 --eval_steps 1 --early_stopping_patience 2"


def train_with_losses(argv: list[str], cwd: str, losses: dict[int, float], stop_at: int = 0) -> None:
    """train_ddp.py whose evaluations give the loss that `losses` has of the step, or 9; asked to stop in `stop_at`."""
    evaluate = DDPTrainer.evaluation_loop

    def judge(self: DDPTrainer, *args: Any, **given: Any) -> Any:
        found = evaluate(self, *args, **given)
        return found._replace(metrics=found.metrics | {"eval_loss": losses.get(self.state.global_step, 9.0)})

    with patch.object(DDPTrainer, "evaluation_loop", judge):
        train_judged(argv, cwd, losses, stop_at)


@pytest.mark.parametrize("stop_at", [0, 4])
def test_a_run_stops_early_where_the_loss_has_not_fallen_and_a_resumed_one_counts_on(job, place, stop_at):
    losses, name = {1: 8.0, 2: 3.0, 3: 4.0, 4: 5.0}, f"early-{stop_at}"
    if stop_at:
        # Step 3 was the first evaluation that was worse, and step 4 has not been evaluated.
        job(EARLY, name, code=75, target=train_with_losses, args=(losses, stop_at))
    printed = job(EARLY, name, target=train_with_losses, args=(losses,)).output
    assert f"Stopped at step 4 of {LAST}: the evaluation loss has not fallen for 2 evaluations." in printed
    run = place / "outputs" / name
    assert json.loads((run / "summary.json").read_text())["steps"] == 4
    assert adapter(run) == adapter(run / "checkpoint-2") != adapter(run / "checkpoint-4")


@pytest.mark.parametrize(
    ("folder", "run", "said"),
    [
        ("other/checkpoint-3", RUN, None),
        ("other/checkpoint-3", RUN | {"model_weights": "bb"}, "checkpoint-3, is of another run; it is not used."),
        ("other/checkpoint-3", None, "checkpoint-3, is not a checkpoint; it is not used."),
        ("other/weights", RUN, "weights, is not a checkpoint; it is not used."),
    ],
)
def test_the_best_checkpoint_that_a_state_names_is_taken_of_the_same_run_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str, run: dict[str, Any] | None, said: str | None
) -> None:
    """An edited state, or one from elsewhere, would make another run's weights the result of this one."""
    named = tmp_path / folder
    named.mkdir(parents=True)
    if run is not None:
        (named / manifest.FILE_NAME).write_text(Manifest(3, run, {}, {}).to_text())
    resumed = SimpleNamespace(resume_point=ResumePoint(tmp_path / "checkpoint-5", Manifest(5, RUN, {}, {})))
    known = ResumableTrainer._known_checkpoint(resumed, str(named))  # type: ignore[arg-type]
    assert known == (None if said else str(named))
    assert (said or "") in capsys.readouterr().out
