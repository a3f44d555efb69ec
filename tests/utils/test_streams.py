"""Standard output without secrets, and without a reader."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

import pytest

from tests.conftest import REPO
from unsloth_ddp.utils.redaction import HIDDEN
from unsloth_ddp.utils.streams import LOGGER, ProtectedStream, protect_streams

TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"


def pipe(buffering: int = -1) -> tuple[int, TextIO]:
    """A pipe: the descriptor of its reader, and its writer as a text stream."""
    reader, writer = os.pipe()
    return reader, os.fdopen(writer, "w", buffering=buffering)


@pytest.fixture
def log(tmp_path: Path):
    """The kit's logger with a log file; the path of the file."""
    handler = logging.FileHandler(tmp_path / "rank_0.log")
    logging.getLogger(LOGGER).addHandler(handler)
    yield tmp_path / "rank_0.log"
    logging.getLogger(LOGGER).removeHandler(handler)
    handler.close()


def test_what_is_printed_holds_no_secret():
    reader, writer = pipe()
    stream = ProtectedStream(writer, "standard output")
    print("GET https://me:pass@word@host/x with", TOKEN, file=stream, flush=True)
    assert os.read(reader, 1000).decode() == f"GET https://{HIDDEN}@host/x with {HIDDEN}\n"
    os.close(reader)


@pytest.mark.parametrize("buffering", [-1, 1])
def test_without_a_reader_lines_go_to_the_log(log, buffering):
    reader, writer = pipe(buffering)
    stream = ProtectedStream(writer, "standard output")
    os.close(reader)
    print("step 1", file=stream)
    print("step 2", file=stream, flush=True)
    print(f"step 3 {TOKEN}", file=stream, flush=True)
    lost = "standard output cannot be written any more (Broken pipe); the run continues and writes to this log."
    assert log.read_text().splitlines() == [lost, "step 1", "step 2", f"step 3 {HIDDEN}"]
    # Native code that writes to the descriptor, and Python's last flush, meet no error either.
    os.write(writer.fileno(), b"x")
    writer.close()


def test_what_reached_the_reader_is_not_written_again(log):
    reader, writer = pipe()
    stream = ProtectedStream(writer, "standard output")
    print("step 1", file=stream, flush=True)
    os.close(reader)
    print("step 2", file=stream, flush=True)
    assert log.read_text().splitlines()[1:] == ["step 2"]


def test_a_thread_that_finds_the_stream_lost_logs_after_the_reason(log, monkeypatch):
    reader, writer = pipe()
    stream = ProtectedStream(writer, "standard output")
    os.close(reader)
    replace = os.dup2

    def print_meanwhile(*given: int) -> None:
        # As another thread may while this one waits for the system.
        print("step 2", file=stream)
        replace(*given)

    monkeypatch.setattr(os, "dup2", print_meanwhile)
    print("step 1", file=stream, flush=True)
    lost, *lines = log.read_text().splitlines()
    assert "cannot be written any more" in lost and lines == ["step 1", "step 2"]


def test_a_progress_bar_leaves_one_line_in_the_log(log):
    reader, writer = pipe()
    stream = ProtectedStream(writer, "standard error")
    os.close(reader)
    for percent in (0, 50, 100):
        stream.write(f"\r{percent}%")
        stream.flush()
    stream.write("\n")
    assert log.read_text().splitlines()[1:] == ["100%"]


def test_lines_wait_for_the_log_file(tmp_path):
    reader, writer = pipe()
    stream = ProtectedStream(writer, "standard output")
    os.close(reader)
    print("before the log", file=stream, flush=True)
    handler = logging.FileHandler(tmp_path / "late.log")
    logging.getLogger(LOGGER).addHandler(handler)
    print("after", file=stream, flush=True)
    logging.getLogger(LOGGER).removeHandler(handler)
    handler.close()
    assert (tmp_path / "late.log").read_text().splitlines()[1:] == ["before the log", "after"]


def test_both_streams_and_handlers_that_exist_are_protected(monkeypatch, tmp_path):
    reader, writer = pipe()
    monkeypatch.setattr(sys, "stderr", writer)
    monkeypatch.setattr(sys, "stdout", (tmp_path / "out").open("w"))
    # Another object on the same descriptor, as sys.__stderr__ is in the end.
    handler = logging.StreamHandler(os.fdopen(writer.fileno(), "w", closefd=False))
    library = logging.getLogger("a library")
    library.addHandler(handler)
    protect_streams()
    protected = sys.stderr
    protect_streams()
    assert sys.stderr is protected
    library.warning("Retrying https://user:secret@hub/api in 1s")
    library.removeHandler(handler)
    print(TOKEN, flush=True)
    assert os.read(reader, 1000).decode() == f"Retrying https://{HIDDEN}@hub/api in 1s\n"
    assert (tmp_path / "out").read_text() == HIDDEN + "\n"
    os.close(reader)


def test_a_slow_reader_gets_every_letter_of_a_text_larger_than_its_pipe():
    reader, writer = pipe()
    text = "\N{GRINNING FACE}ab" * 100_000
    found = []
    with ThreadPoolExecutor() as pool, os.fdopen(reader) as file:
        read = pool.submit(file.read)
        ProtectedStream(writer, "standard output").write(text)
        writer.close()
        found.append(read.result(timeout=60))
    assert found == [text]


CLOSED = """
import logging, os, sys
from pathlib import Path
from unsloth_ddp.utils.streams import LOGGER, protect_streams
protect_streams()
print("before the log")
logging.getLogger(LOGGER).addHandler(logging.FileHandler(sys.argv[1]))
sys.stdout.isatty(), print("step 1", flush=True), print("problem", file=sys.stderr)
descriptor = os.open(sys.argv[1] + ".2", os.O_WRONLY | os.O_CREAT)
os.write(1, b"native"), os.write(2, b"native")
assert descriptor > 2 and sys.stdin.read() == ""
"""


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-"])
def test_closed_streams_go_to_the_log_and_no_file_takes_their_numbers(closed, tmp_path):
    command = f'exec "{sys.executable}" -c "$1" "$2" {closed}'
    done = subprocess.run(
        ["bash", "-c", command, "bash", CLOSED, str(tmp_path / "log")], stdin=subprocess.DEVNULL, cwd=REPO, check=False
    )
    assert done.returncode == 0
    lines = (tmp_path / "log").read_text().splitlines()
    assert "standard output cannot be written any more (Bad file descriptor)" in lines[0]
    assert lines[1:3] == ["before the log", "step 1"] or lines[2:4] == ["before the log", "step 1"]
    assert ("problem" in lines) is ("2" in closed) and (tmp_path / "log.2").read_bytes() == b""
