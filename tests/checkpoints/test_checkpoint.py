"""Checkpoints for real: what is written, what is offered, and that a resumed run ends like an uninterrupted one."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.jobs import LAST, WHOLE_RUN, assert_same, copy_until, ends, manifest_steps
from tests.ranks import train
from unsloth_ddp.distributed.signals import StopRequest


@pytest.mark.parametrize(("ranks", "steps"), [pytest.param(1, (3,), marks=pytest.mark.slow), (2, (4, LAST))])
def test_a_resumed_run_ends_like_an_uninterrupted_one(job, whole_run, ranks, steps):
    """Killed in the middle of an epoch, at its border before the evaluation that was due, and after the last step."""
    whole = whole_run(ranks)
    expected = ends(whole, LAST)
    assert len([entry for entry in expected["history"] if "eval_loss" in entry]) == 3
    for step in steps:
        resumed = copy_until(whole, step, f"from-{step}-of-{ranks}")
        printed = job(WHOLE_RUN, resumed.name, ranks).output
        assert f"Resuming from {resumed}/checkpoint-{step}, step {step};" in printed
        assert_same(ends(resumed, LAST), expected, f"from step {step}")


def train_and_signal(argv: list[str], cwd: str, rank: int, number: int, step: int) -> None:
    """train_ddp.py whose rank `rank` signals itself in its step `step` (counted from this start)."""
    ask = StopRequest.start_poll
    asked = itertools.count(1)

    def ask_and_signal(self: StopRequest) -> None:
        if next(asked) == step and os.environ["RANK"] == str(rank):
            os.kill(os.getpid(), number)
        ask(self)

    StopRequest.start_poll = ask_and_signal  # type: ignore[method-assign]
    train(argv, cwd)


def train_after_the_time_limit(argv: list[str], cwd: str) -> None:
    """train_ddp.py whose --max_time is over when the first step begins."""
    ask = StopRequest.start_poll

    def ask_late(self: StopRequest) -> None:
        self._deadline = 0.0
        ask(self)

    StopRequest.start_poll = ask_late  # type: ignore[method-assign]
    train(argv, cwd)


def train_and_stop_in_evaluation(argv: list[str], cwd: str, batch: int) -> None:
    """train_ddp.py whose rank 1 is asked to stop during evaluation batch `batch`, counted from this start."""
    interrupt, batches = StopRequest.interrupt_evaluation, itertools.count(1)

    def request(self: StopRequest) -> None:
        if next(batches) == batch and os.environ["RANK"] == "1":
            self.request_stop("SIGTERM")
        interrupt(self)

    StopRequest.interrupt_evaluation = request  # type: ignore[method-assign]
    train(argv, cwd)


def test_a_stop_interrupts_an_evaluation_and_the_resumed_run_makes_up_for_it(job, whole_run, place):
    """Two batches an evaluation, after steps 3, 6 and 9: asked in the one of step 6, then in that of the last step."""
    options, name = f"{WHOLE_RUN} --save_steps 100 --per_device_eval_batch_size 1", "interrupted"
    run = place / "outputs" / name
    printed = job(options, name, 2, 75, train_and_stop_in_evaluation, (3,)).output
    assert f"Stopped on SIGTERM; the same command resumes from {run}/checkpoint-6" in printed
    evaluated = [entry["step"] for entry in logged_until(run / "checkpoint-6") if "eval_loss" in entry]
    assert evaluated == [3], "the evaluation of step 6 was given up"
    # Evaluates step 6 first, so the third batch is the first one of the last evaluation.
    printed = job(options, name, 2, 75, train_and_stop_in_evaluation, (3,)).output
    assert f"resumes from {run}/checkpoint-{LAST}" in printed
    job(options, name, 2)
    found, expected = ends(run, LAST), ends(whole_run(2), LAST)
    assert_same(found["weights"], expected["weights"])
    losses = [[entry["eval_loss"] for entry in e["history"] if "eval_loss" in entry] for e in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 3


def logged_until(folder: Path) -> list[dict]:
    """The log of losses in a checkpoint."""
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


def test_a_stop_on_one_rank_stops_all_with_a_checkpoint_and_the_run_goes_on(job, whole_run, place):
    """SIGTERM, SIGUSR1, a time limit, then to the end: bit-identical, whatever step each stop came at."""
    note = place / "code"
    environ = {"UNSLOTH_DDP_EXIT_CODE_FILE": str(note)}
    stopped = place / "outputs" / "stopped"
    options = f"{WHOLE_RUN} --save_steps 100"
    for number, rank in ((signal.SIGTERM, 1), (signal.SIGUSR1, 0)):
        note.unlink(missing_ok=True)
        args = (rank, number, 1)
        printed = job(options, "stopped", 2, code=75, target=train_and_signal, args=args, environ=environ).output
        (step,) = manifest_steps(stopped)[-1:]
        assert f"Stopped on {number.name}; the same command resumes from {stopped}/checkpoint-{step}" in printed
        assert note.read_text() == "75\n"
        assert not (stopped / "summary.json").exists() and not (place / "code.done").exists()
    late = f"{options} --max_time 1h"
    printed = job(late, "stopped", 2, code=75, target=train_after_the_time_limit).output
    assert "Stopped on max_time 1h" in printed
    # A stop at the end of an epoch is saved before its evaluation, which the next stop interrupts without another save.
    assert len(manifest_steps(stopped)) in (2, 3)
    job(options, "stopped", 2, environ=environ)
    assert_same(ends(stopped, LAST), ends(whole_run(2), LAST))
    assert (place / "code.done").exists()


def test_another_world_size_goes_on_at_the_right_row_and_says_so(job, whole_run, place):
    resumed = copy_until(whole_run(2), 4, "fewer")
    printed = job(WHOLE_RUN, "fewer", 1).output
    assert "Changed since the checkpoint: world_size 2 -> 1, gradient_accumulation_steps 2 -> 4." in printed
    found, expected = (json.loads((f / "trainer_state.json").read_text()) for f in (resumed, whole_run(2)))
    tokens = [[e["num_tokens"] for e in state["log_history"] if "num_tokens" in e] for state in (found, expected)]
    assert tokens[0] == tokens[1] and len(set(tokens[0])) > 3


def test_a_changed_run_is_refused_with_both_values_unless_told_otherwise(job, whole_run, place, uneven_rows):
    copy_until(whole_run(1), 3, "changed")
    # Of an option that takes a list, both count.
    more_rows = place / "more.jsonl"
    more_rows.write_text("\n".join(uneven_rows.read_text().splitlines()[:-1]) + "\n")
    checkpoint = f"{place}/outputs/changed/checkpoint-3"
    for change, values in (
        ("--seed 7 --global_batch_size 2", "seed 42 -> 7, global_batch_size 4 -> 2"),
        (f"--dataset {more_rows}", "steps 9 -> 15, rows 10 -> 20, data "),
    ):
        printed = job(f"{WHOLE_RUN} {change}", "changed", code=2).output
        assert f"{checkpoint} was written by another run ({values}" in printed
        assert printed.splitlines()[-1].startswith("train_ddp.py: error: ") and "Traceback" not in printed
    # A PEFT model would leave out tensors that do not fit, or end in a traceback.
    printed = job(f"{WHOLE_RUN} --lora_target_modules q_proj --resume_anyway", "changed", code=2).output
    assert f"{checkpoint} cannot be resumed: other weights are trained than before (lora_target_modules" in printed
    assert "Traceback" not in printed
    printed = job(f"{WHOLE_RUN} --seed 7 --resume_anyway", "changed").output
    assert "resume_anyway: seed 42 -> 7." in printed


def test_a_resumed_run_that_evaluates_at_other_steps_learns_the_same(job, whole_run):
    resumed = copy_until(whole_run(1), 3, "unevaluated")
    job(f"{WHOLE_RUN} --eval_strategy no", "unevaluated")
    found, expected = (load_file(run / "adapter_model.safetensors") for run in (resumed, whole_run(1)))
    # With dropout, whose numbers the evaluation's loader must not shift.
    assert_same(found, expected)


def test_a_damaged_checkpoint_is_skipped_by_name_and_goes_with_the_next_save(job, whole_run, place):
    resumed = copy_until(whole_run(1), 3, "damaged")
    torn = resumed / "checkpoint-3" / "optimizer.pt"
    torn.write_bytes(torn.read_bytes()[:-100])
    (resumed / "checkpoint-100").mkdir()
    (resumed / "checkpoint.partial" / "checkpoint-4").mkdir(parents=True)
    printed = job(f"{WHOLE_RUN} --save_total_limit 2", "damaged").output
    assert "checkpoint-100 is skipped: it has no manifest.json, so it was not written to its end." in printed
    assert "checkpoint-3 is skipped: optimizer.pt has" in printed
    assert f"Resuming from {resumed}/checkpoint-2, step 2;" in printed
    assert manifest_steps(resumed) == [LAST - 1, LAST]
    printed = job(f"{WHOLE_RUN} --resume {resumed}/checkpoint-1", "other", code=2).output
    assert "checkpoint-1: there is no such folder" in printed


def test_a_finished_run_is_refused_and_an_unfinished_one_without_checkpoint_begins_anew(job, whole_run, place):
    finished = whole_run(1)
    assert "holds a finished run" in job(WHOLE_RUN, finished.name, code=2).output
    begun = copy_until(finished, 0, "begun")
    printed = job(f"{WHOLE_RUN} --num_train_epochs 1", "begun", code=2).output
    assert f"{begun} holds another run" in printed
    printed = job(WHOLE_RUN, "begun").output
    assert "holds an unfinished run without a complete checkpoint; it starts again at step 0." in printed
    assert_same(ends(begun, LAST), ends(finished, LAST))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")
def test_a_full_disk_keeps_the_last_whole_checkpoint_and_the_run_goes_on(job, whole_run, place):
    """Room for little more than one checkpoint: the second save fails, and so does every later one, and the result."""
    disk = place / "outputs" / "small"
    disk.mkdir(parents=True)
    checkpoint = sum(path.stat().st_size for path in (whole_run(2) / "checkpoint-4").iterdir())
    size = f"size={int(checkpoint * 1.15 + 100_000)}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(disk)], check=True)
    try:
        options = f"{WHOLE_RUN} --output_dir {place}/outputs/small --save_steps 4 --save_total_limit 3"
        printed = job(options, "full", 2, code=1).output
        assert f"checkpoint-8 could not be written: no space is left on the disk of {disk}/full; " in printed
        assert "checkpoint-4 stays the last complete one. The next save tries again." in printed
        assert "Training ended, but its result could not be written" in printed
        assert manifest_steps(disk / "full") == [4]
        assert not (disk / "full" / "summary.json").exists()
        subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)
        assert "checkpoint-4, step 4;" in job(options, "full", 2).output
        assert (disk / "full" / "adapter_model.safetensors").is_file()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def train_on_node_of_its_own(argv: list[str], cwd: str) -> None:
    """train_ddp.py as if each rank were alone on a node with a disk of its own."""
    rank = os.environ["RANK"]
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    own = Path(cwd) / f"node-{rank}"
    own.mkdir(exist_ok=True)
    train(argv, str(own))


@pytest.mark.slow
def test_without_a_shared_disk_the_main_process_keeps_what_all_need(job, whole_run, place):
    whole = whole_run(2)
    first = place / "node-0" / "outputs" / "apart"
    options = f"{WHOLE_RUN} --save_steps 4"
    copies = set(Path(tempfile.gettempdir()).glob("unsloth_ddp_checkpoint_*"))
    job(options, "apart", 2, target=train_on_node_of_its_own)
    assert_same(ends(first, LAST), ends(whole, LAST))
    assert manifest_steps(first) == [4, 8, LAST]
    assert not list((place / "node-1" / "outputs" / "apart").glob("checkpoint*"))
    (first / "summary.json").unlink()
    for path in (first / "checkpoint-8", first / f"checkpoint-{LAST}"):
        shutil.rmtree(path)
    assert "checkpoint-4, step 4;" in job(options, "apart", 2, target=train_on_node_of_its_own).output
    assert_same(ends(first, LAST), ends(whole, LAST))
    assert set(Path(tempfile.gettempdir()).glob("unsloth_ddp_checkpoint_*")) <= copies


def train_on_a_disk_of_its_own(argv: list[str], cwd: str) -> None:
    """Run train_ddp.py as if each rank were alone on a node, which has another disk at the same path."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    own, disk = (Path(cwd, name) for name in (f"disk-{os.environ['RANK']}", "disk"))
    for path in (own, disk):
        path.mkdir(exist_ok=True)
    clone_newns = 0x20000
    assert ctypes.CDLL(None, use_errno=True).unshare(clone_newns) == 0
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", str(own), str(disk)], check=True)
    train(argv, str(disk))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_no_node_trains_from_a_copy_that_the_main_process_has_not_verified(job, whole_run, place):
    """Node 1 has no checkpoint, one without optimizer, one with that of another step, and one that is whole."""
    options, run = f"{WHOLE_RUN} --save_steps 4", "outputs/disks"
    job(options, "disks", 2, target=train_on_a_disk_of_its_own)
    first, second = (place / f"disk-{rank}" / run for rank in (0, 1))
    assert not list(second.glob("checkpoint*"))
    kept = place / "kept"
    shutil.copytree(first, kept)
    for copy, said in (
        ("none", "it does not hold that folder"), ("less", "of its own copy, optimizer.pt is missing"),
        ("other", "of its own copy, the content of optimizer.pt does not match its checksum"), ("whole", None),
    ):  # fmt: skip
        for folder in (first, second):
            shutil.rmtree(folder)
        shutil.copytree(kept, first)
        (first / "summary.json").unlink()
        for path in (first / "checkpoint-8", first / f"checkpoint-{LAST}"):
            shutil.rmtree(path)
        if copy != "none":
            shutil.copytree(first / "checkpoint-4", second / "checkpoint-4")
        if copy == "less":
            (second / "checkpoint-4" / "optimizer.pt").unlink()
        if copy == "other":
            shutil.copy(kept / "checkpoint-8" / "optimizer.pt", second / "checkpoint-4")
        printed = job(options, "disks", 2, target=train_on_a_disk_of_its_own).output
        assert "checkpoint-4, step 4;" in printed
        assert (f"Node 1 is sent checkpoint-4 by node 0: {said}." in printed) is (said is not None), printed
        assert_same(ends(first, LAST), ends(whole_run(2), LAST), copy)
