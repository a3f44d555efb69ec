"""Say where a missing file was looked for, or which file in its folder has a similar name."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path


def similar_file(path: Path, suffixes: Collection[str]) -> Path | None:
    """Return the file with one of `suffixes` (lower case) in the folder of `path` whose name is the most similar to its name."""
    try:
        names = [file.name for file in path.parent.iterdir() if file.suffix.lower() in suffixes and file.is_file()]
    except (OSError, ValueError):
        return None
    near = difflib.get_close_matches(path.name, names, 1, 0.8)
    return path.parent / near[0] if near else None


def looked_in(path: Path) -> str:
    """Return " in FOLDER" for a relative path, which was looked for in the working directory; "" for any other."""
    return "" if path.is_absolute() else f" in {Path.cwd()}"
