"""Exit codes and sentences that pass the launcher."""

from __future__ import annotations

import itertools
import os
import signal

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.ranks import run_ranks, train
from unsloth_ddp.distributed import exit_codes
from unsloth_ddp.distributed.exit_codes import (
    describe_exit_code,
    exit_with,
    first_to_tell,
    forget_exit_code,
    note_exit_code,
    note_saved_step,
)
from unsloth_ddp.utils.errors import UserError


def launchers_report(path, code: int) -> str:
    """Return what launchers print of a job whose rank 0 ended and whose rank 1 they ended then."""
    failures = {
        0: ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file=str(path)),
        1: ProcessFailure(local_rank=1, pid=2, exitcode=-15, error_file=str(path.parent / "none.json")),
    }
    return str(ChildFailedError("train_ddp.py", failures))


def test_the_launchers_report_ends_with_the_sentence(tmp_path):
    path = tmp_path / "error.json"
    note_exit_code(2, {"TORCHELASTIC_ERROR_FILE": str(path)}, sentence="train_ddp.py: error: max_length is 0.")
    assert "traceback : train_ddp.py: error: max_length is 0." in launchers_report(path, 2).splitlines()[-2]


def test_a_stop_without_a_sentence_is_named_too(tmp_path):
    path = tmp_path / "error.json"
    note_exit_code(75, {"TORCHELASTIC_ERROR_FILE": str(path)})
    assert "stopped on request (exit code 75); the same command continues" in launchers_report(path, 75)


def test_only_the_first_process_of_a_node_speaks_and_hides_secrets(tmp_path):
    path = tmp_path / "error.json"
    environ = {"TORCHELASTIC_ERROR_FILE": str(path)}
    note_exit_code(1, environ | {"LOCAL_RANK": "1"}, sentence="x")
    note_exit_code(0, environ, sentence="x")
    assert not path.exists()
    note_exit_code(1, environ, sentence="GET https://me:secret@host/")
    assert "secret" not in path.read_text()
    note_exit_code(1, {"TORCHELASTIC_ERROR_FILE": os.devnull + "/x"})


def test_a_new_start_does_not_end_with_the_code_of_the_one_before(tmp_path):
    """torchrun starts ranks again beside the same file."""
    environ = {"UNSLOTH_DDP_EXIT_CODE_FILE": str(tmp_path / "code")}
    note_exit_code(75, environ, sentence="stopped")
    assert (tmp_path / "code.why").read_text() == "stopped\n"
    forget_exit_code(environ | {"LOCAL_RANK": "1"})
    assert (tmp_path / "code").exists()
    forget_exit_code(environ)
    assert list(tmp_path.iterdir()) == []


def test_a_sentence_that_the_watchdog_has_told_is_not_told_again(monkeypatch, capsys):
    monkeypatch.setattr(exit_codes, "_printed", set())
    monkeypatch.setattr(os, "_exit", lambda code: None)
    exit_with(UserError("max_length is 0."), is_main=True)
    assert capsys.readouterr().err == "train_ddp.py: error: max_length is 0.\n"
    # The main process takes so long to end that its watchdog prints first.
    assert first_to_tell("seed is -1.")
    exit_with(UserError("seed is -1."), is_main=True)
    assert capsys.readouterr().err == ""


def test_only_a_node_that_joins_an_elastic_job_asks_its_launcher_to_stop(tmp_path, monkeypatch):
    code_file, signals = tmp_path / "code", []
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append((pid, number)))
    monkeypatch.setenv("UNSLOTH_DDP_EXIT_CODE_FILE", str(code_file))
    exit_with(UserError("seed is -1."), is_main=True)
    assert not signals
    monkeypatch.setenv("UNSLOTH_DDP_NODES", "1:2")
    exit_with(UserError("seed is -2."), is_main=False)
    assert signals.pop() == (os.getppid(), signal.SIGTERM) and code_file.read_text() == "2\n"
    # After a checkpoint the mistake came with another node, and the launcher starts this one again.
    note_saved_step(4)
    exit_with(UserError("seed is -3."), is_main=True)
    assert not signals


def test_the_exit_code_that_the_shell_sees_is_said():
    assert describe_exit_code(75, {}) == "exit code 75"
    assert describe_exit_code(75, {"TORCHELASTIC_RUN_ID": "x"}) == "exit code 75, which the launcher turns into 1"


def train_without_readers(argv: list[str], cwd: str) -> None:
    """train_ddp.py whose output nobody reads from the second step on, as under `| head` or a tee that was killed."""
    from unsloth_ddp.distributed.signals import StopRequest

    poll, steps = StopRequest.start_poll, itertools.count(1)

    def close_readers(self: StopRequest) -> None:
        if next(steps) == 2:
            reader, writer = os.pipe()
            os.close(reader)
            os.dup2(writer, 1)
            os.dup2(writer, 2)
        poll(self)

    StopRequest.start_poll = close_readers  # type: ignore[method-assign]
    train(argv, cwd)


def test_a_run_goes_on_without_a_reader_and_prints_to_its_log(tmp_path, tiny_model, uneven_rows):
    argv = f"--model {tiny_model} --dataset {uneven_rows} --run_name r --max_steps 4 --max_length 64".split()
    argv += ["--report_to", "none", "--gradient_checkpointing", "none", "--logging_steps", "1", "--save_steps", "2"]
    result = run_ranks(2, train_without_readers, argv, str(tmp_path), folder=tmp_path / "out").check()
    assert "Done: 4 steps" not in result.output
    log = (tmp_path / "outputs" / "r" / "logs" / "rank_0.log").read_text()
    assert "standard output cannot be written any more (Broken pipe)" in log
    assert "Done: 4 steps" in log and (tmp_path / "outputs" / "r" / "checkpoint-4").is_dir()
