"""Exit codes and sentences that pass the launcher."""

from __future__ import annotations

import os

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from unsloth_ddp.distributed.exit_codes import describe_exit_code, note_exit_code


def launchers_report(path, code: int) -> str:
    """What torchrun and accelerate print of a job whose rank 0 ended and whose rank 1 was then ended by the launcher."""
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


def test_the_exit_code_that_the_shell_sees_is_said():
    assert describe_exit_code(75, {}) == "exit code 75"
    assert describe_exit_code(75, {"TORCHELASTIC_RUN_ID": "x"}) == "exit code 75, which the launcher turns into 1"
