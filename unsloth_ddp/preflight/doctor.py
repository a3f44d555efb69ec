"""Run `unsloth doctor --gpus` beside the checks of a node."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time

from unsloth_ddp.preflight.checks import Check
from unsloth_ddp.preflight.machine import check_doctor

DOCTOR_SECONDS = 150
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")


class Doctor:
    """`unsloth doctor --gpus`, run in the background because it takes about half a minute."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.report = ""
        self.began = time.monotonic()
        if importlib.util.find_spec("unsloth_cli") is None:
            self.report = "unsloth is not installed"
            return
        environ = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        environ = {name: value for name, value in environ.items() if not name.startswith(("TORCHELASTIC_", "GROUP_"))}
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        script = "from unsloth_cli import app; app()"
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", script, "doctor", "--gpus"],
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=subprocess.STDOUT,
                text=True,
                env=environ,
                start_new_session=True,
            )
        except OSError as error:
            self.report = f"could not be started: {error.strerror}"

    def check(self, node: int) -> Check:
        """Wait for its end and return its row of the table."""
        if self.process is None:
            return check_doctor(node, None, self.report)
        try:
            code = self.process.wait(max(1.0, DOCTOR_SECONDS - (time.monotonic() - self.began)))
        except subprocess.TimeoutExpired:
            self.end()
            return check_doctor(node, None, f"did not end within {DOCTOR_SECONDS} s")
        self.output.seek(0)
        return check_doctor(node, code, self.output.read())

    def end(self) -> None:
        """Kill it with every process that it started."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, 9)
            self.process.wait(5)
