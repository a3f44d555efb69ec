"""Ways in which a run ends in order, on every rank alike, without having finished."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from unsloth_ddp.distributed.exit_codes import EXIT_FAILURE, EXIT_STOPPED, describe_exit_code
from unsloth_ddp.distributed.signals import LAUNCHER_ENDED

if TYPE_CHECKING:
    from unsloth_ddp.sizing.ladder import OutOfMemory


class RunEnd(Exception):
    """The run ended in order before it was finished; the message says what is on the disk and how to continue.

    Every rank raises it at the same point, so the processes are taken down as after a finished run, unless one rank is
    `alone`: the others wait for it, and the watchdog ends them.
    """

    def __init__(self, message: str, exit_code: int = EXIT_FAILURE, *, alone: bool = False) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.alone = alone


def stopped(cause: str, checkpoint: Path, *, named: bool = True) -> RunEnd:
    """Return the end of a run that a signal or the time limit stopped, and whose state a complete checkpoint holds.

    A launcher that was killed is a failure, after which the job's script starts the run again.
    """
    code = EXIT_FAILURE if cause == LAUNCHER_ENDED else EXIT_STOPPED
    name = "" if named else f" with --run_name {checkpoint.parent.name}"
    again = f"the same command{name} resumes from {checkpoint}"
    return RunEnd(f"Stopped on {cause}; {again} ({describe_exit_code(code)}).", code)


def not_saved(folder: Path, problem: str, last: Path | None) -> RunEnd:
    """Return the end of a run whose result could not be written."""
    checkpoint = f"{last} is the last complete checkpoint" if last else "there is no checkpoint"
    return RunEnd(
        f"Training ended, but its result could not be written to {folder}: {problem}; {checkpoint}. "
        f"Make room, and run the same command again: it {'resumes from there' if last else 'trains again'}."
    )


def not_finished(folder: Path, what: str, problem: str, last: Path | None) -> RunEnd:
    """Return the end of a run that wrote the trained model, but not something that comes after it."""
    again = "it finishes the run" if last else "it trains again, as there is no checkpoint"
    return RunEnd(
        f"The trained model is in {folder}, but {what} could not be written: {problem}. Make room, and run the same "
        f"command again: {again}."
    )


def without_memory(error: OutOfMemory, step: int, last: Path | None, *, location: str) -> RunEnd:
    """Return the end of a run that ran out of memory in a step that could not be repeated with less.

    Args:
        last: the newest complete checkpoint.
        location: of the rank, where there are several; else empty.
    """
    ran_out = f"Memory ran out{f' on {location}' if location else ''} in step {step} with {error.rung}"
    alone = bool(location)
    if not error.lowest:
        resumes = f"resumes from {last} and" if last else "begins anew and"
        return RunEnd(
            f"{ran_out}. The other ranks wait for this pass, so it cannot be repeated; run the same command again: it "
            f"{resumes} uses less memory.",
            alone=alone,
        )
    checkpoint = f"{last} is the newest checkpoint" if last else "there is no checkpoint yet"
    return RunEnd(
        f"{ran_out}, which is the way that needs least; {checkpoint}. Use a smaller --max_length, --method qlora, or "
        "accelerate_configs/fsdp2.yaml, which shards the model.",
        alone=alone,
    )
