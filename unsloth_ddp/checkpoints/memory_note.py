"""Keep with a run the rung that ran out of memory and could not be left, so that its next start begins below it."""

import dataclasses
import json
from pathlib import Path

from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.forward.gradient_checkpointing import KINDS
from unsloth_ddp.sizing.ladder import Rung
from unsloth_ddp.utils.files.json import write_json

FILE_NAME = "out_of_memory.json"


def note_rung(folder: Path, rung: Rung) -> None:
    """Write a rung into the run's folder, which only this node may see; the rank that ran out of memory calls this."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE_NAME, dataclasses.asdict(rung))


def noted_rung(runtime: Runtime, folder: Path) -> Rung | None:
    """Return the lowest rung that a node has noted, the same on every rank; None without one. Every rank calls this."""
    noted = [rung for rung in runtime.gather(_read(folder)) if rung is not None]
    return max(noted, key=lambda rung: (KINDS.index(rung.kind), -rung.rows), default=None)


def _read(folder: Path) -> Rung | None:
    try:
        rung = Rung(**json.loads((folder / FILE_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return rung if rung.kind in KINDS else None
