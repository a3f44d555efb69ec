"""Write JSON files that are complete or unchanged, and parse JSON text in which no key is given twice."""

import json
from pathlib import Path
from typing import Any

from unsloth_ddp.utils.errors import UserError, os_reason
from unsloth_ddp.utils.files.safe import write_whole


def write_json(path: Path, content: Any) -> None:
    """Write `content` to `path` and create its folder; readers never see a partly written file.

    Raises:
        OSError: it cannot be written.
    """
    path = path.expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=2) + "\n")


def write_as_asked(option: str, path: Path, content: Any) -> None:
    """Call write_json for the file that a command-line option names.

    Raises:
        UserError: it cannot be written.
    """
    try:
        write_json(path, content)
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written: {os_reason(error)}; name another file.") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)[:100]!r} is given twice")
    return values


# As json.loads: malformed text raises json.JSONDecodeError, other faults ValueError or RecursionError.
DECODER = json.JSONDecoder(object_pairs_hook=_unique)
