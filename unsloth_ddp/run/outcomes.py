"""Ways in which a run ends in order, on every rank alike, without having finished."""

from __future__ import annotations

from pathlib import Path

from unsloth_ddp.distributed.exit_codes import EXIT_FAILURE, EXIT_STOPPED, describe_exit_code
from unsloth_ddp.distributed.signals import LAUNCHER_ENDED


class RunEnd(Exception):
    """The run ended in order before it was finished; the message says what is on the disk and how to continue.

    Every rank raises it at the same point, so the processes are taken down as after a finished run.
    """

    exit_code = EXIT_FAILURE


class RunStopped(RunEnd):
    """A signal or the time limit stopped the run, and a complete checkpoint holds its state.

    A launcher that was killed is a failure, after which the job's script starts the run again.
    """

    exit_code = EXIT_STOPPED

    def __init__(self, cause: str, checkpoint: Path, *, named: bool = True) -> None:
        self.exit_code = EXIT_FAILURE if cause == LAUNCHER_ENDED else EXIT_STOPPED
        name = "" if named else f" with --run_name {checkpoint.parent.name}"
        super().__init__(
            f"Stopped on {cause}; the same command{name} resumes from {checkpoint} ({describe_exit_code(self.exit_code)})."
        )


class StopNotSaved(RunEnd):
    """A signal or the time limit stopped the run, and no complete checkpoint holds its state."""

    def __init__(self, cause: str, problem: str | None) -> None:
        super().__init__(f"Stopped on {cause} without a complete checkpoint: {problem}.")


class ResultNotSaved(RunEnd):
    """Training ended, and its result could not be written."""

    def __init__(self, folder: Path, problem: str, last: Path | None) -> None:
        kept = f"{last} is the last complete checkpoint" if last else "there is no checkpoint"
        super().__init__(
            f"Training ended, but its result could not be written to {folder}: {problem}; {kept}. "
            f"Make room, and run the same command again: it {'resumes from there' if last else 'trains again'}."
        )


class RunNotFinished(RunEnd):
    """The trained model is written, and something that comes after it could not be written."""

    def __init__(self, folder: Path, what: str, problem: str, last: Path | None) -> None:
        again = "it finishes the run" if last else "it trains again, as there is no checkpoint"
        super().__init__(
            f"The trained model is in {folder}, but {what} could not be written: {problem}. Make room, and run the same "
            f"command again: {again}."
        )


class FolderRemoved(RunEnd):
    """The result is written, but somebody removed the run's folder while it trained."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            f"The result is in {folder}, but that folder was removed while the run trained, and with it the logs and "
            "checkpoints that it held then; look for what removes it (a clean-up of scratch disks, say)."
        )


class NoCheckpointWritten(RunEnd):
    """The result is written, but checkpoints were due and none could be written."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"The result is written and complete, but no checkpoint was: {problem}. Nothing is left to do for this run; look "
            "after the disk before the next one."
        )
