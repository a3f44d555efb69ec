"""Find the checkpoint folders of a run."""

from __future__ import annotations

import re
from pathlib import Path

from unsloth_ddp.checkpoints import manifest
from unsloth_ddp.checkpoints.manifest import Damaged

STEP_FOLDER = re.compile(r"checkpoint-(\d{1,18})")


def is_whole(folder: Path) -> bool:
    """Return whether a checkpoint was written to its end; only its manifest is read."""
    try:
        manifest.read_manifest(folder)
    except Damaged:
        return False
    return True


def step_folders(run_folder: Path) -> dict[int, Path]:
    """Return every folder that is named like a checkpoint, whole or not, by its step."""
    if not run_folder.is_dir():
        return {}
    named = ((STEP_FOLDER.fullmatch(path.name), path) for path in run_folder.iterdir())
    return {int(match[1]): path for match, path in named if match and path.is_dir()}
