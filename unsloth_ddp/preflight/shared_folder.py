"""Find out whether the nodes see one output folder: node 0 writes a file there and the others look for it."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

POLL_SECONDS = 0.2
# A network file system may show a new file a little later.
TOKEN_SECONDS = 6


def write_token(folder: Path) -> tuple[Path, str] | None:
    """Write on node 0 a file with a random content; return its path and content, None where it cannot be written."""
    content = secrets.token_hex(8)
    path = folder / f".preflight-token-{content}"
    try:
        path.write_text(content)
    except OSError:
        return None
    return path, content


def find_token(folder: Path, name: str, content: str) -> bool | None:
    """Return on another node whether node 0's file is in its output folder; None where it cannot look there."""
    # The name came over the network.
    path = folder / Path(name).name
    deadline = time.monotonic() + TOKEN_SECONDS
    while True:
        try:
            return path.read_text() == content
        except FileNotFoundError:
            pass
        except (OSError, ValueError):
            return None
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
