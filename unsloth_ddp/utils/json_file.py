"""Write JSON files that are complete or unchanged."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from unsloth_ddp.utils.errors import UserError, os_reason
from unsloth_ddp.utils.safe_files import write_new_file


def write_json(path: Path, content: Any) -> None:
    """Write `content` to `path` and create its folder; readers never see a partly written file.

    Raises:
        OSError: it cannot be written.
    """
    path = path.expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=2) + "\n"
    if path.exists() and not path.is_file():
        # A rename would replace a pipe or device, such as /dev/stdout.
        path.write_text(text, encoding="utf-8")
        return
    aside = path.with_name(f"{path.name}.partial")
    try:
        write_new_file(aside, text)
        aside.replace(path)
    except OSError:
        # On a full disk, part of the file was written.
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def write_as_asked(option: str, path: Path, content: Any) -> None:
    """Call write_json for the file that a command-line option names.

    Raises:
        UserError: it cannot be written.
    """
    try:
        write_json(path, content)
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written: {os_reason(error)}; name another file.") from None
