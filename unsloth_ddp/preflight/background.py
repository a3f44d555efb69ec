"""Run a command beside the checks of a node, outside the launcher's job."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "GROUP_")


class BackgroundCommand:
    """A command that runs in a session of its own, without the launcher's variables and without input.

    Args:
        words: the command line.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, words: list[str]) -> None:
        environ = {
            name: value
            for name, value in os.environ.items()
            if name not in LAUNCHER_VARIABLES and not name.startswith(LAUNCHER_PREFIXES)
        }
        self._began = time.monotonic()
        self._file = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )

    def wait(self, seconds: float) -> int | None:
        """Wait until `seconds` after the start; return the exit code, None if the command was killed by then."""
        try:
            return self._process.wait(max(1.0, seconds - (time.monotonic() - self._began)))
        except subprocess.TimeoutExpired:
            self.end()
            return None

    @property
    def output(self) -> str:
        """Everything that the command has printed."""
        self._file.seek(0)
        return self._file.read()

    def end(self) -> None:
        """Kill the command with every process that it started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(5)
