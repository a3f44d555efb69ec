"""Run `unsloth doctor --gpus` and the check of the training arguments beside the other checks of a node.

Both are commands outside the launcher's job: they take seconds to import what they need, and TRL's config joins the job
of the process that makes it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.parse import read_config
from unsloth_ddp.preflight.checks import Finding, failure, not_checked, warning
from unsloth_ddp.utils.errors import UserError

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "GROUP_")
LIMIT_SECONDS = 150
DOCTOR = "from unsloth_cli import app; app()"
# The exit code of a run that a user's mistake ends.
REFUSED = UserError.exit_code
# Options whose values the libraries may refuse; with their defaults the check has nothing to find.
CHECKED = ("optim", "lr_scheduler_type", "report_to", "trainer_args")


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


class Doctor:
    """`unsloth doctor --gpus`, which takes about half a minute."""

    name = "unsloth doctor --gpus"

    def __init__(self) -> None:
        self.command: BackgroundCommand | None = None
        self.reason = "unsloth is not installed"
        if importlib.util.find_spec("unsloth_cli") is None:
            return
        try:
            self.command = BackgroundCommand([sys.executable, "-c", DOCTOR, "doctor", "--gpus"])
        except OSError as error:
            self.reason = f"could not be started: {error.strerror}"

    def check(self) -> Finding:
        """Wait for its end and return what it found."""
        if self.command is None:
            return check_doctor(None, self.reason)
        code = self.command.wait(LIMIT_SECONDS)
        if code is None:
            return check_doctor(None, f"did not end within {LIMIT_SECONDS} s")
        return check_doctor(code, self.command.output)

    def end(self) -> None:
        """Kill it with every process that it started."""
        if self.command is not None:
            self.command.end()


def check_doctor(code: int | None, report: str) -> Finding:
    """Check the result of `unsloth doctor --gpus`.

    Args:
        code: its exit status; None when it did not end in time or could not be started.
        report: its output.
    """
    hints = report.partition("=== Verdict:")[2].strip().splitlines()[1:]
    said = " ".join(line.strip().lstrip("- ") for line in hints if line.strip())
    if code == 0:
        return Finding("OK")
    if code is None:
        return warning(report or "did not end", "Run unsloth doctor --gpus by hand on this node.")
    if not said:
        last = report.strip().splitlines()[-1:] or [""]
        return warning(f"exit {code}: {last[0][:200]}", "Run unsloth doctor --gpus by hand.")
    return failure("PROBLEMS FOUND", said)


def needs_check(settings: Settings) -> bool:
    """Return whether an option that the libraries may refuse differs from its default."""
    defaults = Settings()
    return any(getattr(settings, name) != getattr(defaults, name) for name in CHECKED)


class TrainingArguments:
    """The check of optimizer, schedule and trainer_args as a run does it."""

    name = "training arguments"

    def __init__(self, settings: Settings) -> None:
        self.command: BackgroundCommand | None = None
        if not needs_check(settings):
            return
        self._folder = tempfile.TemporaryDirectory(prefix="unsloth_ddp_preflight_")
        path = Path(self._folder.name) / "settings.yaml"
        settings.save(path)
        self.command = BackgroundCommand([sys.executable, "-m", __name__, str(path)])

    def check(self) -> Finding:
        """Wait for its end and return what it found."""
        if self.command is None:
            return Finding("defaults")
        code = self.command.wait(LIMIT_SECONDS)
        lines = self.command.output.strip().splitlines() or ["nothing was printed"]
        if code == 0:
            return Finding("accepted")
        if code == REFUSED:
            return failure("refused", lines[-1])
        return not_checked(f"exit code {code}: {lines[-1][:200]}" if code else "no answer in time")

    def end(self) -> None:
        """Kill it and remove its files."""
        if self.command is not None:
            self.command.end()
            self._folder.cleanup()


def main(path: Path) -> int:
    """Check the settings of a file; print the reason and return the exit code of a run if they are refused."""
    from unsloth_ddp.training.early_checks import check_training_arguments

    try:
        check_training_arguments(Settings(**read_config(path)))
    except UserError as error:
        print(error)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
