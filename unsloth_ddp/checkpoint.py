"""Which checkpoint a run goes on from, and what CPU processes need to read it."""

from __future__ import annotations

from pathlib import Path

from unsloth_ddp.errors import UserError


def find_checkpoint(wanted: str | None, run_folder: Path) -> str | None:
    """The checkpoint folder to resume from: the one named, or with `true` the newest of this run.

    Raises:
        UserError: there is none, or it lacks the trainer's state.
    """
    if wanted is None or wanted.lower() == "false":
        return None
    if wanted.lower() == "true":
        found = [p for p in run_folder.glob("checkpoint-*") if p.name.rpartition("-")[2].isdigit()]
        if not found:
            raise UserError(
                f"resume_from_checkpoint: {run_folder} holds no checkpoint; leave the option out to start anew."
            )
        path = max(found, key=lambda p: int(p.name.rpartition("-")[2]))
    else:
        path = Path(wanted).expanduser()
    if not (path / "trainer_state.json").is_file():
        raise UserError(f"resume_from_checkpoint {path} is not a whole checkpoint: it has no trainer_state.json.")
    return str(path)


def make_cpu_checkpoints_readable() -> None:
    """Teach torch.load the location tag "cpu:0" that CPU processes write and no release of torch reads back."""
    import torch

    torch.serialization.register_package(
        100,
        lambda storage: None,
        lambda storage, location: storage if location.startswith("cpu:") else None,
    )
