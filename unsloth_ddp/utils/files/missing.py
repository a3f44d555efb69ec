"""Say where a missing file was looked for, or which file or folder has a similar name."""

import difflib
from collections.abc import Callable, Collection
from pathlib import Path


def similar_file(path: Path, suffixes: Collection[str]) -> Path | None:
    """Return the file with one of `suffixes` (lower case) whose path is `path` with one part corrected, or None."""
    return similar_path(path, lambda near: near.suffix.lower() in suffixes and near.is_file())


def similar_path(path: Path, accept: Callable[[Path], bool]) -> Path | None:
    """Return the most similar path that `accept` takes, with the first part of `path` that is missing replaced."""
    try:
        missing = next((part for part in reversed([path, *path.parents]) if not part.exists()), None)
        if missing is None:
            return None
        rest = path.relative_to(missing)
        candidates = {other.name: other / rest for other in missing.parent.iterdir() if accept(other / rest)}
    except (OSError, ValueError):
        return None
    near = difflib.get_close_matches(missing.name, candidates, 1, 0.8)
    return candidates[near[0]] if near else None


def looked_in(path: Path) -> str:
    """Return " in FOLDER" for a relative path, which was looked for in the working directory; "" for any other."""
    return "" if path.is_absolute() else f" in {Path.cwd()}"
