"""Run `unsloth doctor --gpus` beside the checks of a node."""

from __future__ import annotations

import importlib.util
import sys

from unsloth_ddp.preflight.background import BackgroundCommand
from unsloth_ddp.preflight.checks import Check
from unsloth_ddp.preflight.machine import check_doctor

DOCTOR_SECONDS = 150
DOCTOR = "from unsloth_cli import app; app()"


class Doctor:
    """`unsloth doctor --gpus`, run in the background because it takes about half a minute."""

    def __init__(self) -> None:
        self.command: BackgroundCommand | None = None
        self.reason = "unsloth is not installed"
        if importlib.util.find_spec("unsloth_cli") is None:
            return
        try:
            self.command = BackgroundCommand([sys.executable, "-c", DOCTOR, "doctor", "--gpus"])
        except OSError as error:
            self.reason = f"could not be started: {error.strerror}"

    def check(self, node: int) -> Check:
        """Wait for its end and return its row of the table."""
        if self.command is None:
            return check_doctor(node, None, self.reason)
        code = self.command.wait(DOCTOR_SECONDS)
        if code is None:
            return check_doctor(node, None, f"did not end within {DOCTOR_SECONDS} s")
        return check_doctor(node, code, self.command.output)

    def end(self) -> None:
        """Kill it with every process that it started."""
        if self.command is not None:
            self.command.end()
