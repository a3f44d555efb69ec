"""A parity check that is ended, or ends a launch, leaves no process behind; ranks are in sessions of their own."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from tests.conftest import REPO
from tests.waiting import is_running, wait_until
from unsloth_ddp.parity import __main__ as parity
from unsloth_ddp.parity.launches import Launch, launch_command
from unsloth_ddp.parity.processes import StoppedBySignal, run_launcher, stopped_by_signals

# Says which process it is, and never ends by itself.
RANK = """
import os, signal, sys
folder = sys.argv[1] if os.path.isdir(sys.argv[1]) else os.environ["PIDS"]
with open(os.path.join(folder, "new" + os.environ.get("RANK", "")), "w") as file:
    file.write(str(os.getpid()))
os.rename(file.name, os.path.join(folder, str(os.getpid())))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    signal.pause()
"""
# Starts one in a session of its own, as torch's launcher does, and waits for it.
LAUNCHER = """
import subprocess, sys
subprocess.Popen([sys.executable, {rank!r}, {folder!r}], start_new_session=True).wait()
"""


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file for each rank that has begun; what is left of them at the end is killed."""
    folder = tmp_path / "pids"
    folder.mkdir()
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "launcher.py").write_text(LAUNCHER.format(rank=str(tmp_path / "rank.py"), folder=str(folder)))
    monkeypatch.setenv("PIDS", str(folder))
    yield folder
    for pid in begun(folder):
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


def begun(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]


def test_the_ranks_of_accelerate_end_with_their_launch(pids: Path, tmp_path: Path) -> None:
    words = launch_command(Launch("accelerate", 2, 1, 1), tmp_path / "rank.py", tmp_path / "none.yaml", cpu=True)
    log = tmp_path / "log"

    def strike() -> None:
        wait_until(lambda: len(begun(pids)) == 2, 200, f"two ranks; {log}")
        os.kill(os.getpid(), signal.SIGTERM)

    striking = threading.Thread(target=strike)
    striking.start()
    with pytest.raises(StoppedBySignal), stopped_by_signals():
        run_launcher(words, os.environ, log, timeout=300)
    striking.join(60)
    assert len(begun(pids)) == 2 and not any(is_running(pid) for pid in begun(pids))


@pytest.mark.slow
def test_a_launch_over_its_time_leaves_no_rank(pids: Path, tmp_path: Path) -> None:
    words = [sys.executable, str(tmp_path / "launcher.py")]
    assert run_launcher(words, os.environ, tmp_path / "log", timeout=10) is None
    assert len(begun(pids)) == 1 and not is_running(begun(pids)[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_check_and_its_launches_at_once(
    number: signal.Signals, pids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def strike() -> None:
        wait_until(lambda: bool(begun(pids)), 200, "the launch")
        os.kill(os.getpid(), number)

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    before = signal.getsignal(number)
    striking = threading.Thread(target=strike)
    striking.start()
    # Without the signal it would take its 600 seconds.
    code = parity.main(
        ["--use_cpu", "--dataset", str(REPO / "demo" / "train.jsonl"), "--model", str(REPO / "demo" / "model"),
         "--script", str(tmp_path / "launcher.py"), "--timeout", "600"]
    )  # fmt: skip
    striking.join(60)
    assert code == 128 + number
    assert f"parity: ended by {number.name}; every launch was killed." in capsys.readouterr().err
    assert len(begun(pids)) == 1 and not is_running(begun(pids)[0])
    assert not list((tmp_path / "temporary").iterdir())
    assert signal.getsignal(number) == before


def test_a_temporary_folder_that_is_not_there_gets_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    code = parity.main(
        ["--use_cpu", "--dataset", str(REPO / "demo" / "train.jsonl"), "--model", str(REPO / "demo" / "model")]
    )
    said = capsys.readouterr().err
    assert code == 2 and said.startswith("parity: error: The launches cannot be run: [Errno 2] No such file")
    assert "set TMPDIR to use another" in said
