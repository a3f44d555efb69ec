"""Check the training arguments as a run does, in a process of its own beside the checks of a node.

A process of its own, because TRL's config joins the launcher's job and its imports take seconds.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.parse import read_config
from unsloth_ddp.preflight.background import BackgroundCommand
from unsloth_ddp.preflight.checks import Check, not_checked
from unsloth_ddp.utils.errors import UserError

NAME = "training arguments"
LIMIT_SECONDS = 150
# The exit code of a run that a user's mistake ends.
REFUSED = UserError.exit_code
# Options whose values the libraries may refuse; with their defaults the check has nothing to find.
CHECKED = ("optim", "lr_scheduler_type", "report_to", "trainer_args")


def needs_check(settings: Settings) -> bool:
    """Return whether an option that the libraries may refuse differs from its default."""
    defaults = Settings()
    return any(getattr(settings, name) != getattr(defaults, name) for name in CHECKED)


class TrainingArguments:
    """The check of optimizer, schedule and trainer_args, run in the background."""

    def __init__(self, settings: Settings) -> None:
        self.command: BackgroundCommand | None = None
        if not needs_check(settings):
            return
        self._folder = tempfile.TemporaryDirectory(prefix="unsloth_ddp_preflight_")
        path = Path(self._folder.name) / "settings.yaml"
        settings.save(path)
        self.command = BackgroundCommand([sys.executable, "-m", __name__, str(path)])

    def check(self, node: int) -> Check:
        """Wait for its end and return its row of the table."""
        if self.command is None:
            return Check(NAME, {node: "defaults"})
        code = self.command.wait(LIMIT_SECONDS)
        lines = self.command.output.strip().splitlines() or ["nothing was printed"]
        if code == 0:
            return Check(NAME, {node: "accepted"})
        if code == REFUSED:
            return Check(NAME, {node: "refused"}, "failure", lines[-1])
        return not_checked(NAME, node, f"exit code {code}: {lines[-1][:200]}" if code else "no answer in time")

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
