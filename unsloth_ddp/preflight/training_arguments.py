"""Check the training arguments as a run does, in a process outside the launcher's job, which TRL's config would join."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.parse import read_config
from unsloth_ddp.preflight.checks import Finding, failure, not_checked
from unsloth_ddp.utils.errors import UserError

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "GROUP_")
# The libraries take seconds to import.
LIMIT_SECONDS = 150
# The exit code of a run that a user's mistake ends.
REFUSED = UserError.exit_code
# Options whose values the libraries may refuse; with their defaults the check has nothing to find.
CHECKED = ("optim", "lr_scheduler_type", "report_to", "trainer_args")


def check_in_process(settings: Settings) -> Finding:
    """Check optimizer, schedule, trackers and trainer_args as a run does."""
    defaults = Settings()
    if all(getattr(settings, name) == getattr(defaults, name) for name in CHECKED):
        return Finding("defaults")
    with tempfile.TemporaryDirectory(prefix="unsloth_ddp_preflight_") as folder:
        path = Path(folder) / "settings.yaml"
        settings.save(path)
        return run_and_judge([sys.executable, "-m", __name__, str(path)])


def run_and_judge(words: list[str]) -> Finding:
    """Run the check's command; return what it found."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(LAUNCHER_PREFIXES)
    }
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environ, timeout=LIMIT_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return not_checked("no answer in time")
    if done.returncode == 0:
        return Finding("accepted")
    last = (done.stdout.strip().splitlines() or ["nothing was printed"])[-1]
    return (
        failure("refused", last)
        if done.returncode == REFUSED
        else not_checked(f"exit code {done.returncode}: {last[:200]}")
    )


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
