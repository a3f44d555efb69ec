"""Writes that fail: a full disk, a folder that cannot be written, a tracker or a log that gives up.

The errors are the kernel's own where it can be made to give them (a limit on file sizes, /dev/full).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.jobs import LAST, WHOLE_RUN, assert_same, ends, manifest_steps
from tests.ranks import train
from tests.runtimes import cpu_runtime
from unsloth_ddp.checkpoints.host_copy import HostCopies
from unsloth_ddp.checkpoints.writer import ASIDE, MARGIN, Checkpoints
from unsloth_ddp.model.adapter import merge
from unsloth_ddp.run import stages, summary
from unsloth_ddp.utils.files import json as json_file

# What is written after the last checkpoint, in this order.
FINAL, MERGED, SUMMARY = 0, -1, -2


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Every write beyond `size` bytes fails, as over a quota."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def refusing(owner: Any, name: str, code: int, when: Any = lambda *_, **__: True) -> Any:
    """`owner.name`, which fails with this errno for the arguments that `when` is true of."""
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if when(*args, **kwargs):
            raise OSError(code, os.strerror(code), str(args[0]))
        return real(*args, **kwargs)

    return patch.object(owner, name, call)


FAULTS = {
    "unwritable": lambda: refusing(Path, "mkdir", errno.EACCES, lambda path, *_, **__: path.name == ASIDE),
    "too large": lambda: largest_file(20_000),
    "small too large": lambda: largest_file(4_096),
    "optimizer too large": lambda: largest_file(200_000),
    "not flushed": lambda: refusing(os, "fsync", errno.EIO),
    "no summary": lambda: refusing(
        json_file, "write_whole", errno.ENOSPC, lambda path, *_: path.name.startswith("summary")
    ),
    "no thread": lambda: patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")),
    "no memory for the copy": lambda: patch.object(HostCopies, "of", side_effect=MemoryError),
    "not renamed": lambda: refusing(Path, "rename", errno.EROFS, lambda path, *_: path.parent.name == ASIDE),
}


def train_with_faults(argv: list[str], cwd: str, faults: dict[int, tuple[int, str]]) -> None:
    """train_ddp.py, where the save of a step, or FINAL, fails on one rank: {step: (rank, which of FAULTS)}."""
    save, save_final, save_merged, finish = Checkpoints.save, Checkpoints.save_final, merge.save_merged, summary.finish

    def fault(step: int) -> contextlib.AbstractContextManager:
        rank, name = faults.get(step, (-1, ""))
        return FAULTS[name]() if rank == int(os.environ["RANK"]) else contextlib.nullcontext()

    def save_with_fault(self: Checkpoints, step: int, *args: Any) -> None:
        self.settle()
        with fault(step):
            save(self, step, *args)
            # The file of this step is written in a thread.
            self.settle()

    def save_final_with_fault(self: Checkpoints, *args: Any) -> str | None:
        with fault(FINAL):
            return save_final(self, *args)

    def merge_with_fault(*args: Any) -> None:
        with fault(MERGED):
            save_merged(*args)

    def finish_with_fault(*args: Any) -> None:
        with fault(SUMMARY):
            finish(*args)

    with (
        patch.object(Checkpoints, "save", save_with_fault),
        patch.object(Checkpoints, "save_final", save_final_with_fault),
        patch.object(merge, "save_merged", merge_with_fault),
        patch.object(summary, "finish", finish_with_fault),
    ):
        train(argv, cwd)


def test_failed_saves_are_said_and_the_next_ones_succeed(job, whole_run, place):
    faults = {
        1: (0, "unwritable"), 2: (0, "too large"), 4: (0, "optimizer too large"), 5: (0, "not flushed"),
        6: (0, "not renamed"), 7: (0, "no thread"), 8: (0, "no memory for the copy"),
    }  # fmt: skip
    printed = job(WHOLE_RUN, "failing-saves", 2, target=train_with_faults, args=(faults,)).output
    run = place / "outputs" / "failing-saves"
    said = [line for line in printed.splitlines() if "could not be written" in line]
    assert len(said) == len(faults), printed
    for line, reason in zip(
        said,
        (
            f"checkpoint-1 could not be written: Permission denied ({run}/{ASIDE}); there is no earlier one.",
            "checkpoint-2 could not be written: ",
            "checkpoint-4 could not be written: ",
            "checkpoint-5 could not be written: Input/output error",
            "checkpoint-6 could not be written: Read-only file system",
            "checkpoint-7 could not be written: the system starts no more threads (a limit on processes",
            "checkpoint-8 could not be written: no host memory is left for it;",
        ),
        strict=True,
    ):
        assert line.startswith(reason), line
        assert line.endswith("The next save tries again.")
    assert "File too large" in said[1] and "file sizes" in said[2]
    assert all("checkpoint-3 stays the last complete one" in line for line in said[2:])
    assert manifest_steps(run) == [3, LAST]
    assert not list(run.glob("*.partial"))
    assert_same(ends(run, LAST), ends(whole_run(2), LAST))


@pytest.mark.slow
def test_a_run_whose_saves_all_fail_ends_with_its_result_and_an_error(job, whole_run, place):
    faults = dict.fromkeys(range(1, LAST + 1), (0, "optimizer too large"))
    printed = job(WHOLE_RUN, "never-saved", 2, code=1, target=train_with_faults, args=(faults,)).output
    run = place / "outputs" / "never-saved"
    assert (
        f"The result is written and complete, but no checkpoint was: checkpoint-{LAST} could not be written" in printed
    )
    assert manifest_steps(run) == []
    whole = whole_run(2)
    assert (run / "adapter_model.safetensors").read_bytes() == (whole / "adapter_model.safetensors").read_bytes()
    assert (run / "summary.json").is_file()


@pytest.mark.slow
def test_a_result_that_cannot_be_written_is_said_and_comes_with_the_next_start(job, whole_run, place):
    faults = {LAST: (0, "too large"), FINAL: (0, "too large")}
    printed = job(WHOLE_RUN, "no-result", 2, code=1, target=train_with_faults, args=(faults,)).output
    run = place / "outputs" / "no-result"
    assert f"Training ended, but its result could not be written to {run}: " in printed
    assert (
        f"{run}/checkpoint-{LAST - 1} is the last complete checkpoint. Make room, and run the same command" in printed
    )
    assert "Traceback" not in printed
    assert manifest_steps(run) == [*range(1, LAST)]
    assert not [*run.glob("*.partial"), *run.glob("adapter*"), *run.glob("summary*")]
    assert f"Resuming from {run}/checkpoint-{LAST - 1}" in job(WHOLE_RUN, "no-result", 2).output
    assert_same(ends(run, LAST), ends(whole_run(2), LAST))


@pytest.mark.slow
def test_what_comes_after_the_trained_model_is_made_up_for_by_the_next_start(job, place):
    options = "--global_batch_size 4 --max_steps 2 --save_steps 1 --merge"
    run = place / "outputs" / "afterwards"
    for faults, what, there in (
        ({MERGED: (0, "too large")}, "the merged model", []),
        ({SUMMARY: (0, "no summary")}, "summary.json", ["merged"]),
    ):
        printed = job(options, "afterwards", 2, code=1, target=train_with_faults, args=(faults,)).output
        assert f"The trained model is in {run}, but {what} could not be written: " in printed
        assert "run the same command again: it finishes the run." in printed
        assert "Traceback" not in printed
        assert (run / "adapter_model.safetensors").is_file()
        assert [path.name for path in (*run.glob("merged*"), *run.glob("summary*"))] == there
    assert f"Resuming from {run}/checkpoint-2" in job(options, "afterwards", 2).output
    assert (run / "summary.json").is_file() and (run / "merged" / "model.safetensors").is_file()


def test_a_save_without_room_for_what_it_will_write_is_not_begun(tmp_path, monkeypatch, capsys):
    checkpoints = Checkpoints(cpu_runtime(), tmp_path, {}, {}, None, least_bytes=10_000)
    begun, usage = [], shutil.disk_usage(tmp_path)

    def save(step: int, free: int) -> bool:
        def write(aside: Path) -> None:
            begun.append(step)
            (aside / f"checkpoint-{step}").mkdir()
            (aside / f"checkpoint-{step}" / "weights").write_bytes(bytes(50_000))

        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free + MARGIN))
        checkpoints.save(step, write)
        checkpoints.settle()
        return checkpoints.failed is None

    assert [save(1, 9_999), save(2, 10_000), save(3, 49_999), save(4, 50_000)] == [False, True, False, True]
    assert begun == [2, 4]
    assert capsys.readouterr().out.count("no space is left on the disk") == 2


# ---- trackers and logs ----


def train_with_failing_reports(argv: list[str], cwd: str, method: str) -> None:
    """train_ddp.py on a full disk of its logs, with a TensorBoard writer whose `method` fails from its third call."""
    from torch.utils.tensorboard import SummaryWriter

    calls = iter(range(100))

    def start_logging(folder: Path, runtime: Any) -> None:
        begin(folder, runtime)
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.FileHandler):
                handler.setStream(Path("/dev/full").open("w"))  # noqa: SIM115

    begin = stages.start_logging
    late = 0 if method == "close" else 2
    with (
        patch.object(stages, "start_logging", start_logging),
        refusing(SummaryWriter, method, errno.ENOSPC, lambda *_, **__: next(calls) >= late),
    ):
        train(argv, cwd)


@pytest.mark.parametrize(("method", "ranks"), [pytest.param("add_scalar", 2, marks=pytest.mark.slow), ("close", 1)])
def test_a_tracker_or_a_log_that_cannot_be_written_costs_only_itself(job, whole_run, place, method, ranks):
    name = f"no-{method}"
    options = f"{WHOLE_RUN} --report_to tensorboard"
    printed = job(options, name, ranks, target=train_with_failing_reports, args=(method,)).output
    run = place / "outputs" / name
    assert (
        printed.count("TensorBoard failed, so the run stops reporting to it: [Errno 28] No space left on device") == 1
    ), printed
    assert printed.count("can no longer be written") == 1, printed
    assert "Traceback" not in printed and "Exception ignored" not in printed, printed
    assert (run / "summary.json").is_file()
    assert_same(ends(run, LAST), ends(whole_run(ranks), LAST))


def test_a_tracker_that_cannot_begin_costs_only_itself(job, place):
    (place / "file").write_text("")
    environ = {"TENSORBOARD_LOGGING_DIR": f"{place}/file/tensorboard"}
    options = "--global_batch_size 4 --max_steps 2 --report_to tensorboard"
    printed = job(options, "no-beginning", environ=environ).output
    assert printed.count("TensorBoard failed, so the run stops reporting to it: [Errno 20] Not a directory") == 1, (
        printed
    )
    assert (place / "outputs" / "no-beginning" / "adapter_model.safetensors").is_file()


def train_until_removed(argv: list[str], cwd: str, folder: str, step: int) -> None:
    """Run train_ddp.py; the run's folder is removed after this step was saved."""
    save = Checkpoints.save

    def then_remove(self: Checkpoints, saved: int, *args: Any) -> None:
        save(self, saved, *args)
        if saved == step:
            self.settle()
            if os.environ["RANK"] == "0":
                shutil.rmtree(folder)

    with patch.object(Checkpoints, "save", then_remove):
        train(argv, cwd)


def train_until_removed_at_the_end(argv: list[str], cwd: str, folder: str) -> None:
    """Run train_ddp.py; the run's folder is removed after its result was saved."""
    save = Checkpoints.save_final

    def then_remove(self: Checkpoints, *args: Any) -> str | None:
        problem = save(self, *args)
        shutil.rmtree(folder)
        return problem

    with patch.object(Checkpoints, "save_final", then_remove):
        train(argv, cwd)


def test_a_result_that_somebody_removes_is_told_and_the_next_start_trains_again(job, place):
    run, options = place / "outputs" / "gone", "--global_batch_size 4 --max_steps 1 --save_strategy no"
    printed = job(options, "gone", code=1, target=train_until_removed_at_the_end, args=(str(run),)).output
    assert f"its result could not be written to {run}: somebody removed that folder meanwhile; " in printed
    assert "Traceback" not in printed and not (run / "summary.json").exists()
    # What a killed save left, and a log that cannot be made.
    (run / "checkpoint.partial" / "checkpoint-1").mkdir(parents=True)
    (run / "logs").mkdir(exist_ok=True)
    (run / "logs" / "rank_0.log").symlink_to("elsewhere.log")
    printed = job(options, "gone").output
    assert (run / "summary.json").is_file() and not list(run.glob("*.partial"))


def test_a_run_whose_folder_is_removed_says_so_and_fails_with_its_result_written(job, place):
    run = place / "outputs" / "removed"
    result = job(f"{WHOLE_RUN} --save_steps 4", "removed", code=1, target=train_until_removed, args=(str(run), 4))
    assert f"{run} was removed during training; it is created again" in result.output
    assert f"The result is in {run}, but that folder was removed while the run trained" in result.output
    assert (run / "adapter_model.safetensors").is_file()
    assert manifest_steps(run) == [8, LAST]
